"""The plan kernels in Triton: one program each; `contract` says what they compute.

`triton_steps` says how threads of a program may read what others have written.
"""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from freetokend.experts.plan.contract import CPU, DEFERRED, NONE
from freetokend.experts.plan.triton_steps import (
    freed_key,
    held_key,
    is_held,
    key_of_use,
    least_of,
    list_victims,
    place_fills,
    plus_held,
    score_on_prompt,
    score_on_use,
)

_CPU = tl.constexpr(CPU)
_NONE = tl.constexpr(NONE)
_DEFERRED = tl.constexpr(DEFERRED)


class Inputs(NamedTuple):
    """Pointers of `PlanInputs`, and the rows and columns of fill_count."""

    routed: object
    valid_tokens: object
    fillable: object
    fill_count: object
    buckets_count: int
    columns_count: int


class Outputs(NamedTuple):
    """Pointers of `PlanOutputs`."""

    physical: object
    fills: object
    fills_count: object
    cpu: object
    cpu_count: object
    stats: object


@triton.jit
def _wanted_fills(inputs, layer, needed_count, misses_count, pairs_count, SIZES: tl.constexpr):
    """q before slots are considered."""
    wanted = misses_count
    if SIZES.cpu_kernel:
        tokens_per_expert = (pairs_count + needed_count - 1) // tl.maximum(needed_count, 1)
        bucket = needed_count * 0
        while (bucket < inputs.buckets_count - 1) & (((tokens_per_expert - 1) >> bucket) > 0):
            bucket += 1
        column = tl.minimum(misses_count, inputs.columns_count - 1)
        entry = tl.load(inputs.fill_count + bucket * inputs.columns_count + column)
        wanted = tl.minimum(tl.maximum(entry, 1), misses_count)
    return tl.where(tl.load(inputs.fillable + layer) != 0, wanted, 0)


@triton.jit
def _count_uses(routed, entries_count, SIZES: tl.constexpr):
    """Uses of each expert among the first entries, and how many are no expert of the layer."""
    BLOCK: tl.constexpr = SIZES.experts_block  # 3.6 takes no attribute inside of a list
    uses = tl.zeros([BLOCK], dtype=tl.int32)
    refused_count = entries_count * 0
    start = entries_count * 0
    while start < entries_count:
        entry = start + tl.arange(0, SIZES.pairs_block)
        expert = tl.load(routed + entry, mask=entry < entries_count, other=-1)
        real = (expert >= 0) & (expert < SIZES.experts)
        uses += tl.histogram(tl.where(real, expert, 0), SIZES.experts_block, mask=real)
        refused_count += tl.sum((expert >= SIZES.experts).to(tl.int32), 0)
        start += SIZES.pairs_block
    return uses, refused_count


@triton.jit
def _rewrite(routed, physical, entries_count, slot_of_layer, SIZES: tl.constexpr):
    """physical: the slot of each routed expert, or where else it is."""
    for start in range(0, SIZES.tokens * SIZES.top_k, SIZES.pairs_block):
        entry = start + tl.arange(0, SIZES.pairs_block)
        expert = tl.load(routed + entry, mask=entry < entries_count, other=-1)
        real = (expert >= 0) & (expert < SIZES.experts)
        slot = tl.load(slot_of_layer + expert, mask=real, other=-1)
        elsewhere = _CPU if SIZES.cpu_kernel else _DEFERRED
        place = tl.where(slot >= 0, slot, elsewhere)
        tl.store(
            physical + entry,
            tl.where(real, place, _NONE),
            mask=entry < SIZES.tokens * SIZES.top_k,
        )


@triton.jit
def _write_stats(stats, values):
    """`values` in the order of `Stat`."""
    for place in tl.static_range(9):
        tl.store(stats + place, values[place].to(tl.int64))


@triton.jit(do_not_specialize=["layer"])
def plan_kernel(layer, inputs, state, outputs, SIZES: tl.constexpr):
    """`contract`'s plan; the numbers are those of its steps."""
    # 1, 2
    now = tl.load(state.clock) + 1
    valid = tl.minimum(tl.maximum(tl.load(inputs.valid_tokens), 0), SIZES.tokens)
    entries_count = valid * SIZES.top_k
    uses, refused_count = _count_uses(inputs.routed, entries_count, SIZES)
    experts = tl.arange(0, SIZES.experts_block)
    ids = layer * SIZES.experts + experts
    needed = uses > 0
    # 3
    slot = tl.load(state.slot_of_expert + ids, mask=needed, other=-1)
    demanded = tl.load(state.demanded_at + ids, mask=needed, other=-1)
    score_before = tl.load(state.score + ids, mask=needed, other=0)
    hit = slot >= 0
    miss = needed & (slot < 0)
    key_before = tl.load(state.slot_key + slot, mask=hit, other=0)
    hits_count = tl.sum(hit.to(tl.int32), 0)
    misses_count = tl.sum(miss.to(tl.int32), 0)
    pairs_count = tl.sum(uses, 0)
    tl.debug_barrier()
    tl.store(state.clock, now)
    # This marks the slots that are needed now.
    tl.store(state.demanded_at + ids, now, mask=hit)
    tl.debug_barrier()
    # 4
    fills_count = misses_count * 0
    if misses_count > 0:
        needed_count = hits_count + misses_count
        wanted_count = _wanted_fills(inputs, layer, needed_count, misses_count, pairs_count, SIZES)
        if wanted_count > 0:
            fills_count = list_victims(state, outputs.fills, wanted_count, layer, now, SIZES, False)
    # 5
    filled = least_of(-demanded, miss, fills_count)
    new_slot, evictions_count = place_fills(state, outputs.fills, filled, ids)
    # 6
    left = miss & (filled == 0)
    left_count = misses_count - fills_count
    cpu_count = left_count if SIZES.cpu_kernel else left_count * 0
    if SIZES.cpu_kernel:
        tl.store(outputs.cpu + tl.cumsum(left.to(tl.int32), 0) - 1, experts, mask=left)
    tl.store(outputs.cpu_count, cpu_count)
    tl.store(outputs.fills_count, fills_count)
    # 7
    served = hit | filled
    stamped = needed if SIZES.cpu_kernel else served
    score_now = score_on_use(score_before, now, SIZES.half_life)
    tl.store(state.score + ids, score_now, mask=stamped)
    tl.store(state.demanded_at + ids, now, mask=stamped)
    key = plus_held(key_of_use(score_now, now, SIZES.half_life), key_before)
    tl.store(state.slot_key + tl.where(hit, slot, new_slot), key, mask=served)
    hit_pairs_count = tl.sum(tl.where(hit, uses, 0), 0)
    _write_stats(
        outputs.stats,
        (hits_count, misses_count, fills_count, cpu_count, evictions_count,
         left_count - cpu_count, hit_pairs_count, pairs_count, refused_count),
    )  # fmt: skip
    tl.debug_barrier()
    slot_of_layer = state.slot_of_expert + layer * SIZES.experts
    _rewrite(inputs.routed, outputs.physical, entries_count, slot_of_layer, SIZES)


@triton.jit(do_not_specialize=["layer"])
def reserve_kernel(
    layer, wanted, inputs, state, outputs, SIZES: tl.constexpr, HAS_WANTED: tl.constexpr
):
    """`contract`'s reserve. `wanted` is not read without HAS_WANTED."""
    experts = tl.arange(0, SIZES.experts_block)
    ids = layer * SIZES.experts + experts
    asked = experts < SIZES.experts
    if HAS_WANTED:
        asked = asked & (tl.load(wanted + experts, mask=asked, other=0) != 0)
    slot = tl.load(state.slot_of_expert + ids, mask=asked, other=-1)
    hit = slot >= 0
    missing = asked & (slot < 0)
    key_before = tl.load(state.slot_key + slot, mask=hit, other=0)
    missing_count = tl.sum(missing.to(tl.int32), 0)
    fills_count = missing_count * 0
    if (missing_count > 0) & (tl.load(inputs.fillable + layer) != 0):
        now = tl.load(state.clock)
        fills_count = list_victims(state, outputs.fills, missing_count, layer, now, SIZES, True)
    filled = missing & (tl.cumsum(missing.to(tl.int32), 0) <= fills_count)
    new_slot, evictions_count = place_fills(state, outputs.fills, filled, ids)
    key = held_key(key_before, filled)
    tl.store(state.slot_key + tl.where(hit, slot, new_slot), key, mask=hit | filled)
    tl.store(outputs.fills_count, fills_count)
    none = fills_count * 0
    hits_count = tl.sum(hit.to(tl.int32), 0)
    left_count = missing_count - fills_count
    _write_stats(
        outputs.stats,
        (hits_count, missing_count, fills_count, none, evictions_count, left_count, none, none,
         none),
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "tokens_count", "kept_count"])
def release_kernel(layer, uses, tokens_count, kept_count, state, SIZES: tl.constexpr):
    """`contract`'s release."""
    now = tl.load(state.clock) + 1
    experts = tl.arange(0, SIZES.experts_block)
    ids = layer * SIZES.experts + experts
    exists = experts < SIZES.experts
    used = tl.load(uses + experts, mask=exists, other=0)
    slot = tl.load(state.slot_of_expert + ids, mask=exists, other=-1)
    score_before = tl.load(state.score + ids, mask=exists, other=0)
    key_before = tl.load(state.slot_key + slot, mask=slot >= 0, other=0)
    held = (slot >= 0) & is_held(key_before)
    score_now = score_on_prompt(score_before, now, used, tokens_count, SIZES.half_life)
    kept = least_of(-used.to(tl.int64), held & (used > 0), kept_count)
    tl.debug_barrier()
    tl.store(state.clock, now)
    tl.store(state.score + ids, score_now, mask=exists)
    tl.store(state.demanded_at + ids, now, mask=kept)
    key = tl.where(kept, key_of_use(score_now, now, SIZES.half_life), freed_key(key_before))
    tl.store(state.slot_key + slot, key, mask=held)
