"""Steps that the plan kernels in Triton share; `contract` says what they compute.

A kernel is one program. Threads of a program see each other's writes to memory behind a barrier
only, and what a tensor holds may be loaded by several threads: between a load and the store that
overwrites what was loaded, and between a store and the load of what was stored, there is a barrier.

The count-th least of some ranks is searched from the top, 8 bits at a time, as in a radix sort:
each round counts the ranks that agree with what is known already by their next 8 bits. Ranks of a
cache lie close together, so that two rounds are usual; no rank is written and nothing is sorted.
"""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from freetokend.experts.plan.contract import EMPTY_RANK
from freetokend.experts.residency import HELD, HELD_FROM
from freetokend.policy.eviction import COLDEST, PROMPT_DOUBLINGS

_COLDEST = tl.constexpr(COLDEST)
_EMPTY_RANK = tl.constexpr(EMPTY_RANK)
_HELD = tl.constexpr(HELD)
_HELD_FROM = tl.constexpr(HELD_FROM)
_PROMPT_DOUBLINGS = tl.constexpr(PROMPT_DOUBLINGS)
_LARGEST = tl.constexpr((1 << 63) - 1)
_COUNT_BITS = tl.constexpr(24)  # of a prompt's tokens
# 8 bits a round.
_DIGITS = tl.constexpr(256)


class State(NamedTuple):
    """Pointers of a `ResidencyState`."""

    slot_of_expert: object
    expert_of_slot: object
    slot_key: object
    demanded_at: object
    score: object
    clock: object
    slots_count: object


class Sizes(NamedTuple):
    """What a kernel is compiled for.

    half_life, layer_ticks: the order of eviction; blocks: elements handled at a time, powers of
    two; experts_block: not fewer than the experts of a layer.
    """

    layers: int
    experts: int
    tokens: int
    top_k: int
    cpu_kernel: bool
    half_life: int
    layer_ticks: int
    experts_block: int
    pairs_block: int
    slots_block: int


@triton.jit
def score_joined(score, moment, HALF_LIFE: tl.constexpr):
    """DecayedUse: the greater of both and the bonus."""
    near = tl.maximum(4 * HALF_LIFE - tl.abs(score - moment), 0)
    return tl.maximum(score, moment) + near * near // (16 * HALF_LIFE)


@triton.jit
def score_on_use(score, now, HALF_LIFE: tl.constexpr):
    """The order's; half-life 0 is LRU, which keeps none."""
    result = score
    if HALF_LIFE > 0:
        result = score_joined(score, now, HALF_LIFE)
    return result


@triton.jit
def _log2(count, HALF_LIFE: tl.constexpr):
    """HALF_LIFE * log2(count) of int64 counts, linear between powers of two."""
    whole = count * 0
    for bit in tl.static_range(1, _COUNT_BITS):
        whole += ((count >> bit) > 0).to(tl.int64)
    part = ((((count << 8) >> whole) - 256) * HALF_LIFE) >> 8
    return whole * HALF_LIFE + part


@triton.jit
def score_on_prompt(score, now, uses, tokens_count, HALF_LIFE: tl.constexpr):
    """The order's, where uses > 0."""
    result = score
    if HALF_LIFE > 0:
        used = tl.maximum(uses, 1).to(tl.int64)
        share = _log2(used, HALF_LIFE) - _log2(used * 0 + tokens_count, HALF_LIFE)
        joined = score_joined(score, now + _PROMPT_DOUBLINGS * HALF_LIFE + share, HALF_LIFE)
        result = tl.where(uses > 0, joined, score)
    return result


@triton.jit
def key_of_use(score, now, HALF_LIFE: tl.constexpr):
    """The order's key of a slot."""
    key = score
    if HALF_LIFE == 0:
        key = score * 0 + now
    return key


@triton.jit
def _first_shift(span):
    """Bits below the topmost digit of numbers up to `span`."""
    shift = (span * 0).to(tl.int32)
    while (span >> shift) >= _DIGITS:
        shift += 8
    return shift


@triton.jit
def _next_digit(counts, left):
    """Digit of the left-th least, how many have a lesser one, and how many this one."""
    cumulative = tl.cumsum(counts, 0)
    lesser = cumulative < left
    digit = tl.sum(lesser.to(tl.int32), 0)
    before = tl.max(tl.where(lesser, cumulative, 0), 0)
    here = tl.sum(tl.where(tl.arange(0, _DIGITS) == digit, counts, 0), 0)
    return digit, before, here


@triton.jit
def least_of(rank, candidate, count):
    """Which candidates have the `count` least ranks (int64), ties to the lower place.

    All of them where there are no more than `count`.
    """
    chosen = candidate
    if count < tl.sum(candidate.to(tl.int32), 0):
        least = tl.min(tl.where(candidate, rank, _LARGEST), 0)
        most = tl.max(tl.where(candidate, rank, -_LARGEST), 0)
        shift = _first_shift(most - least)
        prefix = least * 0
        left = count
        searching = 1
        while searching > 0:
            relative = (rank - least) >> shift
            near = candidate & ((relative >> 8) == prefix)
            counts = tl.histogram((relative & 255).to(tl.int32), _DIGITS, mask=near)
            digit, before, here = _next_digit(counts, left)
            left -= before
            prefix = prefix * 256 + digit
            searching = ((shift > 0) & (here != left)).to(tl.int32)
            shift -= 8 * searching
        relative = (rank - least) >> shift
        equal = candidate & (relative == prefix)
        equal_place = tl.cumsum(equal.to(tl.int32), 0)
        below = candidate & (relative < prefix)
        chosen = below | (equal & (equal_place <= left))
    return chosen


@triton.jit
def _slot_ranks(state, start, layer, now, SIZES: tl.constexpr, WHOLE_LAYER: tl.constexpr):
    """(slots, their ranks, whether they are evictable) of a block.

    Not evictable are those of the layer: of experts demanded now, or of all.
    """
    slots = start + tl.arange(0, SIZES.slots_block)
    exists = slots < tl.load(state.slots_count)
    expert = tl.load(state.expert_of_slot + slots, mask=exists, other=-1)
    key = tl.load(state.slot_key + slots, mask=exists, other=0)
    occupied = expert >= 0
    slot_layer = expert // SIZES.experts
    in_use = occupied & (slot_layer == layer)
    if not WHOLE_LAYER:
        in_use = in_use & (tl.load(state.demanded_at + expert, mask=in_use, other=-1) == now)
    layers_ahead = (slot_layer + (SIZES.layers - 1) - layer) % SIZES.layers + 1
    rank = tl.where(occupied, key - SIZES.layer_ticks * layers_ahead.to(tl.int64), _EMPTY_RANK)
    evictable = exists & ((key < _HELD_FROM) | (expert < 0)) & (in_use == 0)
    return slots, rank, evictable


@triton.jit
def _survey(state, layer, now, SIZES: tl.constexpr, WHOLE_LAYER: tl.constexpr):
    """Number of evictable slots, their least and their greatest rank."""
    slots_count = tl.load(state.slots_count)
    evictable_count = slots_count * 0
    least = now * 0 + _LARGEST
    most = -least
    start = slots_count * 0
    while start < slots_count:
        _, rank, evictable = _slot_ranks(state, start, layer, now, SIZES, WHOLE_LAYER)
        evictable_count += tl.sum(evictable.to(tl.int32), 0)
        least = tl.minimum(least, tl.min(tl.where(evictable, rank, _LARGEST), 0))
        most = tl.maximum(most, tl.max(tl.where(evictable, rank, -_LARGEST), 0))
        start += SIZES.slots_block
    return evictable_count, least, most


@triton.jit
def list_victims(
    state, fills, wanted_count, layer, now, SIZES: tl.constexpr, WHOLE_LAYER: tl.constexpr
):
    """Write the first slots in victim order, ascending, as those of the fill list.

    At most `wanted_count` (> 0); returns how many.
    """
    slots_count = tl.load(state.slots_count)
    evictable_count, least, most = _survey(state, layer, now, SIZES, WHOLE_LAYER)
    count = tl.minimum(wanted_count, evictable_count)
    if count > 0:
        shift = _first_shift(most - least)
        prefix = least * 0
        left = count
        searching = 1
        while searching > 0:
            counts = tl.zeros([_DIGITS], dtype=tl.int32)
            start = slots_count * 0
            while start < slots_count:
                _, rank, evictable = _slot_ranks(state, start, layer, now, SIZES, WHOLE_LAYER)
                relative = (rank - least) >> shift
                near = evictable & ((relative >> 8) == prefix)
                counts += tl.histogram((relative & 255).to(tl.int32), _DIGITS, mask=near)
                start += SIZES.slots_block
            digit, before, here = _next_digit(counts, left)
            left -= before
            prefix = prefix * 256 + digit
            searching = ((shift > 0) & (here != left)).to(tl.int32)
            shift -= 8 * searching

        found = count * 0
        equal_found = count * 0
        start = slots_count * 0
        while start < slots_count:
            slots, rank, evictable = _slot_ranks(state, start, layer, now, SIZES, WHOLE_LAYER)
            relative = (rank - least) >> shift
            equal = evictable & (relative == prefix)
            equal_place = equal_found + tl.cumsum(equal.to(tl.int32), 0)
            victim = (evictable & (relative < prefix)) | (equal & (equal_place <= left))
            place = found + tl.cumsum(victim.to(tl.int32), 0) - 1
            tl.store(fills + place * 2 + 1, slots, mask=victim)
            found += tl.sum(victim.to(tl.int32), 0)
            equal_found += tl.sum(equal.to(tl.int32), 0)
            start += SIZES.slots_block
    return count


@triton.jit
def place_fills(state, fills, filled, expert_ids):
    """Give the listed slots to the filled experts, both ascending.

    Returns each filled expert's slot (0 for others) and the number of evictions. Keys are the
    caller's.
    """
    tl.debug_barrier()  # the list of victims is written
    place = tl.cumsum(filled.to(tl.int32), 0) - 1
    slot = tl.load(fills + place * 2 + 1, mask=filled, other=0)
    before = tl.load(state.expert_of_slot + slot, mask=filled, other=-1)
    evicts = filled & (before >= 0)
    tl.debug_barrier()
    tl.store(state.slot_of_expert + before, -1, mask=evicts)
    tl.store(state.expert_of_slot + slot, expert_ids, mask=filled)
    tl.store(state.slot_of_expert + expert_ids, slot, mask=filled)
    tl.store(fills + place * 2, expert_ids, mask=filled)
    return slot, tl.sum(evicts.to(tl.int32), 0)


@triton.jit
def plus_held(key, key_before):
    """A new key of a slot, which stays held if it was."""
    return key + tl.where(key_before >= _HELD_FROM, _HELD, 0)


@triton.jit
def held_key(key_before, filled):
    """The key of a slot that is held from now on."""
    held = tl.where(key_before >= _HELD_FROM, key_before, key_before + _HELD)
    return tl.where(filled, _HELD + _COLDEST, held)


@triton.jit
def is_held(key):
    """Whether a slot is held."""
    return key >= _HELD_FROM


@triton.jit
def freed_key(key):
    """The key that a held slot had."""
    return key - _HELD
