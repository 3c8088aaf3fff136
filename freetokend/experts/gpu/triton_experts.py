"""Routed experts from slots in Triton: two products, each for single tokens and for tiles of them.

A pair is (token, k): one routed expert of one token. Slots are addressed by 64-bit numbers from a
base; what a pair's slot is comes from the device. The expert's middle, act(gate x) * up x, lies
between the two launches as bf16 [pairs, inner].
"""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from freetokend.experts.gpu.triton_sums import row_sums, tile_sums


class Record(NamedTuple):
    """What an expert record is; offsets in bytes from its start, 0 for what it does not have.

    inner: columns of down. slot_bytes: from one slot to the next.
    """

    hidden: int
    inner: int
    slot_bytes: int
    gate_up_block_bytes: int
    down_offset: int
    down_block_bytes: int
    globals_offset: int
    gate_bias_offset: int
    up_bias_offset: int
    down_bias_offset: int
    top_k: int
    activation: str
    limit: float
    alpha: float


class Pairs(NamedTuple):
    """Pointers and numbers of one call.

    slots: address of slot 0; slots_count: int32 [1]; physical: int32 [T, k]; weights: fp32 [T, k];
    x: bf16 [T, hidden]; middle: bf16 [T, k, inner]; y: fp32 [T, k, hidden].
    """

    slots: int
    slots_count: object
    physical: object
    weights: object
    x: object
    middle: object
    y: object


class Tiles(NamedTuple):
    """Pairs by slot, as `pair_tiles` has them.

    order: int32, the pairs of one slot after those of another, behind the last ones a whole tile of
    -1; start: int32 [tiles], first entries in it, -1 for no tile.
    """

    order: object
    start: object


@triton.jit
def _record_at(pairs, slot, RECORD: tl.constexpr):
    """Pointer u8 to the record in a slot."""
    address = pairs.slots + slot.to(tl.int64) * RECORD.slot_bytes
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 64)


@triton.jit
def _float_at(record, offset):
    return tl.load((record + offset).to(tl.pointer_type(tl.float32), bitcast=True))


@triton.jit
def _sigmoid(value):
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit
def _activate(gate, up, RECORD: tl.constexpr):
    """What goes into down, before it is rounded. NaN stays NaN."""
    if RECORD.limit > 0:
        gate = tl.where(gate > RECORD.limit, RECORD.limit, gate)
        up = tl.where(up > RECORD.limit, RECORD.limit, up)
        up = tl.where(up < -RECORD.limit, -RECORD.limit, up)
    if RECORD.activation == "silu":
        result = gate * _sigmoid(gate) * up
    elif RECORD.activation == "gelu":
        result = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.70710678118654752)) * up
    elif RECORD.activation == "gelu_tanh":
        # 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate * _sigmoid(twice) * up
    else:
        tl.static_assert(RECORD.activation == "swiglu_oai")
        result = (up + 1.0) * gate * _sigmoid(RECORD.alpha * gate)
    return result


@triton.jit
def _rounded(value):
    """To the nearest bf16, ties to even; in steps, because the interpreter's cast cuts off."""
    bits = value.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    number = value == value  # noqa: PLR0124
    return tl.where(number, nearest.to(tl.float32, bitcast=True), value).to(tl.bfloat16)


@triton.jit
def _finish_gate_up(record, gate, up, at, RECORD: tl.constexpr):
    """Sums of gate and up -> bf16 middle; at: rows of the matrices, broadcast to the sums."""
    if RECORD.globals_offset:
        gate *= _float_at(record, RECORD.globals_offset)
        up *= _float_at(record, RECORD.globals_offset + 4)
    if RECORD.gate_bias_offset:
        gate += _float_at(record, RECORD.gate_bias_offset + at * 4)
        up += _float_at(record, RECORD.up_bias_offset + at * 4)
    return _rounded(_activate(gate, up, RECORD))


@triton.jit
def _finish_down(record, down, at, weight, RECORD: tl.constexpr):
    """Sums of down -> weighted result. Biases are padded to whole blocks of rows."""
    if RECORD.globals_offset:
        down *= _float_at(record, RECORD.globals_offset + 8)
    if RECORD.down_bias_offset:
        down += _float_at(record, RECORD.down_bias_offset + at * 4)
    return weight * down


@triton.jit
def gate_up_rows(pairs, RECORD: tl.constexpr, CODES: tl.constexpr, STEPS: tl.constexpr):
    """Program (pair, block): 16 numbers of the pair's middle."""
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.load(pairs.physical + pair)
    if (slot >= 0) & (slot < tl.load(pairs.slots_count)):
        record = _record_at(pairs, slot, RECORD)
        # A block of gate and, behind it, the one of up.
        first = tl.program_id(1) * 2
        lane = tl.arange(0, 32)[None, :]
        block = record + (first + lane // 16) * RECORD.gate_up_block_bytes
        x = pairs.x + pair // RECORD.top_k * RECORD.hidden
        sums = row_sums(x, block, lane % 16, RECORD.hidden, STEPS, CODES)
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, 16)), (1, 0)))
        at = tl.program_id(1) * 16 + tl.arange(0, 16)
        middle = _finish_gate_up(record, gate, up, at, RECORD)
        tl.store(pairs.middle + pair * RECORD.inner + at, middle)


@triton.jit
def down_rows(
    pairs, RECORD: tl.constexpr, CODES: tl.constexpr, STEPS: tl.constexpr, KEEP: tl.constexpr
):
    """Program (pair, block): 16 numbers of the pair's y.

    Of pairs without a slot zeros, or nothing if KEEP; NaN of a slot that does not exist.
    """
    pair = tl.program_id(0).to(tl.int64)
    slot = tl.load(pairs.physical + pair)
    at = tl.program_id(1) * 16 + tl.arange(0, 16)
    y = pairs.y + pair * RECORD.hidden + at
    exists = slot < tl.load(pairs.slots_count)
    if (slot >= 0) & exists:
        record = _record_at(pairs, slot, RECORD)
        lane = tl.arange(0, 16)[None, :]
        start = record + RECORD.down_offset + tl.program_id(1) * RECORD.down_block_bytes
        middle = pairs.middle + pair * RECORD.inner
        down = row_sums(middle, start + lane * 0, lane, RECORD.inner, STEPS, CODES)
        result = _finish_down(record, down, at, tl.load(pairs.weights + pair), RECORD)
        tl.store(y, result, mask=at < RECORD.hidden)
    elif not (KEEP and exists):
        nothing = tl.where(exists, 0.0, float("nan"))
        tl.store(y, nothing + at * 0.0, mask=at < RECORD.hidden)


@triton.jit
def _pairs_of_tile(pairs, tiles, start, TOKENS: tl.constexpr):
    """(pairs int64 [TOKENS], which of them exist, their slot)."""
    pair = tl.load(tiles.order + start + tl.arange(0, TOKENS))
    slot = tl.load(pairs.physical + tl.load(tiles.order + start))
    valid = pair >= 0
    valid = valid & (tl.load(pairs.physical + pair, mask=valid, other=-1) == slot)
    return tl.where(valid, pair, 0).to(tl.int64), valid, slot


@triton.jit
def gate_up_tiles(
    pairs, tiles, RECORD: tl.constexpr, CODES: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Program (tile, part): ROWS / 2 numbers of the middles of a tile of pairs."""
    start = tl.load(tiles.start + tl.program_id(0))
    if start >= 0:
        pair, valid, slot = _pairs_of_tile(pairs, tiles, start, TOKENS)
        if slot < tl.load(pairs.slots_count):
            record = _record_at(pairs, slot, RECORD)
            # One matrix in which blocks of gate and up take turns: two products of the same tile
            # would make the compiler lay out the warps as for a chain of them.
            row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[None, :]
            block = record + (
                tl.minimum(row // 16, RECORD.inner // 8 - 1) * RECORD.gate_up_block_bytes
            )
            token = pairs.x + (pair // RECORD.top_k * RECORD.hidden)[:, None]
            sums = tile_sums(
                token, valid[:, None], block, row % 16, RECORD.hidden, COLUMNS, CODES, DOT
            )
            parts = tl.permute(tl.reshape(sums, (TOKENS, ROWS // 32, 2, 16)), (0, 1, 3, 2))
            gate, up = tl.split(parts)
            gate = tl.reshape(gate, (TOKENS, ROWS // 2))
            up = tl.reshape(up, (TOKENS, ROWS // 2))
            at = tl.program_id(1) * (ROWS // 2) + tl.arange(0, ROWS // 2)[None, :]
            middle = _finish_gate_up(record, gate, up, tl.minimum(at, RECORD.inner - 1), RECORD)
            target = pairs.middle + (pair * RECORD.inner)[:, None] + at
            tl.store(target, middle, mask=valid[:, None] & (at < RECORD.inner))


@triton.jit
def down_tiles(
    pairs, tiles, RECORD: tl.constexpr, CODES: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Program (tile, part): ROWS numbers of y of a tile of pairs; NaN of a slot that is none."""
    start = tl.load(tiles.start + tl.program_id(0))
    if start >= 0:
        pair, valid, slot = _pairs_of_tile(pairs, tiles, start, TOKENS)
        at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[None, :]
        target = pairs.y + (pair * RECORD.hidden)[:, None] + at
        inside = valid[:, None] & (at < RECORD.hidden)
        if slot < tl.load(pairs.slots_count):
            record = _record_at(pairs, slot, RECORD)
            number = tl.minimum(at // 16, (RECORD.hidden - 1) // 16)
            block = record + RECORD.down_offset + number * RECORD.down_block_bytes
            row = pairs.middle + (pair * RECORD.inner)[:, None]
            down = tile_sums(row, valid[:, None], block, at % 16, RECORD.inner, COLUMNS, CODES, DOT)
            weight = tl.load(pairs.weights + pair, mask=valid, other=0.0)[:, None]
            result = _finish_down(record, down, number * 16 + at % 16, weight, RECORD)
            tl.store(target, result, mask=inside)
        else:
            tl.store(target, at * 0.0 + float("nan"), mask=inside)
