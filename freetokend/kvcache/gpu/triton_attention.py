"""Paged causal attention with grouped queries in Triton.

A context is cut into parts of a fixed number of positions, counted from its beginning. Within a
part the softmax runs over blocks of positions in their order; parts are merged in their order.
`attend_tiles` does that for a tile of tokens in one program, `attend_parts` and `merge_parts` for
single tokens with a program for each part: per query the same operations in the same order, so that
its result depends on its own context alone.

Queries and the softmax's weights are fp32. The tensor cores get each as the sum of two bf16
numbers, which holds 16 of their 24 bits; products with bf16 keys and values are exact, and summed
in fp32.
"""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803, N806, PLR0913, PLR0917

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


class Sizes(NamedTuple):
    """What a kernel is compiled for.

    head, head_block: columns of a head, and the next power of two; group, group_block: query heads
    of a key head, likewise; rows: queries of a program; block, part_tokens: positions.
    """

    kv_heads: int
    group: int
    group_block: int
    head: int
    head_block: int
    page_tokens: int
    rows: int
    block: int
    part_tokens: int


class Batch(NamedTuple):
    """Pointers int32: page_table [S, table_width], sequence_index [T], positions [T]."""

    page_table: object
    sequence_index: object
    positions: object


class Parts(NamedTuple):
    """Pointers fp32: tops and totals [T, kv_heads, parts, group], sums [T, kv_heads, parts, group,
    head]: the highest score, and over exp2(score - top) the sum and the values weighted by it."""

    tops: object
    totals: object
    sums: object


@triton.jit
def _rounded(value):
    """To the nearest bf16, ties to even; in steps, because the interpreter's cast cuts off."""
    bits = value.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    number = value == value  # noqa: PLR0124
    return tl.where(number, nearest.to(tl.float32, bitcast=True), value).to(tl.bfloat16)


@triton.jit
def _two_halves(value, DOT: tl.constexpr):
    """fp32 as the sum of two bf16 numbers, of the type in which products are made."""
    upper = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    lower = value - upper
    lower = (lower.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return upper.to(DOT), lower.to(DOT)


@triton.jit(do_not_specialize=["table_width"])
def store_kv(
    k, v, keys, values, batch, table_width, SIZES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (token, part): BLOCK numbers of its key and its value, fp32 [T, kv_heads, head], into
    the pages, bf16 [pages, kv_heads, page_tokens, head]."""
    WIDTH: tl.constexpr = SIZES.kv_heads * SIZES.head
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(batch.positions + token)
    row = tl.load(batch.sequence_index + token).to(tl.int64) * table_width
    page = tl.load(batch.page_table + row + position // SIZES.page_tokens).to(tl.int64)
    head = page * SIZES.kv_heads + at // SIZES.head
    place = (head * SIZES.page_tokens + position % SIZES.page_tokens) * SIZES.head + at % SIZES.head
    inside = at < WIDTH
    key = tl.load(k + token * WIDTH + at, mask=inside, other=0.0)
    value = tl.load(v + token * WIDTH + at, mask=inside, other=0.0)
    tl.store(keys + place, _rounded(key), mask=inside)
    tl.store(values + place, _rounded(value), mask=inside)


@triton.jit
def _finite(top):
    """What scores are taken relative to; of a query that has seen nothing the highest is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _attend_part(
    query, keys, values, table, kv_head, last, start, end, scale, SIZES: tl.constexpr,
    DOT: tl.constexpr
):  # fmt: skip
    """Positions [start, end) of one sequence: (top [rows], total [rows], sums [rows, head_block]).

    query: its two halves [rows, head_block]; table: its pages; last: int32 [rows], the last
    position that each query sees; scale: to scores in powers of two.
    """
    upper, lower = query
    column = tl.arange(0, SIZES.head_block)[None, :]
    top = tl.full([SIZES.rows], float("-inf"), dtype=tl.float32)
    total = tl.zeros([SIZES.rows], dtype=tl.float32)
    sums = tl.zeros([SIZES.rows, SIZES.head_block], dtype=tl.float32)
    for first in range(start, end, SIZES.block):
        position = first + tl.arange(0, SIZES.block)
        exists = position < end
        page = tl.load(table + position // SIZES.page_tokens, mask=exists, other=0).to(tl.int64)
        place = (page * SIZES.kv_heads + kv_head) * SIZES.page_tokens + (
            position % SIZES.page_tokens
        )
        at = place[:, None] * SIZES.head + column
        inside = exists[:, None]
        if SIZES.head != SIZES.head_block:
            inside = inside & (column < SIZES.head)
        key = tl.trans(tl.load(keys + at, mask=inside, other=0.0).to(DOT))
        scores = tl.dot(upper, key, input_precision="ieee")
        scores = tl.dot(lower, key, scores, input_precision="ieee") * scale
        seen = exists[None, :] & (position[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = _finite(higher)
        kept = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * kept + tl.sum(weights, 1)
        of_upper, of_lower = _two_halves(weights, DOT)
        value = tl.load(values + at, mask=inside, other=0.0).to(DOT)
        sums = tl.dot(of_upper, value, sums * kept[:, None], input_precision="ieee")
        sums = tl.dot(of_lower, value, sums, input_precision="ieee")
        top = higher
    return top, total, sums


@triton.jit
def _factors(top, part_top):
    """(the higher, what to multiply with before, what the part)."""
    higher = tl.maximum(top, part_top)
    base = _finite(higher)
    return higher, tl.exp2(top - base), tl.exp2(part_top - base)


@triton.jit(do_not_specialize=["tokens_count", "table_width", "scale"])
def attend_tiles(
    q, keys, values, batch, out, tokens_count, table_width, scale, SIZES: tl.constexpr,
    DOT: tl.constexpr
):  # fmt: skip
    """Program (tile, key head): rows / group_block tokens that follow one another in the step.

    q: fp32 [T, kv_heads * group, head]; out: bf16 of that shape. The step's tokens are in the order
    of their sequences.
    """
    TOKENS: tl.constexpr = SIZES.rows // SIZES.group_block
    kv_head = tl.program_id(1)
    # The last tokens of a prompt take longest.
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS
    row = tl.arange(0, SIZES.rows)
    token = begin + row // SIZES.group_block
    head = row % SIZES.group_block
    exists = (token < tokens_count) & (head < SIZES.group)
    column = tl.arange(0, SIZES.head_block)[None, :]
    number = (token.to(tl.int64) * SIZES.kv_heads + kv_head) * SIZES.group + head
    at = number[:, None] * SIZES.head + column
    query = tl.load(q + at, mask=exists[:, None] & (column < SIZES.head), other=0.0)
    query = _two_halves(query, DOT)
    sequence = tl.load(batch.sequence_index + token, mask=exists, other=-1)
    position = tl.load(batch.positions + token, mask=exists, other=0)
    end_token = tl.minimum(begin + TOKENS, tokens_count)
    end_sequence = tl.load(batch.sequence_index + end_token - 1) + 1
    for one in range(tl.load(batch.sequence_index + begin), end_sequence):
        last = tl.where(sequence == one, position, -1)
        end = tl.max(last, 0) + 1
        table = batch.page_table + one * table_width.to(tl.int64)
        top = tl.full([SIZES.rows], float("-inf"), dtype=tl.float32)
        total = tl.zeros([SIZES.rows], dtype=tl.float32)
        sums = tl.zeros([SIZES.rows, SIZES.head_block], dtype=tl.float32)
        for start in range(0, end, SIZES.part_tokens):
            part_end = tl.minimum(start + SIZES.part_tokens, end)
            part_top, part_total, part_sums = _attend_part(
                query, keys, values, table, kv_head, last, start, part_end, scale * _LOG2_E,
                SIZES, DOT
            )  # fmt: skip
            top, before, of_part = _factors(top, part_top)
            total = total * before + part_total * of_part
            sums = sums * before[:, None] + part_sums * of_part[:, None]
        mine = (sequence == one)[:, None] & (column < SIZES.head)
        tl.store(out + at, _rounded(sums / total[:, None]), mask=mine)


@triton.jit(do_not_specialize=["table_width", "parts_count", "scale"])
def attend_parts(
    q, keys, values, batch, parts, table_width, parts_count, scale, SIZES: tl.constexpr,
    DOT: tl.constexpr
):  # fmt: skip
    """Program (token, key head, p): of the parts that the token sees every program_count-th, from
    the p-th on; there is room for parts_count of them."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    head = tl.arange(0, SIZES.rows)
    column = tl.arange(0, SIZES.head_block)[None, :]
    exists = (head < SIZES.group)[:, None] & (column < SIZES.head)
    number = (token * SIZES.kv_heads + kv_head) * SIZES.group + head
    query = tl.load(q + number[:, None] * SIZES.head + column, mask=exists, other=0.0)
    query = _two_halves(query, DOT)
    position = tl.load(batch.positions + token)
    sequence = tl.load(batch.sequence_index + token).to(tl.int64)
    table = batch.page_table + sequence * table_width
    last = tl.where(head < SIZES.group, position, -1)
    seen_count = tl.minimum(position // SIZES.part_tokens + 1, parts_count)
    for part in range(tl.program_id(2), seen_count, tl.num_programs(2)):
        start = part * SIZES.part_tokens
        end = tl.minimum(start + SIZES.part_tokens, position + 1)
        top, total, sums = _attend_part(
            query, keys, values, table, kv_head, last, start, end, scale * _LOG2_E, SIZES, DOT
        )
        place = ((token * SIZES.kv_heads + kv_head) * parts_count + part) * SIZES.group + head
        tl.store(parts.tops + place, top, mask=head < SIZES.group)
        tl.store(parts.totals + place, total, mask=head < SIZES.group)
        tl.store(parts.sums + place[:, None] * SIZES.head + column, sums, mask=exists)


@triton.jit(do_not_specialize=["parts_count"])
def merge_parts(parts, batch, out, parts_count, SIZES: tl.constexpr):
    """Program (token, query head): its parts one after the other, bf16 into out [T, Nq, head]."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // SIZES.group
    head = tl.program_id(1) % SIZES.group
    column = tl.arange(0, SIZES.head_block)
    inside = column < SIZES.head
    seen_count = tl.load(batch.positions + token) // SIZES.part_tokens + 1
    place = (token * SIZES.kv_heads + kv_head) * parts_count * SIZES.group + head
    top = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    sums = tl.zeros([SIZES.head_block], dtype=tl.float32)
    for _ in range(tl.minimum(seen_count, parts_count)):
        part_total = tl.load(parts.totals + place)
        part_sums = tl.load(parts.sums + place * SIZES.head + column, mask=inside, other=0.0)
        top, before, of_part = _factors(top, tl.load(parts.tops + place))
        total = total * before + part_total * of_part
        sums = sums * before + part_sums * of_part
        place += SIZES.group
    number = (token * SIZES.kv_heads + kv_head) * SIZES.group + head
    tl.store(out + number * SIZES.head + column, _rounded(sums / total), mask=inside)
