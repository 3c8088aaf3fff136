"""Plans of the expert cache in host memory: typed face of the `_exec` extension module.

`freetokend.experts.plan.contract` says what each call does and what lies behind the addresses; all
of it must outlive the planner. Integers that make no sense are refused before anything changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.native import _exec
from freetokend.native.executor import faults


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheArrays:
    """Addresses of the residency state.

    int32: slot_of_expert [L * E], expert_of_slot [slots_capacity], slots_count [1];
    int64: slot_key [slots_capacity], demanded_at [L * E], score [L * E], clock [1].
    """

    slot_of_expert: int
    expert_of_slot: int
    slot_key: int
    demanded_at: int
    score: int
    clock: int
    slots_count: int
    slots_capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """L MoE layers of E experts; the order of eviction as (half_life_ticks, ticks_per_layer).

    half_life_ticks: 0 for least recently used; both below 2^24.
    """

    layers_count: int
    experts_per_layer_count: int
    cpu_kernel: bool
    half_life_ticks: int
    ticks_per_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAddresses:
    """Addresses of a plan call.

    int32: routed, physical [tokens_capacity, top_k], valid_tokens [1], fillable [L], fill_count
    [buckets_count, misses_capacity + 1], fills [E, 2], fills_count [1], cpu [E], cpu_count [1];
    int64: stats [9].
    """

    routed: int
    tokens_capacity: int
    top_k: int
    valid_tokens: int
    fillable: int
    fill_count: int
    buckets_count: int
    misses_capacity: int
    physical: int
    fills: int
    fills_count: int
    cpu: int
    cpu_count: int
    stats: int


class CachePlanner:
    """Allocates when it is made and never again. One call at a time; none holds the GIL."""

    def __init__(self, arrays: CacheArrays, shape: CacheShape) -> None:
        with faults():
            self._native = _exec.CachePlanner(
                slot_of_expert=arrays.slot_of_expert,
                expert_of_slot=arrays.expert_of_slot,
                slot_key=arrays.slot_key,
                demanded_at=arrays.demanded_at,
                score=arrays.score,
                clock=arrays.clock,
                slots_count=arrays.slots_count,
                slots_capacity=arrays.slots_capacity,
                layers_count=shape.layers_count,
                experts_per_layer_count=shape.experts_per_layer_count,
                cpu_kernel=shape.cpu_kernel,
                half_life_ticks=shape.half_life_ticks,
                ticks_per_layer=shape.ticks_per_layer,
            )

    def plan(self, moe_layer_index: int, call: PlanAddresses) -> None:
        """A decode step of one MoE layer."""
        with faults():
            self._native.plan(
                moe_layer_index,
                routed=call.routed,
                tokens_capacity=call.tokens_capacity,
                top_k=call.top_k,
                valid_tokens=call.valid_tokens,
                fillable=call.fillable,
                fill_count=call.fill_count,
                buckets_count=call.buckets_count,
                misses_capacity=call.misses_capacity,
                physical=call.physical,
                fills=call.fills,
                fills_count=call.fills_count,
                cpu=call.cpu,
                cpu_count=call.cpu_count,
                stats=call.stats,
            )

    def reserve(
        self,
        moe_layer_index: int,
        *,
        fillable: int,
        wanted: int,
        fills: int,
        fills_count: int,
        stats: int,
    ) -> None:
        """Slots for a layer. Addresses as in `PlanAddresses`; wanted: int32 [E], 0 for all."""
        with faults():
            self._native.reserve(
                moe_layer_index,
                fillable=fillable,
                wanted=wanted,
                fills=fills,
                fills_count=fills_count,
                stats=stats,
            )

    def release(
        self, moe_layer_index: int, *, uses: int, tokens_count: int, kept_count: int
    ) -> None:
        """The layer's slots are free again. uses: address of int32 [E]."""
        with faults():
            self._native.release(
                moe_layer_index, uses=uses, tokens_count=tokens_count, kept_count=kept_count
            )
