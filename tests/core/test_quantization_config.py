"""Which quantisation schemes are understood, and that all others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.model_config import parse_model_config
from freetokend.core.quantization_config import (
    Coding,
    QuantizationConfig,
    QuantScheme,
    StoredWeights,
    parse_quantization,
)

Config = dict[str, Any]
FP8: Config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ: Config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: Config = {"quant_method": "awq", "bits": 4, "group_size": 64}
MODELOPT: Config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def compressed(form: str, weights: Config | None, **more: Any) -> Config:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    } | more


def packed(**weights: Any) -> Config:
    defaults = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    return compressed("pack-quantized", defaults | weights)


def parse(config: Config) -> QuantizationConfig | None:
    return parse_quantization({"quantization_config": config}, "config.json")


def stored(coding: Coding, group: int, *, zero_points: bool = False) -> StoredWeights:
    return StoredWeights(coding=coding, group_columns=group, zero_points=zero_points)


KNOWN: dict[str, tuple[Config, QuantScheme, StoredWeights]] = {
    "fp8": (FP8 | {"fmt": "e4m3"}, QuantScheme.FP8, stored(Coding.FP8, 128)),
    "gpt-oss": ({"quant_method": "mxfp4"}, QuantScheme.MXFP4, stored(Coding.MXFP4, 32)),
    "modelopt": (MODELOPT, QuantScheme.MODELOPT, stored(Coding.NVFP4, 16)),
    "gptq": (GPTQ, QuantScheme.GPTQ, stored(Coding.INT4, 128)),
    "gptq, 8 bits": (
        GPTQ | {"bits": 8, "sym": False},
        QuantScheme.GPTQ,
        stored(Coding.INT8, 128, zero_points=True),
    ),
    "awq": (AWQ, QuantScheme.AWQ, stored(Coding.INT4, 64, zero_points=True)),
    "packed": (packed(), QuantScheme.COMPRESSED_TENSORS, stored(Coding.INT4, 32)),
    "packed with zero points": (
        packed(num_bits=8, group_size=128, symmetric=False),
        QuantScheme.COMPRESSED_TENSORS,
        stored(Coding.INT8, 128, zero_points=True),
    ),
    "compressed fp8": (
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        ),
        QuantScheme.COMPRESSED_TENSORS,
        stored(Coding.FP8, 128),
    ),
    "compressed nvfp4": (
        compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        QuantScheme.COMPRESSED_TENSORS,
        stored(Coding.NVFP4, 16),
    ),
    "compressed mxfp4": (
        compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
        QuantScheme.COMPRESSED_TENSORS,
        stored(Coding.MXFP4, 32),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str) -> None:
    config, scheme, weights = KNOWN[name]
    parsed = parse(config)
    assert parsed is not None
    assert parsed.scheme is scheme
    assert parsed.weights == (weights,)
    assert parsed.zero_offset == (scheme is QuantScheme.GPTQ)


def test_second_form_of_gptq_has_plain_zero_points() -> None:
    parsed = parse(GPTQ | {"checkpoint_format": "gptq_v2"})
    assert parsed is not None
    assert parsed.zero_offset == 0


def test_modelopt_may_say_the_rest_elsewhere() -> None:
    parsed = parse({"quant_method": "modelopt"})
    assert parsed == QuantizationConfig(scheme=QuantScheme.MODELOPT, weights=())


def test_not_quantised() -> None:
    assert parse_quantization({}, "config.json") is None
    assert parse_quantization({"quantization_config": None}, "config.json") is None


CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
UNKNOWN: dict[str, tuple[Config, str]] = {
    **{
        method: ({"quant_method": method}, f"method '{method}' is not implemented; .*gptq, awq")
        for method in ("bitsandbytes", "aqlm", "exl2", "hqq", "quanto", "torchao", "vptq", "eetq",
                       "fbgemm_fp8", "auto-round", "quark", "bitnet", "nvfp4")
    },
    "old bitsandbytes": ({"load_in_4bit": True}, "method 'bitsandbytes'"),
    "no method": ({"bits": 4}, "quant_method is missing"),
    "fp8 per tensor": ({"quant_method": "fp8"}, r"one scale per tensor or channel"),
    "fp8 in other blocks": (FP8 | {"weight_block_size": [64, 128]},
                            r"weight_block_size \[64, 128\]"),
    "fp8 of another form": (FP8 | {"fmt": "e5m2"}, "form 'e5m2'"),
    "modelopt fp8": (MODELOPT | {"quant_algo": "FP8"}, "quant_algo 'FP8'"),
    "modelopt awq": (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
    "gptq, 3 bits": (GPTQ | {"bits": 3}, "GPTQ with 3 bits"),
    "gptq per channel": (GPTQ | {"group_size": -1}, "GPTQ with group_size -1"),
    "gptq for marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    "gptq with overrides": (GPTQ | {"dynamic": {"-:gate": {}, "+:down": {"bits": 8}}}, r"\+:down"),
    "awq for gemv": (AWQ | {"version": "GEMV"}, "AWQ version 'gemv'"),
    "awq, symmetric": (AWQ | {"zero_point": False}, "AWQ without zero points"),
    "awq, 8 bits": (AWQ | {"bits": 8}, "AWQ with 8 bits"),
    "int8 per channel": (compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}),
                         "int-quantized with int weights of 8 bits per channel"),
    "fp8 per channel": (compressed("float-quantized", CHANNEL),
                        "float-quantized with float weights of 8 bits per channel"),
    "compressed fp8 in other blocks": (
        compressed("float-quantized", CHANNEL | {"strategy": "block", "block_structure": [1, 128]}),
        r"block_structure \[1, 128\]"),
    "mxfp8": (compressed("mxfp8-quantized", CHANNEL | {"strategy": "group", "group_size": 32}),
              "mxfp8-quantized with"),
    "packed per channel": (packed(strategy="channel"), "pack-quantized with int weights of 4 bits"),
    "packed, 2 bits": (packed(num_bits=2), "pack-quantized with int weights of 2 bits per group"),
    "packed in other groups": (packed(group_size=256), "per group of 256"),
    "nvfp4 with zero points": (
        compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group",
                                            "group_size": 16, "symmetric": False}),
        "with zero points"),
    "activations only": (compressed("int-quantized", None), "quantises activations only"),
    "sparse": (packed() | {"sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
    "rotated": (packed() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    "not compressed": (packed() | {"quantization_status": "frozen"},
                       "quantization_status 'frozen'"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_is_refused_by_name(name: str) -> None:
    config, message = UNKNOWN[name]
    with pytest.raises(ModelDataError, match="quantization_config.*" + message) as caught:
        parse(config)
    assert caught.value.reason is Reason.MODEL_UNSUPPORTED


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": "four"}, "bits is 'four'"),
        (FP8 | {"quant_method": 8}, "quant_method is 8"),
        (MODELOPT | {"group_size": 32}, "group_size is 32; NVFP4 has 16"),
        (packed() | {"config_groups": {}}, "config_groups is missing or empty"),
        (packed() | {"config_groups": {"group_0": 1}}, "group_0 is 1; expected an object"),
    ],
)
def test_nonsense_is_invalid(config: Config, message: str) -> None:
    with pytest.raises(ModelDataError, match=message) as caught:
        parse(config)
    assert caught.value.reason is Reason.MODEL_INVALID


def test_older_names_are_not_overlooked() -> None:
    with pytest.raises(ModelDataError, match="compression_config is the older name"):
        parse_quantization({"compression_config": {}}, "config.json")


def test_the_model_configuration_checks_it() -> None:
    values = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
    }
    assert parse_model_config(values | {"quantization_config": FP8}) == parse_model_config(values)
    with pytest.raises(ModelDataError, match="'hqq'"):
        parse_model_config(values | {"quantization_config": {"quant_method": "hqq"}})
