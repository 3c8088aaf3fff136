"""The two ways to multiply rows16 blocks with activations in Triton.

`row_sums`: some rows with one token, in fp32, every thread words of its own, which are added up at
the end. `tile_sums`: some rows with a tile of tokens on the tensor cores, one group of columns
after the other: sums of exact products, scaled in fp32. In both the order of columns is fixed when
the kernel is compiled, so that an element depends on its row and its token only; the orders of the
two differ, and so do their results by roundings of fp32.
"""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from freetokend.experts.gpu.triton_codes import (
    in_units,
    load_words,
    minimum_of,
    scale_of,
    value_of,
    zero_of,
)


@triton.jit
def _two_columns(x, column, inside, COLUMNS: tl.constexpr):
    """Activations (fp32, fp32) of an even column and the next; zeros where not inside."""
    if COLUMNS % 2 == 0:
        both = tl.load((x + column).to(tl.pointer_type(tl.int32), bitcast=True), inside, other=0)
        even = (both << 16).to(tl.float32, bitcast=True)
        odd = (both & -65536).to(tl.float32, bitcast=True)
    else:
        even = tl.load(x + column, inside, other=0.0).to(tl.float32)
        odd = tl.load(x + column + 1, inside & (column + 1 < COLUMNS), other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _add_words(sums, x, block, step, row, inside, COLUMNS: tl.constexpr, CODES: tl.constexpr):
    """sums [S, R] plus the products of one word for each of them."""
    STEP: tl.constexpr = CODES.step  # 3.6 takes no attribute for the end of a static range
    words, high = load_words(block, step, row, inside, COLUMNS, CODES)
    # What lies outside reads the first group's scales: there are always some.
    group = tl.where(inside, step, 0) * CODES.step // (CODES.group if CODES.group else 1)
    zero = zero_of(block, group, row, CODES)
    evens = sums * 0.0
    odds = sums * 0.0
    of_x = step * 0.0
    for column in tl.static_range(0, STEP, 2):
        even, odd = _two_columns(x, step * CODES.step + column, inside, COLUMNS)
        evens += value_of(words, high, zero, column, CODES) * even
        odds += value_of(words, high, zero, column + 1, CODES) * odd
        of_x += even + odd
    total = in_units(evens + odds, CODES)
    if CODES.kind == "bf16":
        sums += total
    else:
        sums += scale_of(block, group, row, CODES) * total
    if CODES.kind == "q4_K":
        sums -= minimum_of(block, group, row, CODES) * of_x
    return sums


@triton.jit
def row_sums(x, block, row, COLUMNS: tl.constexpr, STEPS: tl.constexpr, CODES: tl.constexpr):
    """Products of R rows with one token, fp32 [R].

    x: pointer to the token's bf16 [COLUMNS]; block: pointers u8 [1, R] to the starts of the rows'
    blocks; row: [1, R], the rows in them; STEPS: words of a row at a time.
    """
    STEPS_COUNT: tl.constexpr = (COLUMNS + CODES.step - 1) // CODES.step
    sums = tl.zeros([STEPS, row.shape[1]], dtype=tl.float32)
    for first in range(0, STEPS_COUNT, STEPS):
        step = first + tl.arange(0, STEPS)[:, None]
        inside = step < STEPS_COUNT
        sums = _add_words(sums, x, block, step, row, inside, COLUMNS, CODES)
    return tl.sum(sums, 0)


@triton.jit
def _columns_tile(words, high, zero, TILE: tl.constexpr, ROWS: tl.constexpr, CODES: tl.constexpr):
    """Words [TILE / step, ROWS] as numbers [TILE, ROWS], columns in their order."""
    v0 = value_of(words, high, zero, 0, CODES)
    v1 = value_of(words, high, zero, 1, CODES)
    if CODES.step == 2:
        tile = tl.permute(tl.join(v0, v1), (0, 2, 1))
    else:
        v2 = value_of(words, high, zero, 2, CODES)
        v3 = value_of(words, high, zero, 3, CODES)
        if CODES.step == 4:
            pairs = tl.join(tl.join(v0, v2), tl.join(v1, v3))
            tile = tl.permute(pairs, (0, 2, 3, 1))
        else:
            v4 = value_of(words, high, zero, 4, CODES)
            v5 = value_of(words, high, zero, 5, CODES)
            v6 = value_of(words, high, zero, 6, CODES)
            v7 = value_of(words, high, zero, 7, CODES)
            even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
            odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
            tile = tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1))
    return tl.reshape(tile, (TILE, ROWS))


@triton.jit
def _add_tile(
    sums, x, block, row, number, COLUMNS: tl.constexpr, TILE: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """sums [tokens, R] plus the products of the number-th TILE of columns, all of one group.

    x: [tokens, TILE], of the type in which the products are made.
    """
    STEPS: tl.constexpr = TILE // CODES.step
    STEPS_COUNT: tl.constexpr = (COLUMNS + CODES.step - 1) // CODES.step
    step = number * STEPS + tl.arange(0, STEPS)[:, None]
    words, high = load_words(block, step, row, step < STEPS_COUNT, COLUMNS, CODES)
    group = number * TILE // (CODES.group if CODES.group else 1)
    zero = zero_of(block, group, row, CODES)
    numbers = _columns_tile(words, high, zero, TILE, row.shape[1], CODES).to(x.dtype)
    if CODES.kind == "bf16":
        sums = tl.dot(x, numbers, sums, input_precision="ieee")
    else:
        products = in_units(tl.dot(x, numbers, input_precision="ieee"), CODES)
        sums += scale_of(block, group, row, CODES) * products
    if CODES.kind == "q4_K":
        of_x = tl.sum(x.to(tl.float32), 1)[:, None]
        sums -= minimum_of(block, group, row, CODES) * of_x
    return sums


@triton.jit
def tile_sums(
    x, valid, block, row, COLUMNS: tl.constexpr, TILE: tl.constexpr, CODES: tl.constexpr,
    DOT: tl.constexpr
):  # fmt: skip
    """Products of R rows with some tokens, fp32 [tokens, R], TILE columns at a time.

    x: pointers bf16 [tokens, 1] to activations [COLUMNS]; valid: bool [tokens, 1]; block, row: as
    of `row_sums`. DOT: bf16, or fp32 for the interpreter, which cannot multiply bf16.
    """
    sums = tl.zeros([valid.shape[0], row.shape[1]], dtype=tl.float32)
    for number in range(0, (COLUMNS + TILE - 1) // TILE):
        column = number * TILE + tl.arange(0, TILE)[None, :]
        inside = valid & (column < COLUMNS) if COLUMNS % TILE else valid
        x_tile = tl.load(x + column, mask=inside, other=0.0).to(DOT)
        sums = _add_tile(sums, x_tile, block, row, number, COLUMNS, TILE, CODES)
    return sums
