"""GPTQ and AWQ: `NAME.qweight`, `NAME.qzeros` int32, `NAME.scales` f16, and GPTQ's `NAME.g_idx`."""

from __future__ import annotations

from typing import Final

from freetokend.core.errors import ModelDataError
from freetokend.core.quantization_config import QuantizationConfig, QuantScheme
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.matrix import MatrixSource
from freetokend.ftw.schemes.integers import (
    TransposedSource,
    bits_of,
    check_group_order,
    check_integer_width,
    integer_format,
)
from freetokend.ftw.schemes.parts import HALVES, WEIGHT, Parts
from freetokend.ftw.schemes.scheme import PlainScheme

_WORDS: Final = ("I32",)


class GptqScheme(PlainScheme):
    """A checkpoint with GPTQ (4 or 8 bits) or AWQ (4 bits, "gemm") matrices.

    Stored transposed: GPTQ packs 8 (or 4) rows of K into a word, AWQ 8 columns of N.
    """

    def __init__(self, checkpoint: Checkpoint, config: QuantizationConfig) -> None:
        super().__init__(checkpoint)
        self.name = config.scheme.value
        self._parts = Parts(checkpoint)
        self.consumed = self._parts.consumed
        (self._stored,) = config.weights
        self._zero_offset = config.zero_offset
        self._reorders_columns = config.reorders_columns
        self._is_awq = config.scheme is QuantScheme.AWQ

    def has(self, name: str) -> bool:
        """See `Scheme`."""
        return super().has(name) or self._parts.has(_base(name) + ".qweight")

    def matrix(self, name: str, rows: int, columns: int) -> MatrixSource | None:
        """See `Scheme`."""
        base = _base(name)
        if not name.endswith(WEIGHT) or not self._parts.has(base + ".qweight"):
            return None
        check_integer_width(name, self._stored, columns)
        bits = bits_of(self._stored)
        per_word = 32 // bits
        if rows % per_word:
            raise ModelDataError(
                f"tensor {base}.qzeros: {rows} rows are not a multiple of {per_word}, which go "
                f"into a word."
            )
        groups = columns // self._stored.group_columns
        shape = (columns, rows // per_word) if self._is_awq else (columns // per_word, rows)
        codes = self._parts.need(base + ".qweight", [shape], _WORDS, of=name)
        zeros = self._parts.need(base + ".qzeros", [(groups, rows // per_word)], _WORDS, of=name)
        scales = self._parts.need(base + ".scales", [(groups, rows)], tuple(HALVES), of=name)
        if self._parts.has(base + ".g_idx"):
            order = self._parts.need(base + ".g_idx", [(columns,)], _WORDS, of=name)
            check_group_order(self._parts, order, self._stored.group_columns)
        elif self._reorders_columns:
            raise ModelDataError(
                f"tensor {base}.g_idx is missing: desc_act says that columns are in an order of "
                f"their own, and nothing tells which. Convert a checkpoint that has it, or one "
                f"quantised without desc_act."
            )
        self._drop_empty_bias(base + ".bias")
        return TransposedSource(
            name=name,
            format=integer_format(self._stored, scales.dtype),
            rows_count=rows,
            columns_count=columns,
            parts=self._parts,
            bits=bits,
            codes=codes,
            scales=scales,
            zeros=zeros,
            zero_offset=self._zero_offset,
            words_along_rows=self._is_awq,
        )

    def _drop_empty_bias(self, name: str) -> None:
        """Count a bias of zeros as used: writers add one to modules that never had any.

        Any other is the model's, or left over and then an error.
        """
        bias = self._parts.find(name)
        if bias is not None and not self._parts.whole(bias).any():
            self._parts.drop(name)


def _base(name: str) -> str:
    return name.removesuffix(WEIGHT)
