"""Element types and the packed matrix forms, in numpy.

bf16 values are carried as their bits in uint16 arrays, since numpy has no such type.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.formats import ROWS_PER_BLOCK, round_up

U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]

# Elements per pass of the conversions: their temporaries then stay in the cache, which doubles
# the rate over whole-array passes.
_CHUNK_COUNT: Final = 64 * 1024


def f32_to_bf16(values: F32) -> U16:
    """Bits of the nearest bf16 values, ties to even; a NaN stays a (quiet) NaN. Any shape."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    out = np.empty(flat.shape, dtype=np.uint16)
    for start in range(0, flat.size, _CHUNK_COUNT):
        bits = flat[start : start + _CHUNK_COUNT]
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits  # a NaN may wrap around here; it is replaced below
        rounded >>= 16
        part = out[start : start + _CHUNK_COUNT]
        part[...] = rounded
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        if is_nan.any():
            part[is_nan] = (bits[is_nan] >> 16) | 0x40
    return out.reshape(values.shape)


def f16_to_bf16(values: NDArray[np.float16]) -> U16:
    """As `f32_to_bf16`, from half precision.

    A table of all 65,536 halves is made for each call (0.2 ms) and is twice as fast as numpy's
    conversion to fp32 on the megabytes that a call gets.
    """
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    table = f32_to_bf16(halves.astype(np.float32))
    bits = np.ascontiguousarray(values).view(np.uint16)
    return table.take(bits, mode="clip")  # clip only spares the check of bounds


def bf16_to_f32(bits: U16) -> F32:
    """The exact fp32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_bf16(raw: NDArray[np.uint8], dtype: str) -> U16:
    """Bytes of "BF16", "F16" or "F32" elements as bf16 bits, one-dimensional."""
    match dtype:
        case "BF16":
            return raw.view(np.uint16)
        case "F16":
            return f16_to_bf16(raw.view(np.float16))
        case "F32":
            return f32_to_bf16(raw.view(np.float32))
        case _:
            raise ValueError(f"no conversion from {dtype}")


def as_f32(raw: NDArray[np.uint8], dtype: str) -> F32:
    """Bytes of "BF16", "F16" or "F32" elements as fp32, exact, one-dimensional."""
    match dtype:
        case "BF16":
            return bf16_to_f32(raw.view(np.uint16))
        case "F16":
            return raw.view(np.float16).astype(np.float32)
        case "F32":
            return raw.view(np.float32)
        case _:
            raise ValueError(f"no conversion from {dtype}")


def pack_rows16(matrix: U16, columns: int | None = None) -> U16:
    """bf16 bits [N, K] -> uint16 [ceil(N/16), columns/2, 16, 2], padded with zeros.

    `columns` (even, at least K) is the packed width; by default K rounded up to 2.
    """
    rows, width = matrix.shape
    packed_width = round_up(width, 2) if columns is None else columns
    padded_rows = round_up(rows, ROWS_PER_BLOCK)
    if (padded_rows, packed_width) != (rows, width):
        padded = np.zeros((padded_rows, packed_width), dtype=np.uint16)
        padded[:rows, :width] = matrix
        matrix = padded
    pairs = np.ascontiguousarray(matrix).view(np.uint32)
    blocks = pairs.reshape(padded_rows // ROWS_PER_BLOCK, ROWS_PER_BLOCK, packed_width // 2)
    packed = np.ascontiguousarray(blocks.transpose(0, 2, 1)).view(np.uint16)
    return packed.reshape(blocks.shape[0], packed_width // 2, ROWS_PER_BLOCK, 2)


def unpack_rows16(packed: U16, rows: int, columns: int) -> U16:
    """The inverse of `pack_rows16`: any shape of the right size -> bf16 bits [rows, columns]."""
    blocks = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK
    grid = packed.reshape(blocks, -1, ROWS_PER_BLOCK, 2)
    matrix = grid.transpose(0, 2, 1, 3).reshape(blocks * ROWS_PER_BLOCK, -1)
    return np.ascontiguousarray(matrix[:rows, :columns])
