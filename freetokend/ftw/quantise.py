"""From numbers to a `QuantMatrix` of any format, rounding to nearest, ties to even.

Where a format leaves a choice of scales, the one with the least squared error among a few
candidates is taken. Work goes in chunks that stay in the cache, so memory is a few megabytes
whatever the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.formats import (
    FP8_BLOCK_COLUMNS,
    FP8_BLOCK_ROWS,
    ROWS_PER_BLOCK,
    Kind,
    WeightFormat,
)
from freetokend.ftw.matrix import QuantMatrix
from freetokend.ftw.numbers import E2M1_MAX, E4M3_MAX, e4m3_values
from freetokend.ftw.packing import f32_to_bf16
from freetokend.ftw.quantise_integers import improves, quantise_int4, quantise_int8, squared_error
from freetokend.ftw.quantise_k import quantise_q4_k, quantise_q6_k

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

# Bump when the same numbers would give other codes: a half-done conversion is then not taken up.
QUANTISER_VERSION: Final = 1

# Elements per pass: temporaries of a pass stay in the second-level cache.
_CHUNK_COUNT: Final = 64 * 1024
# Neighbours of the e4m3 scale that maps a group's largest magnitude to 6; those 4 codes up make
# it about 4, which suits groups whose other members lie between 4/6 and 5/6 of the largest.
_NVFP4_OFFSETS: Final = (-1, 0, 1, 2, 4)


def quantise(values: F32, weight_format: WeightFormat, *, global_scale: float = 1.0) -> QuantMatrix:
    """`values` fp32 [n, K], all finite, in `weight_format`.

    n must begin at a multiple of 128 rows of its matrix for fp8_block. global_scale: of the whole
    matrix, from `nvfp4_global`; other formats have none. ValueError for a width that the format
    does not have. Scales may overflow to infinity where they are halves; see `problem_of`.
    """
    rows, columns = values.shape
    if columns % weight_format.column_multiple:
        raise ValueError(f"{weight_format} matrices are no {columns} columns wide")
    if weight_format.kind is Kind.BF16:
        parts: dict[str, NDArray[Any]] = {"codes": f32_to_bf16(values)}
    elif weight_format.kind is Kind.FP8_BLOCK:
        parts = _fp8_block(values)
    else:
        parts = _by_groups(values, weight_format, global_scale)
    return QuantMatrix(
        format=weight_format,
        rows_count=rows,
        columns_count=columns,
        codes=parts["codes"],
        scales=parts.get("scales"),
        zeros=parts.get("zeros"),
        mins=parts.get("mins"),
        d=parts.get("d"),
        dmin=parts.get("dmin"),
        global_scale=global_scale,
    )


def nvfp4_global(largest: float) -> float:
    """The fp32 factor of a matrix whose largest magnitude is `largest`.

    Such that the scale of the group with it is the largest e4m3 number.
    """
    factor = float(np.float32(largest / (E4M3_MAX * E2M1_MAX)))
    # Of all zeros, or of numbers so small that the factor vanishes, any factor is right.
    return factor if factor > 0.0 else 1.0


Groups = Callable[[F32], dict[str, NDArray[Any]]]


def _by_groups(
    values: F32, weight_format: WeightFormat, global_scale: float
) -> dict[str, NDArray[Any]]:
    """The arrays of formats whose groups lie within a row, each found from its own columns."""
    rows, columns = values.shape
    unit, work = _worker(weight_format, global_scale)
    found: dict[str, list[NDArray[Any]]] = {}
    step = max(_CHUNK_COUNT // max(columns, 1), 1)
    for first in range(0, rows, step):
        chunk = values[first : first + step]
        # [columns of a unit, units]: reductions then run over whole lines of memory.
        across = np.ascontiguousarray(chunk.reshape(-1, unit).T)
        # Numbers near the ends of fp32 overflow in places; what comes of it is never taken, or it
        # is a scale that `problem_of` finds.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            made = work(across)
        for name, part in made.items():
            down = np.ascontiguousarray(part.T)
            found.setdefault(name, []).append(down.reshape(chunk.shape[0], -1))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _worker(weight_format: WeightFormat, global_scale: float) -> tuple[int, Groups]:
    """Columns of a unit, and what makes codes [columns, units] and scales [.., units] of it."""
    group = weight_format.group_columns
    scale_dtype, zero_points = weight_format.scale_dtype, weight_format.zero_points
    match weight_format.kind:
        case Kind.MXFP4:
            return group, _mxfp4
        case Kind.NVFP4:
            return group, lambda values: _nvfp4(values, global_scale)
        case Kind.INT4:
            return group, lambda values: quantise_int4(values, scale_dtype, zero_points=zero_points)
        case Kind.INT8:
            return group, lambda values: quantise_int8(values, scale_dtype, zero_points=zero_points)
        case Kind.Q4_K:
            return 256, quantise_q4_k
        case _:
            return 256, quantise_q6_k


def round_e2m1(magnitudes: F32) -> F32:
    """The nearest e2m1 magnitudes (as numbers); beyond 6 becomes 6."""
    capped = np.minimum(magnitudes, np.float32(E2M1_MAX))
    steps = np.where(capped < 2.0, np.float32(0.5), np.float32(1.0))
    steps[capped >= 4.0] = 2.0
    capped /= steps
    np.rint(capped, out=capped)
    capped *= steps
    return capped


def e2m1_codes(magnitudes: F32, negative: NDArray[np.bool_]) -> U8:
    """Codes of exact e2m1 magnitudes with their signs; zero has no sign."""
    codes = np.array([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], np.uint8)
    found: U8 = codes[(magnitudes * 2).astype(np.uint8)]
    found[negative & (found > 0)] |= 8
    return found


def e4m3_codes(magnitudes: F32) -> U8:
    """Codes 0..126 of the nearest e4m3 magnitudes; beyond 448 becomes 448."""
    capped = np.minimum(magnitudes, np.float32(E4M3_MAX))
    bits = capped.view(np.uint32)
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    small = np.rint(capped * np.float32(512.0)).astype(np.uint8)
    return np.where(capped < np.float32(2.0**-6), small, normal.astype(np.uint8))


def _fp8_block(values: F32) -> dict[str, NDArray[Any]]:
    """Blocks of 128 x 128 with scale amax / 448, told to each of their row blocks of 16."""
    rows, columns = values.shape
    codes = np.empty((rows, columns), np.uint8)
    blocks = -(-columns // FP8_BLOCK_COLUMNS)
    scales = np.empty((-(-rows // ROWS_PER_BLOCK), blocks), np.float32)
    for row, column in _fp8_corners(rows, columns):
        here = (
            slice(row, min(row + FP8_BLOCK_ROWS, rows)),
            slice(column, min(column + FP8_BLOCK_COLUMNS, columns)),
        )
        block = values[here]
        magnitudes = np.abs(block)
        scale = np.float32(magnitudes.max() / np.float32(E4M3_MAX))
        if scale > 0.0:
            magnitudes /= scale
        found = e4m3_codes(magnitudes)
        if scale == 0.0:
            found[:] = 0
        found[(block < 0) & (found > 0)] |= 128
        codes[here] = found
        first = row // ROWS_PER_BLOCK
        last = first + FP8_BLOCK_ROWS // ROWS_PER_BLOCK
        scales[first:last, column // FP8_BLOCK_COLUMNS] = scale
    return {"codes": codes, "scales": scales}


def _fp8_corners(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    for row in range(0, rows, FP8_BLOCK_ROWS):
        for column in range(0, columns, FP8_BLOCK_COLUMNS):
            yield row, column


def _mxfp4(values: F32) -> dict[str, NDArray[Any]]:
    """Scale 2^(floor(log2 amax) - 2), or twice that where the squared error is smaller.

    The first is that of the OCP specification: it lets magnitudes beyond 6 saturate, which costs
    more than the coarser steps of the second in some groups.
    """
    magnitudes = np.abs(values)
    largest = magnitudes.max(axis=0)
    exponents = np.frexp(largest)[1] - 3
    lowest = np.clip(exponents, -127, 127).astype(np.int32)
    best = _Best(magnitudes)
    for offset in (0, 1):
        tried = np.minimum(lowest + offset, 127)
        scales = np.ldexp(np.float32(1.0), tried).astype(np.float32)
        best.offer(scales, (tried + 127).astype(np.uint8))
    codes = e2m1_codes(best.rounded, values < 0)
    found = best.labels
    found[largest == 0.0] = 127
    return {"codes": codes, "scales": found[None]}


def _nvfp4(values: F32, global_scale: float) -> dict[str, NDArray[Any]]:
    """The e4m3 scale near amax / 6 with the least squared error, its rounding included."""
    magnitudes = np.abs(values)
    factor = np.float32(global_scale)
    table = e4m3_values()
    ideal = e4m3_codes(magnitudes.max(axis=0) / np.float32(E2M1_MAX) / factor).astype(np.int32)
    best = _Best(magnitudes)
    for offset in _NVFP4_OFFSETS:
        tried = np.clip(ideal + offset, 0, 126).astype(np.uint8)
        best.offer(table[tried] * factor, tried)
    return {"codes": e2m1_codes(best.rounded, values < 0), "scales": best.labels[None]}


class _Best:
    """The scales with the least squared error so far, for e2m1 magnitudes [columns, groups]."""

    def __init__(self, magnitudes: F32) -> None:
        self._magnitudes = magnitudes
        self._error = np.full(magnitudes.shape[1], np.nan, np.float32)
        self.rounded = np.zeros_like(magnitudes)
        self.labels = np.zeros(magnitudes.shape[1], np.uint8)

    def offer(self, scales: F32, labels: U8) -> None:
        """Take the groups for which `scales` [groups], known as `labels`, do better."""
        usable = scales > 0.0
        safe: F32 = np.where(usable, scales, np.float32(1.0))
        scaled: F32 = self._magnitudes / safe
        rounded = round_e2m1(scaled)
        rounded[:, ~usable] = 0.0
        error = squared_error(self._magnitudes, rounded * scales)
        better = improves(error, self._error)
        self._error[better] = error[better]
        self.labels[better] = labels[better]
        np.copyto(self.rounded, rounded, where=better)
