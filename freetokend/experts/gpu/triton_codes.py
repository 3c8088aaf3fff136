"""Reading rows16 blocks in Triton: codes and scales of every weight format (docs/ftw.md).

A word holds the codes of `Codes.step` consecutive columns of one row. Codes become numbers by
moving their bits into the right place of a float, which is exact and needs no conversion, and
products with bf16 activations are exact in fp32; scales come in after the sum over columns of a
group. Some numbers come out smaller than they are by a power of two, which `in_units` makes good in
the sum.
"""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# 2^23 in the place of a float's exponent: the low bits then are an integer.
_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)
# A code's bits taken for those of a half, whose exponent is biased by 15, are so much too small.
_E2M1_UNIT = tl.constexpr(float(1 << 14))
_E4M3_UNIT = tl.constexpr(float(1 << 8))


class Codes(NamedTuple):
    """A weight format as the kernels see it.

    step: columns of a word; word_bytes: 2 or 4; group: columns with one scale (128 for fp8_block,
    0 for bf16); groups_per_header, header_bytes, group_bytes: of the super-groups, 0 where there
    are none; half_scales: whether scales are f16, else bf16, of the integer formats.
    """

    kind: str
    step: int
    word_bytes: int
    group: int
    groups_per_header: int
    header_bytes: int
    group_bytes: int
    half_scales: bool
    zero_points: bool


@triton.jit
def word_offset(step, COLUMNS: tl.constexpr, CODES: tl.constexpr):
    """Bytes from a block's start to the words of a step, of a matrix COLUMNS wide."""
    if CODES.kind == "bf16":
        offset = step * 64
    elif CODES.kind == "fp8_block":
        FRONT: tl.constexpr = ((COLUMNS + 127) // 128 * 4 + 63) // 64 * 64
        offset = step * 32 + FRONT
    elif CODES.kind == "q6_K":
        group = step // 2
        header = group // CODES.groups_per_header + 1
        offset = header * CODES.header_bytes + group * CODES.group_bytes + step % 2 * 64 + 64
    else:
        header = step // (CODES.groups_per_header * CODES.group // CODES.step) + 1
        offset = header * CODES.header_bytes + step * 64
    return offset


@triton.jit
def load_words(block, step, row, inside, COLUMNS: tl.constexpr, CODES: tl.constexpr):
    """(words, high planes) of steps [S, 1] and rows [1, R] as int32 [S, R].

    block: pointers u8 [1, R] to the starts of the rows' blocks; inside: bool [S, 1], where not,
    words are zeros. The planes are those of q6_K, shifted to where the step's begin; 0 of others.
    """
    # Pointers of the words' own type: the compiler sees that rows lie side by side.
    if CODES.word_bytes == 2:
        first = block.to(tl.pointer_type(tl.int16), bitcast=True)
        at = first + (word_offset(step, COLUMNS, CODES) // 2 + row)
        words = tl.load(at, mask=inside, other=0).to(tl.int32)
    else:
        first = block.to(tl.pointer_type(tl.int32), bitcast=True)
        at = first + (word_offset(step, COLUMNS, CODES) // 4 + row)
        words = tl.load(at, mask=inside, other=0)
    high = words * 0
    if CODES.kind == "q6_K":
        plane = first + ((word_offset(step, COLUMNS, CODES) - step % 2 * 64 - 64) // 4 + row)
        high = tl.load(plane, mask=inside, other=0) >> (step % 2 * 4)
    return words, high


@triton.jit
def _integer(bits):
    """A number of up to 23 bits as a float."""
    return (bits | _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC


@triton.jit
def _from_half(bits):
    """Bits of a half, in the low 16, as a float."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def value_of(words, high, zero, COLUMN: tl.constexpr, CODES: tl.constexpr):
    """Numbers of one column of each word, fp32 [S, R]; their sums go through `in_units`.

    zero: zero points of the words, as `zero_of` gives them.
    """
    if CODES.kind == "bf16":
        bits = words & -65536 if COLUMN == 1 else words << 16
        value = bits.to(tl.float32, bitcast=True)
    elif CODES.kind == "fp8_block":
        byte = words >> (8 * COLUMN)
        value = _from_half((byte & 0x7F) << 7 | (byte & 0x80) << 8)
    elif CODES.kind == "int8":
        value = ((words << (24 - 8 * COLUMN)) >> 24).to(tl.float32) - zero
    else:
        PLACE: tl.constexpr = COLUMN // 2 * 4 + COLUMN % 2 * 16
        if CODES.kind == "mxfp4" or CODES.kind == "nvfp4":  # noqa: PLR1714
            bits = words << (9 - PLACE) if PLACE < 9 else words >> (PLACE - 9)
            value = _from_half((bits & 0x0E00) | ((bits << 3) & 0x8000))
        elif CODES.kind == "q6_K":
            # Byte i of the plane has the column's bits at 8 i, two higher for a high half.
            HIGH: tl.constexpr = PLACE // 8 * 8 + PLACE % 8 // 2
            value = _integer((words >> PLACE) & 15 | ((high >> HIGH) & 3) << 4) - 32.0
        else:
            value = _integer((words >> PLACE) & 15) - zero
    return value


@triton.jit
def in_units(total, CODES: tl.constexpr):
    """A sum of `value_of` as `scale_of` wants it, which may be too large for that power of two."""
    if CODES.kind == "fp8_block":
        total = total * _E4M3_UNIT
    elif CODES.kind == "mxfp4":
        total = total * _E2M1_UNIT
    elif CODES.kind == "nvfp4":
        total = total * (_E2M1_UNIT * _E4M3_UNIT)
    return total


@triton.jit
def _half_at(header, place, CODES: tl.constexpr):
    """The place-th of the 16-bit numbers of a header, fp32."""
    if CODES.half_scales:
        value = tl.load(header.to(tl.pointer_type(tl.float16), bitcast=True) + place)
    else:
        value = tl.load(header.to(tl.pointer_type(tl.bfloat16), bitcast=True) + place)
    return value.to(tl.float32)


@triton.jit
def header_of(block, group, CODES: tl.constexpr):
    """(start of a group's header, the group's number below it); shapes broadcast."""
    number = group // CODES.groups_per_header
    super_bytes = CODES.header_bytes + CODES.groups_per_header * CODES.group_bytes
    return block + number * super_bytes, group % CODES.groups_per_header


@triton.jit
def zero_of(block, group, row, CODES: tl.constexpr):
    """What is subtracted from a group's codes, fp32, shapes of block, group and row broadcast.

    A constant where the format has no zero points.
    """
    if CODES.zero_points:
        header, number = header_of(block, group, CODES)
        zero = tl.load(header + (128 + number * 16 + row)).to(tl.float32)
        if CODES.kind == "int8":
            zero = zero - 128.0
    elif CODES.kind == "int4":
        zero = 8.0
    else:
        zero = 0.0
    return zero


@triton.jit
def scale_of(block, group, row, CODES: tl.constexpr):
    """What a group's sum of codes is multiplied by, fp32; not for bf16."""
    if CODES.kind == "fp8_block":
        scale = tl.load(block.to(tl.pointer_type(tl.float32), bitcast=True) + (group + row * 0))
    else:
        header, number = header_of(block, group, CODES)
        if CODES.kind == "mxfp4":
            exponent = tl.load(header + (number * 16 + row)).to(tl.int32)
            bits = tl.where(exponent == 0, 0x400000, exponent << 23)
            scale = bits.to(tl.float32, bitcast=True)
        elif CODES.kind == "nvfp4":
            byte = tl.load(header + (number * 16 + row)).to(tl.int32)
            scale = _from_half(byte << 7)
        elif CODES.kind == "q4_K":
            small = tl.load(header + (64 + number * 16 + row)).to(tl.float32)
            scale = _half_at(header, row, CODES) * small
        elif CODES.kind == "q6_K":
            byte = tl.load(header + (64 + number * 16 + row))
            scale = _half_at(header, row, CODES) * byte.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            scale = _half_at(header, number * 16 + row, CODES)
    return scale


@triton.jit
def minimum_of(block, group, row, CODES: tl.constexpr):
    """What a group's sum of activations is multiplied by and subtracted, fp32; only of q4_K."""
    header, number = header_of(block, group, CODES)
    small = tl.load(header + (192 + number * 16 + row)).to(tl.float32)
    return _half_at(header, 16 + row, CODES) * small
