"""Random weights that a format holds without error, as bf16 numbers and as ggml's blocks.

Every scale is a power of two and every group has a greatest element at the end of its range, so
that any quantiser which scales by the greatest element finds these very codes again: a checkpoint
in bf16, what we quantise it to, and a GGUF file then hold one and the same model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

E2M1: Final = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
# ggml's types, and columns and bytes of their blocks.
KINDS: Final = ("bf16", "q8_0", "q4_0", "mxfp4", "nvfp4")
# nvfp4: the greatest scale of a matrix, which makes the factor over all a power of two.
_E4M3_GREATEST: Final = 448.0
_NVFP4_GLOBAL: Final = 2.0**-13


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatrix:
    """values: bf16 bits [N, K]; blocks: uint8 [N, bytes of a row] as they stand in a GGUF file."""

    values: NDArray[np.uint16]
    blocks: NDArray[np.uint8]


def exact_matrix(kind: str, rows: int, columns: int, rng: np.random.Generator) -> ExactMatrix:
    """A matrix of ggml's type `kind`, one of `KINDS`; the root mean square is about 0.02."""
    if kind == "bf16":
        bits = bf16_bits(rng.standard_normal((rows, columns), dtype=np.float32) * 0.02)
        return ExactMatrix(values=bits, blocks=bits.view(np.uint8))
    if kind == "q8_0":
        return _q8_0(rows, columns, rng)
    if kind == "q4_0":
        return _q4_0(rows, columns, rng)
    return _mxfp4(rows, columns, rng) if kind == "mxfp4" else _nvfp4(rows, columns, rng)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves: exact for what bf16 holds, cut for the rest."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def _result(
    values: NDArray[np.float32], rows: int, columns: int, *parts: NDArray[np.generic]
) -> ExactMatrix:
    """parts: the arrays [blocks, ...] of which a block consists, in order."""
    raw = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
    blocks = np.concatenate([part.reshape(len(part), -1) for part in raw], axis=1)
    return ExactMatrix(
        values=bf16_bits(values.reshape(rows, columns)), blocks=blocks.reshape(rows, -1)
    )


def _powers(rng: np.random.Generator, low: int, high: int, count: int) -> NDArray[np.int64]:
    return rng.integers(low, high + 1, count)


def _scale(powers: NDArray[np.int64]) -> NDArray[np.float32]:
    return np.exp2(powers).astype(np.float32)[:, None]


def _q8_0(rows: int, columns: int, rng: np.random.Generator) -> ExactMatrix:
    count = rows * columns // 32
    powers = _powers(rng, -13, -12, count)
    codes = rng.integers(-127, 128, (count, 32), dtype=np.int8)
    codes[np.arange(count), rng.integers(0, 32, count)] = 127
    scales = _scale(powers)
    return _result(codes * scales, rows, columns, scales.astype(np.float16), codes)


def _q4_0(rows: int, columns: int, rng: np.random.Generator) -> ExactMatrix:
    count = rows * columns // 32
    powers = _powers(rng, -8, -7, count)
    codes = rng.integers(1, 16, (count, 32), dtype=np.uint8)
    codes[np.arange(count), rng.integers(0, 32, count)] = 0  # -8, the end of the range
    scales = _scale(powers)
    nibbles = codes[:, :16] | codes[:, 16:] << 4
    values = (codes.astype(np.float32) - 8) * scales
    return _result(values, rows, columns, scales.astype(np.float16), nibbles)


def _mxfp4(rows: int, columns: int, rng: np.random.Generator) -> ExactMatrix:
    count = rows * columns // 32
    powers = _powers(rng, -8, -7, count)
    codes = rng.integers(0, 16, (count, 32), dtype=np.uint8)
    codes[codes == 8] = 0  # a quantiser does not give a negative zero back
    codes[np.arange(count), rng.integers(0, 32, count)] = 7
    nibbles = codes[:, :16] | codes[:, 16:] << 4
    exponents = (powers + 127).astype(np.uint8)[:, None]
    return _result(E2M1[codes] * _scale(powers), rows, columns, exponents, nibbles)


def _nvfp4(rows: int, columns: int, rng: np.random.Generator) -> ExactMatrix:
    groups = rows * columns // 16
    scales = np.exp2(_powers(rng, 5, 6, groups)).astype(np.float32)
    scales[rng.integers(0, groups)] = _E4M3_GREATEST
    codes = rng.integers(0, 16, (groups, 16), dtype=np.uint8)
    codes[codes == 8] = 0
    codes[np.arange(groups), rng.integers(0, 16, groups)] = 7
    # ggml's blocks of 64 have no factor over all: their scales take it in, still exactly
    factors = scales * np.float32(_NVFP4_GLOBAL)
    nibbles = (codes[:, :8] | codes[:, 8:] << 4).reshape(-1, 32)
    values = E2M1[codes] * factors[:, None]
    return _result(values, rows, columns, _e4m3(factors).reshape(-1, 4), nibbles)


def _e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of positive values that e4m3 holds exactly."""
    mantissa, exponent = np.frexp(values)
    normal = ((exponent + 6) << 3) + np.rint((2 * mantissa - 1) * 8).astype(np.int32)
    small = np.rint(values * 512).astype(np.int32)
    return np.where(values < 2.0**-6, small, normal).astype(np.uint8)
