"""Which scheme a checkpoint is in."""

from __future__ import annotations

from typing import assert_never

from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.quantization_config import QuantScheme, parse_quantization
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.reader import CONFIG_FILE
from freetokend.ftw.schemes.compressed_tensors import CompressedTensorsScheme
from freetokend.ftw.schemes.fp8 import Fp8Scheme
from freetokend.ftw.schemes.gguf import GgufScheme
from freetokend.ftw.schemes.gpt_oss import GptOssScheme
from freetokend.ftw.schemes.gptq import GptqScheme
from freetokend.ftw.schemes.modelopt import (
    MODELOPT_FILE,
    ModelOptScheme,
    read_modelopt_file,
    refuse_unknown_producer,
)
from freetokend.ftw.schemes.scheme import PlainScheme, Scheme


def open_scheme(checkpoint: Checkpoint) -> Scheme:
    """The scheme of `checkpoint`, as its config.json (or its files) say.

    ModelDataError (MODEL_UNSUPPORTED) names a scheme that is not implemented.
    """
    config = parse_quantization(checkpoint.config, CONFIG_FILE)
    if checkpoint.gguf_values is not None:
        if config is not None:
            raise ModelDataError(
                "config.json has a quantization_config and the model is a GGUF file; use the "
                "config.json of the model that was not quantised."
            )
        return GgufScheme(checkpoint)
    exported = read_modelopt_file(checkpoint)
    if config is None:
        if exported is not None:
            return ModelOptScheme(checkpoint)
        refuse_unknown_producer(checkpoint)
        return PlainScheme(checkpoint)
    match config.scheme:
        case QuantScheme.FP8:
            return Fp8Scheme(checkpoint)
        case QuantScheme.COMPRESSED_TENSORS:
            return CompressedTensorsScheme(checkpoint, config)
        case QuantScheme.MODELOPT:
            if not config.weights and exported is None:
                raise ModelDataError(
                    f"config.json names ModelOpt without saying what it did, and {MODELOPT_FILE}, "
                    f"which would, is missing. Download it.",
                    reason=Reason.MODEL_UNSUPPORTED,
                )
            return ModelOptScheme(checkpoint)
        case QuantScheme.MXFP4:
            return GptOssScheme(checkpoint)
        case QuantScheme.GPTQ | QuantScheme.AWQ:
            return GptqScheme(checkpoint, config)
        case _:
            assert_never(config.scheme)
