"""How a checkpoint says that its weights are quantised: `quantization_config` of config.json.

Only what decides how bytes are read is kept. Everything that is not implemented, or that would
change the function the model computes, is refused by name (MODEL_UNSUPPORTED). Which modules are
quantised is not taken from here: their tensors show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from freetokend.core.config_fields import ConfigFields

QUANTIZATION_FIELD: Final = "quantization_config"
# Quantised weights come in blocks of this many rows and columns.
FP8_BLOCK: Final = (128, 128)
_GROUPS: Final = (32, 64, 128)
_NVFP4_GROUP: Final = 16
_MXFP4_GROUP: Final = 32
_BITS: Final = (4, 8)


class QuantScheme(StrEnum):
    """Who wrote the quantised tensors, which decides their names and layout."""

    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    MXFP4 = "mxfp4"
    GPTQ = "gptq"
    AWQ = "awq"


class Coding(StrEnum):
    """What one stored weight is."""

    FP8 = "fp8"
    INT4 = "int4"
    INT8 = "int8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """A kind of weight tensor that a checkpoint may hold; group_columns share a scale."""

    coding: Coding
    group_columns: int
    zero_points: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """scheme, and the kinds of weights in it (several where modules differ).

    zero_offset: what is to be added to a stored zero point (1 in the first GPTQ form);
    reorders_columns: columns went to groups in an order that the files have to tell.
    """

    scheme: QuantScheme
    weights: tuple[StoredWeights, ...]
    zero_offset: int = 0
    reorders_columns: bool = False


def parse_quantization(values: Mapping[str, object], where: str) -> QuantizationConfig | None:
    """The scheme of a config.json object (`where`: its name); None when it is not quantised.

    ModelDataError with MODEL_UNSUPPORTED names what is not implemented, with MODEL_INVALID what
    makes no sense.
    """
    outer = ConfigFields(values, where)
    for other in ("compression_config", "quantize_config"):
        if outer.has(other):
            raise outer.unsupported(
                f"{other} is the older name of a scheme that is not implemented; "
                f"{QUANTIZATION_FIELD} is read."
            )
    if not outer.has(QUANTIZATION_FIELD):
        return None
    fields = outer.nested(QUANTIZATION_FIELD)
    method = _method(fields)
    parse = _PARSERS.get(method)
    if parse is None:
        raise fields.unsupported(
            f"the quantisation method {method!r} is not implemented; implemented are "
            f"{', '.join(_PARSERS)}."
        )
    return parse(fields)


def parse_modelopt(fields: ConfigFields) -> QuantizationConfig:
    """As `parse_quantization`, for an object that ModelOpt wrote (also in hf_quant_config.json)."""
    algorithm = fields.text("quant_algo")
    if algorithm != "NVFP4":
        raise fields.unsupported(
            f"ModelOpt's quant_algo {algorithm!r} is not implemented; NVFP4 is."
        )
    group = fields.integer("group_size", _NVFP4_GROUP, low=-1)
    if group != _NVFP4_GROUP:
        raise fields.invalid(f"group_size is {group}; NVFP4 has {_NVFP4_GROUP}.")
    return QuantizationConfig(
        scheme=QuantScheme.MODELOPT,
        weights=(StoredWeights(coding=Coding.NVFP4, group_columns=_NVFP4_GROUP),),
    )


def _method(fields: ConfigFields) -> str:
    if fields.has("quant_method"):
        return fields.text("quant_method").lower()
    if fields.has("load_in_4bit") or fields.has("load_in_8bit"):
        return "bitsandbytes"  # its first versions wrote no method
    raise fields.unsupported("quant_method is missing, so the weights cannot be understood.")


def _fp8(fields: ConfigFields) -> QuantizationConfig:
    form = fields.text("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise fields.unsupported(f"fp8 of the form {form!r} is not implemented; e4m3 is.")
    block = fields.raw("weight_block_size")
    if block is None:
        raise fields.unsupported(
            "fp8 with one scale per tensor or channel (weight_block_size is missing) is not "
            "implemented; blocks of 128 x 128 are."
        )
    return _fp8_blocks(fields, QuantScheme.FP8, "weight_block_size", block)


def _fp8_blocks(
    fields: ConfigFields, scheme: QuantScheme, name: str, block: object
) -> QuantizationConfig:
    if block != list(FP8_BLOCK):
        raise fields.unsupported(
            f"fp8 with {name} {block!r:.80} is not implemented; {list(FP8_BLOCK)} is."
        )
    weights = StoredWeights(coding=Coding.FP8, group_columns=FP8_BLOCK[1])
    return QuantizationConfig(scheme=scheme, weights=(weights,))


def _mxfp4(_: ConfigFields) -> QuantizationConfig:
    weights = StoredWeights(coding=Coding.MXFP4, group_columns=_MXFP4_GROUP)
    return QuantizationConfig(scheme=QuantScheme.MXFP4, weights=(weights,))


def _modelopt(fields: ConfigFields) -> QuantizationConfig:
    if not fields.has("quant_algo") and not fields.has("config_groups"):
        # The exporter's own file beside config.json then says it; see freetokend.ftw.schemes.
        return QuantizationConfig(scheme=QuantScheme.MODELOPT, weights=())
    return parse_modelopt(fields)


def _integers(fields: ConfigFields, method: str, *, zero_points: bool) -> StoredWeights:
    bits = fields.integer("bits", low=1, high=64)
    if bits not in _BITS:
        raise fields.unsupported(f"{method} with {bits} bits is not implemented; 4 and 8 are.")
    group = fields.integer("group_size", low=-1)
    if group not in _GROUPS:
        raise fields.unsupported(
            f"{method} with group_size {group} is not implemented; "
            f"{', '.join(map(str, _GROUPS))} are."
        )
    coding = Coding.INT4 if bits == 4 else Coding.INT8
    return StoredWeights(coding=coding, group_columns=group, zero_points=zero_points)


def _gptq(fields: ConfigFields) -> QuantizationConfig:
    form = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if fields.flag("is_marlin_format", False):
        form = "marlin"
    if form not in ("gptq", "gptq_v2"):
        raise fields.unsupported(
            f"the GPTQ checkpoint_format {form!r} is not implemented; gptq and gptq_v2 are."
        )
    overrides = fields.raw("dynamic")
    if isinstance(overrides, dict):
        changed = sorted(key for key in overrides if not str(key).startswith("-:"))
        if changed:
            raise fields.unsupported(
                f"GPTQ with other settings for some modules (dynamic: {changed[0]!r:.80}) is not "
                f"implemented; only modules left out (-:) are."
            )
    weights = _integers(fields, "GPTQ", zero_points=not fields.flag("sym", True))
    return QuantizationConfig(
        scheme=QuantScheme.GPTQ,
        weights=(weights,),
        zero_offset=1 if form == "gptq" else 0,
        reorders_columns=fields.flag("desc_act", False),
    )


def _awq(fields: ConfigFields) -> QuantizationConfig:
    version = fields.text("version", fields.text("format", "gemm")).lower()
    if version != "gemm":
        raise fields.unsupported(f"AWQ version {version!r} is not implemented; gemm is.")
    if not fields.flag("zero_point", True):
        raise fields.unsupported("AWQ without zero points is not implemented.")
    weights = _integers(fields, "AWQ", zero_points=True)
    if weights.coding is not Coding.INT4:
        raise fields.unsupported("AWQ with 8 bits is not implemented; 4 bits are.")
    return QuantizationConfig(scheme=QuantScheme.AWQ, weights=(weights,))


def _compressed_tensors(fields: ConfigFields) -> QuantizationConfig:
    status = fields.text("quantization_status", "compressed")
    if status != "compressed":
        raise fields.unsupported(
            f"compressed-tensors with quantization_status {status!r} is not implemented; "
            f"compressed is."
        )
    sparsity = fields.nested("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise fields.unsupported(
            f"compressed-tensors with sparsity {sparsity!r} is not implemented."
        )
    if fields.raw("transform_config"):
        raise fields.unsupported("compressed-tensors with transform_config is not implemented.")
    form = fields.text("format")
    groups = fields.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.invalid("config_groups is missing or empty; it says how weights are stored.")
    named = fields.nested("config_groups")
    weights = [_compressed_group(named.nested(str(name)), form) for name in groups]
    return QuantizationConfig(
        scheme=QuantScheme.COMPRESSED_TENSORS, weights=tuple(dict.fromkeys(weights))
    )


def _compressed_group(group: ConfigFields, form: str) -> StoredWeights:
    form = group.text("format", form)
    if not group.has("weights"):
        raise group.unsupported("a scheme that quantises activations only is not implemented.")
    weights = group.nested("weights")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8, high=64)
    strategy = weights.text("strategy", "tensor")
    size = weights.integer("group_size", 0, low=-1)
    symmetric = weights.flag("symmetric", True)
    shown = f"{form} with {kind} weights of {bits} bits per {strategy}"
    match form, kind, bits, strategy:
        case "pack-quantized", "int", 4 | 8, "group":
            if size not in _GROUPS:
                raise weights.unsupported(
                    f"{shown} of {size} is not implemented; groups of "
                    f"{', '.join(map(str, _GROUPS))} are."
                )
            coding = Coding.INT4 if bits == 4 else Coding.INT8
            return StoredWeights(coding=coding, group_columns=size, zero_points=not symmetric)
        case "float-quantized", "float", 8, "block":
            block = weights.raw("block_structure")
            return _fp8_blocks(
                weights, QuantScheme.COMPRESSED_TENSORS, "block_structure", block
            ).weights[0]
        case "nvfp4-pack-quantized", "float", 4, "tensor_group" | "group" if size == _NVFP4_GROUP:
            coding = Coding.NVFP4
        case "mxfp4-pack-quantized", "float", 4, "group" if size == _MXFP4_GROUP:
            coding = Coding.MXFP4
        case _:
            raise weights.unsupported(
                f"{shown} is not implemented; pack-quantized int 4 and 8 in groups, "
                f"float-quantized 8 in blocks, nvfp4- and mxfp4-pack-quantized are."
            )
    if not symmetric:
        raise weights.unsupported(f"{shown} with zero points is not implemented.")
    return StoredWeights(coding=coding, group_columns=size)


_PARSERS: Final[Mapping[str, Callable[[ConfigFields], QuantizationConfig]]] = MappingProxyType(
    {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
        "mxfp4": _mxfp4,
        "gptq": _gptq,
        "awq": _awq,
    }
)
