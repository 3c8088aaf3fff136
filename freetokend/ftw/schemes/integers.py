"""Integer matrices with a scale per group of columns, in the three packings that are in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.quantization_config import Coding, StoredWeights
from freetokend.ftw.formats import Kind, WeightFormat
from freetokend.ftw.matrix import U8, QuantMatrix
from freetokend.ftw.safetensors import SourceTensor
from freetokend.ftw.schemes.parts import HALVES, Parts, check_width, halves, split_words

_SIGN: Final = np.uint8(0x80)  # stored unsigned with an offset of 128; ours are signed
# AWQ puts the columns 0 2 4 6 1 3 5 7 of eight into a word, lowest bits first.
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


def integer_format(stored: StoredWeights, scale_dtype: str) -> WeightFormat:
    """The format of `stored` weights with scales of this safetensors type (F16 or BF16)."""
    return WeightFormat(
        kind=Kind.INT4 if stored.coding is Coding.INT4 else Kind.INT8,
        group_columns=stored.group_columns,
        scale_dtype=HALVES[scale_dtype],
        zero_points=stored.zero_points,
    )


def bits_of(stored: StoredWeights) -> int:
    """Bits per element."""
    return 4 if stored.coding is Coding.INT4 else 8


def quant_matrix(
    weight_format: WeightFormat, elements: U8, scales: U8, zeros: U8 | None
) -> QuantMatrix:
    """From unsigned elements u8 [n, K] (8 or 128, or the zero point, is 0) and bytes of scales."""
    rows, columns = elements.shape
    return QuantMatrix(
        format=weight_format,
        rows_count=rows,
        columns_count=columns,
        codes=elements ^ _SIGN if weight_format.kind is Kind.INT8 else elements,
        scales=halves(scales),
        zeros=None if zeros is None else np.ascontiguousarray(zeros),
    )


def check_group_order(parts: Parts, tensor: SourceTensor, group_columns: int) -> None:
    """ModelDataError unless column i belongs to group i // group_columns (`g_idx` says it)."""
    found = parts.whole(tensor).view("<i4")
    if not np.array_equal(found, np.arange(found.size) // group_columns):
        raise ModelDataError(
            f"{tensor.file}: tensor {tensor.name} puts columns into groups out of order "
            f"(act-order, desc_act), which is not implemented.",
            reason=Reason.MODEL_UNSUPPORTED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRowsSource:
    """compressed-tensors: words run along a row; zero points are packed along the rows."""

    name: str
    format: WeightFormat
    rows_count: int
    columns_count: int
    parts: Parts
    bits: int
    codes: SourceTensor
    scales: SourceTensor
    zeros: SourceTensor | None

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`."""
        elements = split_words(self.parts.rows(self.codes, first_row, count), self.bits)
        scales = self.parts.rows(self.scales, first_row, count)
        zeros = None
        if self.zeros is not None:
            per_word = 32 // self.bits
            words = self.parts.rows(self.zeros, first_row // per_word, -(-count // per_word))
            # [w, groups, 4] -> the elements of a word are rows: [w, per_word, groups]
            cube = words.reshape(len(words), -1, 4).transpose(0, 2, 1)
            if self.bits == 4:
                cube = np.stack((cube & 15, cube >> 4), axis=2)
            zeros = cube.reshape(len(words) * per_word, -1)[:count]
        return quant_matrix(self.format, elements, scales, zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedSource:
    """GPTQ and AWQ, which store [K, N]: `codes` words [K/8, N] (GPTQ) or [K, N/8] (AWQ, 4 bits).

    scales: [K/G, N]; zeros: words [K/G, N/8], whose elements lack `zero_offset`. Without zero
    points in the format, all of them must be the middle of the range.
    """

    name: str
    format: WeightFormat
    rows_count: int
    columns_count: int
    parts: Parts
    bits: int
    codes: SourceTensor
    scales: SourceTensor
    zeros: SourceTensor
    zero_offset: int
    words_along_rows: bool

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`. The rows asked for are columns of the tensors."""
        last_row = first_row + count
        if self.words_along_rows:
            places: Sequence[int] = _AWQ_PLACES
            elements = self._along_rows(self.codes, first_row, last_row, places)
        else:
            places = range(32 // self.bits)
            words = self.parts.window(self.codes, first_row * 4, last_row * 4)
            by_row = words.reshape(-1, count, 4).transpose(1, 0, 2)
            elements = split_words(np.ascontiguousarray(by_row).reshape(count, -1), self.bits)
        zeros = self._along_rows(self.zeros, first_row, last_row, places)
        scales = halves(self.parts.window(self.scales, first_row * 2, last_row * 2))
        by_row_scales = np.ascontiguousarray(scales.T).view(np.uint8)
        return quant_matrix(self.format, elements, by_row_scales, self._checked(zeros))

    def _along_rows(
        self, tensor: SourceTensor, first_row: int, last_row: int, places: Sequence[int]
    ) -> U8:
        """Rows of the matrix whose words, [m, N/per_word], run along them: u8 [count, m]."""
        per_word = 32 // self.bits
        # Row blocks start at multiples of 16, so at whole words; the end may be inside of one.
        start, end = first_row // per_word * 4, -(-last_row // per_word) * 4
        words = self.parts.window(tensor, start, end)
        elements = split_words(words.reshape(-1, 4), self.bits)
        in_order = elements[:, list(places)].reshape(tensor.shape[0], -1)
        return np.ascontiguousarray(in_order[:, : last_row - first_row].T)

    def _checked(self, stored: U8) -> U8 | None:
        zeros = stored.astype(np.int16) + self.zero_offset
        limit = (1 << self.bits) - 1
        if self.format.zero_points:
            if (zeros > limit).any():
                raise ModelDataError(
                    f"{self.zeros.file}: tensor {self.zeros.name} holds a zero point of "
                    f"{limit + 1}, which readers of this form take for different numbers.",
                    reason=Reason.MODEL_UNSUPPORTED,
                )
            return zeros.astype(np.uint8)
        if (zeros != 1 << (self.bits - 1)).any():
            raise ModelDataError(
                f"{self.zeros.file}: tensor {self.zeros.name} holds zero points other than "
                f"{1 << (self.bits - 1)}, but quantization_config calls the weights symmetric. "
                f"Correct sym, or download the checkpoint again."
            )
        return None


def check_integer_width(name: str, stored: StoredWeights, columns: int) -> None:
    """ModelDataError when groups do not divide the width."""
    check_width(name, integer_format(stored, "F16"), columns)
