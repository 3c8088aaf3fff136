"""Blocks of GGUF tensors taken apart, after ggml's block structures; codes and scales unchanged.

Every function takes the blocks of some rows, u8 [n, blocks, bytes per block], little endian.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from freetokend.ftw.formats import Kind, WeightFormat, parse_format
from freetokend.ftw.matrix import U8, U16, QuantMatrix
from freetokend.ftw.packing import as_bf16


def read_blocks(kind: str, raw: U8, columns: int) -> QuantMatrix:
    """Rows of a tensor of ggml type `kind`: bytes u8 [n, bytes per row] -> a matrix [n, columns].

    F32, F16 and BF16 become bf16, rounded to the nearest.
    """
    if kind in ("F32", "F16", "BF16"):
        return QuantMatrix(
            format=parse_format("bf16"),
            rows_count=len(raw),
            columns_count=columns,
            codes=as_bf16(np.ascontiguousarray(raw).reshape(-1), kind).reshape(-1, columns),
        )
    unpack, block_bytes = _UNPACK[kind]
    return unpack(raw.reshape(len(raw), -1, block_bytes), len(raw), columns)


def ggml_format(kind: str) -> WeightFormat:
    """The weight format in which a tensor of ggml type `kind` is stored."""
    return parse_format(_FORMATS[kind])


def _q4_0(blocks: U8, rows: int, columns: int) -> QuantMatrix:
    # f16 d, 16 bytes: columns 0-15 in the low halves, 16-31 in the high ones; w = d (u - 8)
    return QuantMatrix(
        format=ggml_format("Q4_0"),
        rows_count=rows,
        columns_count=columns,
        codes=_halves_apart(blocks[:, :, 2:]).reshape(rows, columns),
        scales=_u16(blocks[:, :, :2]),
    )


def _q8_0(blocks: U8, rows: int, columns: int) -> QuantMatrix:
    # f16 d, 32 signed bytes; w = d q
    return QuantMatrix(
        format=ggml_format("Q8_0"),
        rows_count=rows,
        columns_count=columns,
        codes=blocks[:, :, 2:].reshape(rows, columns),
        scales=_u16(blocks[:, :, :2]),
    )


def _mxfp4(blocks: U8, rows: int, columns: int) -> QuantMatrix:
    # e8m0, 16 bytes as in q4_0. ggml doubles the elements and halves the scale.
    return QuantMatrix(
        format=ggml_format("MXFP4"),
        rows_count=rows,
        columns_count=columns,
        codes=_halves_apart(blocks[:, :, 1:]).reshape(rows, columns),
        scales=blocks[:, :, 0].copy(),
    )


def _q4_k(blocks: U8, rows: int, columns: int) -> QuantMatrix:
    # f16 d, f16 dmin, 12 bytes of 8 scales and 8 minima of 6 bits, 128 bytes: of each 32 bytes the
    # low halves are 32 columns and the high ones the next 32
    packed = blocks[:, :, 4:16]
    low, middle, top = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = np.concatenate((low & 63, (top & 15) | (low >> 6 << 4)), axis=2)
    mins = np.concatenate((middle & 63, (top >> 4) | (middle >> 6 << 4)), axis=2)
    groups = columns // 32
    codes = _halves_apart(blocks[:, :, 16:].reshape(rows, -1, 32))
    return QuantMatrix(
        format=ggml_format("Q4_K"),
        rows_count=rows,
        columns_count=columns,
        codes=codes.reshape(rows, columns),
        scales=scales.reshape(rows, groups),
        mins=mins.reshape(rows, groups),
        d=_u16(blocks[:, :, 0:2]),
        dmin=_u16(blocks[:, :, 2:4]),
    )


def _q6_k(blocks: U8, rows: int, columns: int) -> QuantMatrix:
    # 128 bytes of low halves, 64 bytes of 2 high bits, 16 signed scales, f16 d. For each half of
    # the block 64 and 32 bytes: the low halves of 64 bytes are columns 0-63 and the high ones
    # 64-127; the four pairs of bits of 32 bytes are columns 0-31, 32-63, 64-95, 96-127
    low = _halves_apart(blocks[:, :, :128].reshape(rows, -1, 64))
    high = blocks[:, :, 128:192].reshape(rows, -1, 32)
    two, four = np.uint8(2), np.uint8(4)
    pairs = [(high << four) & 48, (high << two) & 48, high & 48, (high >> two) & 48]
    codes = low | np.concatenate(pairs, axis=-1)
    return QuantMatrix(
        format=ggml_format("Q6_K"),
        rows_count=rows,
        columns_count=columns,
        codes=codes.reshape(rows, columns),
        scales=blocks[:, :, 192:208].reshape(rows, -1),
        d=_u16(blocks[:, :, 208:210]),
    )


def _halves_apart(packed: U8) -> U8:
    """u8 [.., b] -> u8 [.., 2 b]: all low halves, then all high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _u16(raw: U8) -> U16:
    """u8 [n, blocks, 2] -> the bits u16 [n, blocks]."""
    return np.ascontiguousarray(raw).view(np.uint16)[:, :, 0].copy()


_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F32": Kind.BF16,
        "F16": Kind.BF16,
        "BF16": Kind.BF16,
        "Q4_0": "q4_0",
        "Q8_0": "q8_0",
        "Q4_K": Kind.Q4_K,
        "Q6_K": Kind.Q6_K,
        "MXFP4": Kind.MXFP4,
    }
)
_UNPACK: Final[Mapping[str, tuple[Callable[[U8, int, int], QuantMatrix], int]]] = MappingProxyType(
    {
        "Q4_0": (_q4_0, 18),
        "Q8_0": (_q8_0, 34),
        "Q4_K": (_q4_k, 144),
        "Q6_K": (_q6_k, 210),
        "MXFP4": (_mxfp4, 17),
    }
)
