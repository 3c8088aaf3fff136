"""compressed-tensors (llm-compressor): pack-quantized, float-quantized, nvfp4 and mxfp4.

pack-quantized: `NAME.weight_packed` int32 along the rows, lowest bits first, of value + 8 (or
+ 128); `NAME.weight_scale` [N, K/G]; `NAME.weight_zero_point` int32 [N/8, K/G], packed down the
rows in the same way; `NAME.weight_shape`.
float-quantized: `NAME.weight` e4m3 and `NAME.weight_scale` per block of 128 x 128.
nvfp4: `NAME.weight_packed` u8, `NAME.weight_scale` e4m3, and `NAME.weight_global_scale`, which
divides: w = code * weight_scale / weight_global_scale.
mxfp4: `NAME.weight_packed` u8 and `NAME.weight_scale`, the bytes of e8m0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.quantization_config import (
    Coding,
    QuantizationConfig,
    QuantScheme,
    StoredWeights,
)
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.matrix import MatrixSource
from freetokend.ftw.safetensors import SourceTensor
from freetokend.ftw.schemes.fp4 import open_mxfp4, open_nvfp4
from freetokend.ftw.schemes.fp8 import open_fp8
from freetokend.ftw.schemes.integers import (
    PackedRowsSource,
    bits_of,
    check_group_order,
    check_integer_width,
    integer_format,
)
from freetokend.ftw.schemes.parts import HALVES, WEIGHT, Parts
from freetokend.ftw.schemes.scheme import PlainScheme

# Factors of quantised queries, keys and values, which are kept in bf16 here.
_KV_SCALE: Final = re.compile(r".*\.self_attn\.[qkv]_scale")
_INTEGERS: Final = (Coding.INT4, Coding.INT8)


class CompressedTensorsScheme(PlainScheme):
    """A checkpoint whose modules are quantised in one of the ways that its config lists.

    Which one a module has is told by its tensors: their names, types and shapes.
    """

    name = QuantScheme.COMPRESSED_TENSORS.value

    def __init__(self, checkpoint: Checkpoint, config: QuantizationConfig) -> None:
        super().__init__(checkpoint)
        self._parts = Parts(checkpoint)
        self.consumed = self._parts.consumed
        self._stored = config.weights

    def has(self, name: str) -> bool:
        """See `Scheme`."""
        return super().has(name) or self._parts.has(_base(name) + ".weight_packed")

    def matrix(self, name: str, rows: int, columns: int) -> MatrixSource | None:
        """See `Scheme`."""
        base = _base(name)
        packed = self._parts.find(base + ".weight_packed")
        plain = self._parts.find(name)
        scale = base + ".weight_scale"
        # Factors of activations quantised in advance; ours stay as they are.
        self._parts.drop(base + ".input_scale", base + ".input_global_scale")
        if not name.endswith(WEIGHT):
            return None
        if plain is not None:
            if plain.dtype != "F8_E4M3":
                return None
            self._declared(name, (Coding.FP8,))
            return open_fp8(self._parts, name, scale, rows, columns)
        if packed is None:
            return None
        if packed.dtype == "I32":
            return self._integers(name, base, packed, rows, columns)
        global_scale = base + ".weight_global_scale"
        if self._parts.has(global_scale):
            self._declared(name, (Coding.NVFP4,))
            factor = self._parts.need(global_scale, [(), (1,)], ("F32",), of=name)
            reciprocal = np.float32(1.0) / np.float32(self._parts.scalar(factor))
            return open_nvfp4(
                self._parts, name, packed.name, scale, rows, columns, float(reciprocal)
            )
        if not self._is_declared((Coding.MXFP4,)):
            # Then the factor is what is missing, if the file is what the config says.
            self._declared(name, (Coding.NVFP4,))
            self._parts.need(global_scale, [(1,)], ("F32",), of=name)
        return open_mxfp4(self._parts, name, packed.name, scale, rows, columns)

    def ignorable(self, name: str) -> bool:
        """See `Scheme`."""
        return _KV_SCALE.fullmatch(name) is not None

    def _integers(
        self, name: str, base: str, packed: SourceTensor, rows: int, columns: int
    ) -> MatrixSource:
        has_zeros = self._parts.has(base + ".weight_zero_point")
        stored = self._which(name, base, packed, columns, has_zeros=has_zeros)
        check_integer_width(name, stored, columns)
        bits = bits_of(stored)
        per_word = 32 // bits
        groups = columns // stored.group_columns
        codes = self._parts.need(packed.name, [(rows, columns // per_word)], ("I32",), of=name)
        scales = self._parts.need(base + ".weight_scale", [(rows, groups)], tuple(HALVES), of=name)
        zeros = None
        if stored.zero_points:
            shape = (-(-rows // per_word), groups)
            zeros = self._parts.need(base + ".weight_zero_point", [shape], ("I32",), of=name)
        self._check_shape(name, base, rows, columns)
        if self._parts.has(base + ".weight_g_idx"):
            order = self._parts.need(base + ".weight_g_idx", [(columns,)], ("I32",), of=name)
            check_group_order(self._parts, order, stored.group_columns)
        return PackedRowsSource(
            name=name,
            format=integer_format(stored, scales.dtype),
            rows_count=rows,
            columns_count=columns,
            parts=self._parts,
            bits=bits,
            codes=codes,
            scales=scales,
            zeros=zeros,
        )

    def _which(
        self, name: str, base: str, packed: SourceTensor, columns: int, *, has_zeros: bool
    ) -> StoredWeights:
        """The declared way that fits the shapes; the first, to complain about, when none does."""
        declared = [stored for stored in self._stored if stored.coding in _INTEGERS]
        self._declared(name, _INTEGERS)
        scale = self._parts.find(base + ".weight_scale")
        groups = scale.shape[-1] if scale is not None and scale.shape else 0
        words = packed.shape[-1] if packed.shape else 0
        for stored in declared:
            fits = (
                words * 32 == columns * bits_of(stored)
                and groups * stored.group_columns == columns
                and stored.zero_points == has_zeros
            )
            if fits:
                return stored
        return declared[0]

    def _check_shape(self, name: str, base: str, rows: int, columns: int) -> None:
        tensor = self._parts.find(base + ".weight_shape")
        if tensor is None:
            return
        tensor = self._parts.need(tensor.name, [(2,)], ("I64", "I32"), of=name)
        raw = self._parts.whole(tensor)
        found = raw.view(np.int64 if tensor.dtype == "I64" else np.int32).tolist()
        if found != [rows, columns]:
            raise ModelDataError(
                f"{tensor.file}: tensor {tensor.name} says {found}; config.json says "
                f"{[rows, columns]}."
            )

    def _is_declared(self, codings: Sequence[Coding]) -> bool:
        return any(stored.coding in codings for stored in self._stored)

    def _declared(self, name: str, codings: Sequence[Coding]) -> None:
        if not self._is_declared(codings):
            raise ModelDataError(
                f"tensor {name} is stored as {' or '.join(codings)}, which the config_groups of "
                f"quantization_config do not list; it is not clear what it means.",
                reason=Reason.MODEL_UNSUPPORTED,
            )


def _base(name: str) -> str:
    return name.removesuffix(WEIGHT)
