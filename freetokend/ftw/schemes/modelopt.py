"""NVFP4 as NVIDIA's Model Optimizer exports it.

`NAME.weight` u8 [N, K/2], `NAME.weight_scale` e4m3 [N, K/16] and `NAME.weight_scale_2` fp32, which
multiplies (other producers store its reciprocal): w = code * weight_scale * weight_scale_2.
"""

from __future__ import annotations

import re
from typing import Final

from freetokend.core.config_fields import ConfigFields
from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.quantization_config import QuantizationConfig, QuantScheme, parse_modelopt
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.matrix import MatrixSource
from freetokend.ftw.reader import read_json_object
from freetokend.ftw.schemes.fp4 import open_nvfp4
from freetokend.ftw.schemes.parts import WEIGHT, Parts
from freetokend.ftw.schemes.scheme import PlainScheme

MODELOPT_FILE: Final = "hf_quant_config.json"
_PRODUCER: Final = "modelopt"
# Factors of quantised keys and values, which are kept in bf16 here.
_KV_SCALE: Final = re.compile(r".*\.(k_proj\.k_scale|v_proj\.v_scale|k_scale|v_scale)")


def read_modelopt_file(checkpoint: Checkpoint) -> QuantizationConfig | None:
    """What the exporter's own file says; None without one. ModelDataError as the parser."""
    path = checkpoint.directory / MODELOPT_FILE
    if not path.exists():
        return None
    fields = ConfigFields(read_json_object(path, "the quantisation scheme"), MODELOPT_FILE)
    producer = fields.nested("producer").text("name", "unknown")
    if producer != _PRODUCER:
        raise fields.unsupported(
            f"the producer is {producer!r}; only {_PRODUCER}'s form of this file is known."
        )
    return parse_modelopt(fields.nested("quantization"))


def refuse_unknown_producer(checkpoint: Checkpoint) -> None:
    """ModelDataError when tensors look like NVFP4 and nothing says who wrote them."""
    for name in checkpoint.tensors:
        if name.endswith((".weight_scale_2", ".weight_global_scale")):
            raise ModelDataError(
                f"the checkpoint holds NVFP4 weights (tensor {name}), but neither config.json nor "
                f"{MODELOPT_FILE} says which program wrote them. Some store the factor over a "
                f"whole matrix and others its reciprocal, so their values cannot be known. Get "
                f"the file that belongs to the checkpoint.",
                reason=Reason.MODEL_UNSUPPORTED,
            )


class ModelOptScheme(PlainScheme):
    """A checkpoint with ModelOpt's NVFP4 matrices; every other tensor is plain."""

    name = QuantScheme.MODELOPT.value

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._parts = Parts(checkpoint)
        self.consumed = self._parts.consumed

    def matrix(self, name: str, rows: int, columns: int) -> MatrixSource | None:
        """See `Scheme`."""
        weight = self._parts.find(name)
        base = name.removesuffix(WEIGHT)
        if weight is None or weight.dtype != "U8":
            return None
        factor = self._parts.need(base + ".weight_scale_2", [(), (1,)], ("F32",), of=name)
        self._parts.drop(base + ".input_scale")
        return open_nvfp4(
            self._parts,
            name,
            name,
            base + ".weight_scale",
            rows,
            columns,
            self._parts.scalar(factor),
        )

    def ignorable(self, name: str) -> bool:
        """See `Scheme`."""
        return _KV_SCALE.fullmatch(name) is not None
