"""Matrices of e2m1 numbers, two in a byte, the low half first: mxfp4 and nvfp4."""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.ftw.formats import Kind, WeightFormat, parse_format
from freetokend.ftw.matrix import QuantMatrix
from freetokend.ftw.safetensors import SourceTensor
from freetokend.ftw.schemes.parts import Parts, check_width, nibbles

# Two elements per byte; some writers call the bytes signed.
_BYTES = ("U8", "I8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Source:
    """A `MatrixSource` of format mxfp4 or nvfp4.

    codes, scales: tensors whose last axis are bytes and whose rows, all other axes taken together,
    hold the matrix in rows first_row, first_row + row_step, ... (`row_step` is 2 where two matrices
    are interleaved). row_codes: rows of `codes` per row of the matrix (gpt-oss has one per group).
    """

    name: str
    format: WeightFormat
    rows_count: int
    columns_count: int
    parts: Parts
    codes: SourceTensor
    scales: SourceTensor
    global_scale: float = 1.0
    first_row: int = 0
    row_step: int = 1
    row_codes: int = 1

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`."""
        first = self.first_row + first_row * self.row_step
        span = (count - 1) * self.row_step + 1
        codes = self.parts.rows(self.codes, first * self.row_codes, span * self.row_codes)
        scales = self.parts.rows(self.scales, first, span)
        return QuantMatrix(
            format=self.format,
            rows_count=count,
            columns_count=self.columns_count,
            codes=nibbles(codes.reshape(span, -1)[:: self.row_step]),
            scales=scales[:: self.row_step].copy(),
            global_scale=self.global_scale,
        )


def open_mxfp4(
    parts: Parts, name: str, packed: str, scale: str, rows: int, columns: int
) -> Fp4Source:
    """The mxfp4 matrix in `packed` [rows, columns/2] and `scale` [rows, columns/32]."""
    weight_format = parse_format(Kind.MXFP4)
    check_width(name, weight_format, columns)
    return Fp4Source(
        name=name,
        format=weight_format,
        rows_count=rows,
        columns_count=columns,
        parts=parts,
        codes=parts.need(packed, [(rows, columns // 2)], _BYTES, of=name),
        scales=parts.need(scale, [(rows, columns // 32)], ("F8_E8M0", "U8"), of=name),
    )


def open_nvfp4(
    parts: Parts, name: str, packed: str, scale: str, rows: int, columns: int, global_scale: float
) -> Fp4Source:
    """The nvfp4 matrix in `packed` [rows, columns/2] and `scale` [rows, columns/16]."""
    weight_format = parse_format(Kind.NVFP4)
    check_width(name, weight_format, columns)
    return Fp4Source(
        name=name,
        format=weight_format,
        rows_count=rows,
        columns_count=columns,
        parts=parts,
        codes=parts.need(packed, [(rows, columns // 2)], _BYTES, of=name),
        scales=parts.need(scale, [(rows, columns // 16)], ("F8_E4M3",), of=name),
        global_scale=global_scale,
    )
