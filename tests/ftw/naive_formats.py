"""Every weight format read element by element, from the description of the layouts alone.

Nothing is shared with the packing: sizes, positions and number formats are spelled out again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Read = Callable[[bytes, int, int, int], float]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Byte and half in which each of 8 columns of 4-bit codes stands.
NIBBLES = {0: (0, 0), 2: (0, 1), 4: (1, 0), 6: (1, 1), 1: (2, 0), 3: (2, 1), 5: (3, 0), 7: (3, 1)}


def e2m1(code: int) -> float:
    return -E2M1[code - 8] if code >= 8 else E2M1[code]


def e4m3(code: int) -> float:
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def f16(data: bytes, start: int) -> float:
    return float(struct.unpack_from("<e", data, start)[0])


def bf16(data: bytes, start: int) -> float:
    return float(struct.unpack("<f", b"\0\0" + data[start : start + 2])[0])


def f32(data: bytes, start: int) -> float:
    return float(struct.unpack_from("<f", data, start)[0])


def nibble(data: bytes, start: int, row: int, column: int) -> int:
    """The 4-bit code of a column within the 64-byte steps of 8 columns from `start` on."""
    byte, half = NIBBLES[column % 8]
    value = data[start + column // 8 * 64 + 4 * row + byte]
    return value >> 4 if half else value & 15


def octet(data: bytes, start: int, row: int, column: int) -> int:
    """The 8-bit code of a column within the 64-byte steps of 4 columns from `start` on."""
    return data[start + column // 4 * 64 + 4 * row + column % 4]


def read_bf16(block: bytes, width: int, row: int, column: int) -> float:
    return bf16(block, (column // 2 * 16 + row) * 4 + column % 2 * 2)


def read_fp8(block: bytes, width: int, row: int, column: int) -> float:
    scales_bytes = ((width + 127) // 128 * 4 + 63) // 64 * 64
    code = block[scales_bytes + (column // 2 * 16 + row) * 2 + column % 2]
    return e4m3(code) * f32(block, column // 128 * 4)


def read_fp4(group: int, scale: Callable[[int], float]) -> Read:
    def read(block: bytes, width: int, row: int, column: int) -> float:
        group_index = column // group
        start = group_index // 4 * (64 + 4 * group * 8)
        header = start + group_index % 4 * 16 + row
        data = start + 64 + group_index % 4 * group * 8
        return e2m1(nibble(block, data, row, column % group)) * scale(block[header])

    return read


def read_int(bits: int, group: int, scale: str, *, zero_points: bool) -> Read:
    def read(block: bytes, width: int, row: int, column: int) -> float:
        header_bytes = 192 if zero_points else 128
        group_index, group_length = column // group, group * 16 * bits // 8
        start = group_index // 4 * (header_bytes + 4 * group_length)
        place = group_index % 4 * 16 + row
        factor = (f16 if scale == "f16" else bf16)(block, start + 2 * place)
        data = start + header_bytes + group_index % 4 * group_length
        zero = block[start + 128 + place] if zero_points else 0
        if bits == 4:
            code = nibble(block, data, row, column % group)
            return factor * (code - (zero if zero_points else 8))
        code = octet(block, data, row, column % group)
        signed = code - 256 if code >= 128 else code
        return factor * (signed - (zero - 128 if zero_points else 0))

    return read


def read_q4_k(block: bytes, width: int, row: int, column: int) -> float:
    start = column // 256 * (320 + 8 * 256)
    d, dmin = f16(block, start + 2 * row), f16(block, start + 32 + 2 * row)
    group = column % 256 // 32
    scale = block[start + 64 + 16 * group + row]
    minimum = block[start + 192 + 16 * group + row]
    code = nibble(block, start + 320 + 256 * group, row, column % 32)
    return d * scale * code - dmin * minimum


def read_q6_k(block: bytes, width: int, row: int, column: int) -> float:
    start = column // 256 * (320 + 16 * 192)
    d = f16(block, start + 2 * row)
    group = column % 256 // 16
    scale = block[start + 64 + 16 * group + row]
    plane = start + 320 + 192 * group
    step, within = column % 16 // 8, column % 8
    low = nibble(block, plane + 64 + 64 * step, row, within)
    byte, half = NIBBLES[within]
    high = block[plane + 4 * row + byte] >> (4 * step + 2 * half) & 3
    return d * (scale - 256 if scale >= 128 else scale) * ((low | high << 4) - 32)


def reader(name: str) -> Read:
    """The reading of one element of a block of format `name`."""
    integer = re.fullmatch(r"int(4|8)_g(\d+)_(b?f16)(_zp)?", name)
    if integer:
        bits, group, scale, zero_points = integer.groups()
        return read_int(int(bits), int(group), scale, zero_points=zero_points is not None)
    return {
        "bf16": read_bf16,
        "fp8_block": read_fp8,
        "mxfp4": read_fp4(32, lambda code: 2.0 ** (code - 127)),
        "nvfp4": read_fp4(16, e4m3),
        "q4_K": read_q4_k,
        "q6_K": read_q6_k,
    }[name]


def block_length(name: str, width: int) -> int:
    """Bytes of a block of 16 rows."""
    integer = re.fullmatch(r"int(4|8)_g(\d+)_b?f16(_zp)?", name)
    if integer:
        bits, group = int(integer[1]), int(integer[2])
        groups = width // group
        return (groups + 3) // 4 * (192 if integer[3] else 128) + groups * group * 2 * bits
    match name:
        case "bf16":
            return (width + 1) // 2 * 64
        case "fp8_block":
            return ((width + 127) // 128 * 4 + 63) // 64 * 64 + (width + 3) // 4 * 64
        case "mxfp4" | "nvfp4":
            group = 32 if name == "mxfp4" else 16
            groups = width // group
            return (groups + 3) // 4 * 64 + groups * group * 8
        case "q4_K":
            return width // 256 * 2368
        case "q6_K":
            return width // 256 * 3392
        case _:
            raise AssertionError(name)


def read_matrix(
    data: bytes, name: str, rows: int, columns: int, *, width: int | None = None, factor: float = 1
) -> Floats:
    """A whole matrix [rows, columns]; `width` is the packed width if it is not `columns`."""
    width = columns if width is None else width
    length, read = block_length(name, width), reader(name)
    return np.array(
        [
            [
                factor * read(data[row // 16 * length :][:length], width, row % 16, column)
                for column in range(columns)
            ]
            for row in range(rows)
        ]
    ).reshape(rows, columns)


def read_expert(
    record: bytes, name: str, hidden: int, inner: int, *, has_bias: bool = False
) -> tuple[list[Floats], list[Floats]]:
    """gate [I, H], up [I, H], down [H, I], and their biases (none: empty) of a record."""
    padded = (inner + 15) // 16 * 16
    length = block_length(name, hidden)
    blocks = [record[i * length :][:length] for i in range(2 * padded // 16)]
    down = record[2 * padded // 16 * length :]
    end = 2 * padded // 16 * length + (hidden + 15) // 16 * block_length(name, padded)
    end = (end + 63) // 64 * 64
    factors = [1.0, 1.0, 1.0]
    if name == "nvfp4":
        factors = [f32(record, end + 4 * part) for part in range(3)]
        end += 64
    matrices = [
        read_matrix(b"".join(blocks[0::2]), name, inner, hidden, factor=factors[0]),
        read_matrix(b"".join(blocks[1::2]), name, inner, hidden, factor=factors[1]),
        read_matrix(down, name, hidden, inner, width=padded, factor=factors[2]),
    ]
    biases = []
    for size in (inner, inner, hidden) if has_bias else ():
        biases.append(np.array([f32(record, end + 4 * i) for i in range(size)]))
        end += ((size + 15) // 16 * 64 + 63) // 64 * 64
    return matrices, biases
