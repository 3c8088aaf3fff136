"""A matrix in a weight format, apart from any packing, and what it means.

This is the meeting point of everything that handles formats: readers of checkpoints and quantisers
produce `QuantMatrix`, the packing turns it into bytes and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.formats import (
    FP8_BLOCK_COLUMNS,
    K_BLOCK_COLUMNS,
    ROWS_PER_BLOCK,
    Kind,
    WeightFormat,
)
from freetokend.ftw.numbers import e2m1_values, e4m3_values, e8m0_values

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]
# Of a type that depends on the format or on what the caller asked for.
Reals = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantMatrix:
    """Rows [n, K] of a matrix: its codes and what scales them. G = format.group_columns.

    | format | codes [n, K] | scales | others |
    |---|---|---|---|
    | bf16 | u16, the bits | None | |
    | fp8_block | u8, e4m3fn | f32 [ceil(n/16), ceil(K/128)] | |
    | mxfp4 | u8 0..15, e2m1 | u8 [n, K/32], e8m0 | |
    | nvfp4 | u8 0..15, e2m1 | u8 [n, K/16], e4m3fn | global_scale |
    | int4 | u8 0..15, value + 8 or value + zero | u16 [n, K/G], bits | zeros u8 [n, K/G] or None |
    | int8 | u8, bits of the signed value | u16 [n, K/G], bits | zeros u8 [n, K/G] or None |
    | q4_K | u8 0..15 | u8 [n, K/32], 0..63 | mins u8 [n, K/32], 0..63; d, dmin u16 [n, K/256] |
    | q6_K | u8 0..63, value + 32 | u8 [n, K/16], bits of i8 | d u16 [n, K/256] |

    d and dmin are the bits of half-precision numbers. A zero point z of int8 is stored as z + 128.
    ValueError when an array has another shape or type.
    """

    format: WeightFormat
    rows_count: int
    columns_count: int
    codes: U8 | U16
    scales: U8 | U16 | F32 | None = None
    zeros: U8 | None = None
    mins: U8 | None = None
    d: U16 | None = None
    dmin: U16 | None = None
    global_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, (shape, dtype) in _parts(
            self.format, self.rows_count, self.columns_count
        ).items():
            part = getattr(self, name)
            if shape is None:
                if part is not None:
                    raise ValueError(f"{self.format} matrices have no {name}")
            elif part is None or part.shape != shape or part.dtype != dtype:
                found = "absent" if part is None else f"{part.dtype} {list(part.shape)}"
                raise ValueError(f"{name} must be {dtype} {list(shape)}, not {found}")


class MatrixSource(Protocol):
    """A matrix that can be read in parts, in the format in which it is to be stored.

    name: of the tensor it comes from, for errors.
    """

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> WeightFormat: ...

    @property
    def rows_count(self) -> int: ...

    @property
    def columns_count(self) -> int: ...

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """Rows [first_row, first_row + count); `first_row` is a multiple of 16.

        Safe from several threads at once. Every part of a matrix has the same `global_scale`.
        """
        ...


_Part = tuple[tuple[int, ...] | None, np.dtype[np.generic] | None]


def _parts(weight_format: WeightFormat, rows: int, columns: int) -> dict[str, _Part]:
    """Shape and type of each array of a matrix; (None, None) for those it does not have."""
    u8, u16, f32 = (np.dtype(kind) for kind in (np.uint8, np.uint16, np.float32))
    groups = (rows, columns // weight_format.group_columns)
    supers = (rows, columns // K_BLOCK_COLUMNS)
    if columns % weight_format.column_multiple:
        raise ValueError(f"{weight_format} matrices are no {columns} columns wide")
    absent: _Part = (None, None)
    parts = dict.fromkeys(("codes", "scales", "zeros", "mins", "d", "dmin"), absent)
    parts["codes"] = ((rows, columns), u8)
    match weight_format.kind:
        case Kind.BF16:
            parts["codes"] = ((rows, columns), u16)
        case Kind.FP8_BLOCK:
            blocks = (-(-rows // ROWS_PER_BLOCK), -(-columns // FP8_BLOCK_COLUMNS))
            parts["scales"] = (blocks, f32)
        case Kind.MXFP4 | Kind.NVFP4:
            parts["scales"] = (groups, u8)
        case Kind.INT4 | Kind.INT8:
            parts["scales"] = (groups, u16)
            if weight_format.zero_points:
                parts["zeros"] = (groups, u8)
        case Kind.Q4_K:
            parts |= {"scales": (groups, u8), "mins": (groups, u8)}
            parts |= {"d": (supers, u16), "dmin": (supers, u16)}
        case Kind.Q6_K:
            parts |= {"scales": (groups, u8), "d": (supers, u16)}
    return parts


def half_values(bits: U16, scale_dtype: str) -> F32:
    """The exact fp32 values of "f16" or "bf16" bits."""
    if scale_dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def dequantise(matrix: QuantMatrix, dtype: type[np.floating[Any]] = np.float64) -> Reals:
    """What `matrix` means: `dtype` (float64 or float32) [n, K], every product taken in it."""
    codes = matrix.codes
    kind = matrix.format.kind
    if kind is Kind.BF16:
        return half_values(codes.astype(np.uint16, copy=False), "bf16").astype(dtype)
    if kind is Kind.FP8_BLOCK:
        scales = _array(matrix.scales)
        rows = np.repeat(scales, ROWS_PER_BLOCK, axis=0)[: matrix.rows_count]
        wide = np.repeat(rows, FP8_BLOCK_COLUMNS, axis=1)[:, : matrix.columns_count]
        return _looked_up(e4m3_values(), codes, dtype) * wide.astype(dtype)
    scaled = _grouped(_elements(matrix, dtype), _scales(matrix, dtype), np.multiply)
    if kind is Kind.Q4_K:
        dmin = half_values(_bits(matrix.dmin), "f16").astype(dtype)
        mins = _grouped(_array(matrix.mins).astype(dtype), dmin, np.multiply)
        scaled = _grouped(scaled, mins, np.subtract)
    return scaled * dtype(matrix.global_scale) if matrix.format.has_global else scaled


def problem_of(matrix: QuantMatrix) -> str | None:
    """Why `matrix` cannot be stored: a code or a scale that is no finite number; None if it can."""
    kind = matrix.format.kind
    if kind is Kind.FP8_BLOCK and ((matrix.codes & 0x7F) == 0x7F).any():
        return "holds the fp8 code for not-a-number"
    if kind is Kind.MXFP4 and (_array(matrix.scales) == 255).any():
        return "holds the e8m0 scale for not-a-number"
    if kind is Kind.NVFP4 and (_array(matrix.scales) >= 127).any():
        return "holds an e4m3 scale that is negative or not a number"
    if not np.isfinite(matrix.global_scale):
        return "has a factor that is not finite"
    halves = [matrix.d, matrix.dmin]
    finite = all(np.isfinite(half_values(bits, "f16")).all() for bits in halves if bits is not None)
    if kind is Kind.FP8_BLOCK:
        finite = bool(np.isfinite(_array(matrix.scales)).all())
    elif kind in (Kind.INT4, Kind.INT8):
        values = half_values(_bits(matrix.scales), matrix.format.scale_dtype)
        finite = bool(np.isfinite(values).all())
    return None if finite else "holds a scale that is not finite"


def _elements(matrix: QuantMatrix, dtype: type[np.floating[Any]]) -> Reals:
    """The codes as numbers, before any scale."""
    codes = matrix.codes
    match matrix.format.kind:
        case Kind.MXFP4 | Kind.NVFP4:
            return _looked_up(e2m1_values(), codes, dtype)
        case Kind.INT4:
            values: Reals = codes.astype(dtype)
            zero = 8
        case Kind.INT8:
            values, zero = codes.view(np.int8).astype(dtype), 0
        case Kind.Q6_K:
            values, zero = codes.astype(dtype), 32
        case _:
            return codes.astype(dtype)
    if matrix.zeros is None:
        values -= dtype(zero)
        return values
    # A stored zero point of int8 is 128 more than what it means.
    zeros = matrix.zeros.astype(dtype) - dtype(128 if matrix.format.kind is Kind.INT8 else 0)
    return _grouped(values, zeros, np.subtract)


def _scales(matrix: QuantMatrix, dtype: type[np.floating[Any]]) -> Reals:
    """The scale of each group, without the matrix's global factor."""
    scales = _array(matrix.scales)
    match matrix.format.kind:
        case Kind.MXFP4:
            return _looked_up(e8m0_values(), scales, dtype)
        case Kind.NVFP4:
            return _looked_up(e4m3_values(), scales, dtype)
        case Kind.Q4_K:
            small = scales.astype(dtype)
        case Kind.Q6_K:
            small = scales.view(np.int8).astype(dtype)
        case _:
            return half_values(_bits(scales), matrix.format.scale_dtype).astype(dtype)
    return _grouped(small, half_values(_bits(matrix.d), "f16").astype(dtype), np.multiply)


def _grouped(values: Reals, per_group: Reals, apply: np.ufunc) -> Reals:
    """`apply` each group's number to its values. values: [n, K]; per_group: [n, groups]."""
    rows, columns = values.shape
    groups = per_group.shape[1]
    cube = values.reshape(rows, groups, columns // max(groups, 1))
    result: Reals = apply(cube, per_group[:, :, None]).reshape(rows, columns)
    return result


def _looked_up(table: F32, codes: Reals, dtype: type[np.floating[Any]]) -> Reals:
    values: Reals = table.astype(dtype)[codes]
    return values


def _array(part: Reals | None) -> Reals:
    if part is None:
        raise ValueError("an array that the format demands is absent")
    return part


def _bits(part: Reals | None) -> U16:
    return np.ascontiguousarray(_array(part)).view(np.uint16)
