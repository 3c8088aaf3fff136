"""Random weights in the forms that kt-kernel takes, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Block types of the llamafile path, by ggml's numbers.
GGML_TYPE: Final = {"bf16": 30, "q4_0": 2, "q8_0": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """codes and scales: as kt-kernel reads them, C order; values: float32 [N, K]."""

    codes: NDArray[np.generic]
    scales: NDArray[np.generic] | None
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """A native form: the classes that run it, best first, and how its matrices are made."""

    classes: tuple[str, ...]
    make: Callable[[np.random.Generator, int, int], Matrix]
    bits: int = 0
    group_size: int = 0


def _bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def bf16(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Plain rows."""
    bits = _bf16_bits(rng.normal(0, 0.02, (rows, columns)).astype(np.float32))
    return Matrix(codes=bits, scales=None, values=_bf16_values(bits))


def _e4m3_table() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(
        exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6
    )
    return np.where(codes & 128, -size, size).astype(np.float32)


def fp8_block(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """e4m3 with an fp32 scale for each block of 128 x 128."""
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = rng.uniform(1e-4, 2e-4, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
    wide = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:rows, :columns]
    return Matrix(codes=codes, scales=scales, values=_e4m3_table()[codes] * wide)


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The lower column in the low half."""
    return np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4)


def _four_bit(
    rng: np.random.Generator, rows: int, columns: int, group: int, table: NDArray[np.floating]
) -> Matrix:
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = _bf16_bits(rng.uniform(0.004, 0.008, (rows, columns // group)).astype(np.float32))
    wide = np.repeat(_bf16_values(scales), group, axis=1)
    values = table[codes].astype(np.float32) * wide
    return Matrix(codes=_nibbles(codes), scales=scales, values=values)


def int4(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Codes minus 8, bf16 scale per 32."""
    return _four_bit(rng, rows, columns, 32, np.arange(16) - 8.0)


def mxfp4(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """e2m1, its scale per 32 held as bf16."""
    return _four_bit(rng, rows, columns, 32, E2M1)


def nvfp4(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """e2m1, both of its scales folded to one bf16 per 16."""
    return _four_bit(rng, rows, columns, 16, E2M1)


def ggml_blocks(kind: str, rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """ggml's bf16, q8_0 or q4_0."""
    if kind == "bf16":
        return bf16(rng, rows, columns)
    blocks = rows * columns // 32
    scales = rng.uniform(0.001, 0.002, (blocks, 1)).astype(np.float16)
    raw = rng.integers(0, 256, (blocks, 32 if kind == "q8_0" else 16), dtype=np.uint8)
    if kind == "q8_0":
        elements = raw.view(np.int8).astype(np.float32)
    else:
        elements = np.concatenate((raw & 15, raw >> 4), axis=1).astype(np.float32) - 8
    values = (elements * scales.astype(np.float32)).reshape(rows, columns)
    return Matrix(
        codes=np.concatenate((scales.view(np.uint8), raw), axis=1), scales=None, values=values
    )


NATIVE: Final = {
    "bf16": Native(classes=("AMXBF16_MOE", "AVX2BF16_MOE"), make=bf16),
    "fp8_block": Native(
        classes=("AMXFP8_MOE", "AVX2FP8_MOE"), make=fp8_block, bits=8, group_size=128
    ),
    "int4": Native(
        classes=("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"), make=int4, bits=4, group_size=32
    ),
    "mxfp4": Native(
        classes=("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"), make=mxfp4, bits=4, group_size=32
    ),
    # only this class has groups of 16
    "nvfp4": Native(classes=("AVX2MXFP4_MOE",), make=nvfp4, bits=4, group_size=16),
}
# What to try for a format of ours: native forms, then ggml types of the llamafile path.
CANDIDATES: Final = {
    "bf16": ("native:bf16", "llamafile:bf16"),
    "fp8_block": ("native:fp8_block",),
    "int8": ("llamafile:q8_0",),
    "int4": ("native:int4", "llamafile:q4_0"),
    "mxfp4": ("native:mxfp4",),
    "nvfp4": ("native:nvfp4",),
}
