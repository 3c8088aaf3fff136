"""Misses of all policies over one trace at one number of slots, ready to print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from freetokend.policy.eviction import Lru, default_order
from freetokend.traces.replay import (
    LayerCall,
    layer_calls,
    replay_cache,
    replay_optimum,
    replay_placement,
    replay_static,
)
from freetokend.traces.trace import RoutingTrace, TraceShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Misses per needed expert in decode steps.

    ours: the default order, with what prompts leave behind; lru: nothing but recency; optimum:
    Belady's, which knows the future; placement: updated at every prefill; static: without a look
    at the routing.
    """

    slots_count: int
    capacity_ratio: float
    ours: float
    lru: float
    optimum: float
    placement: float
    static: float


class TraceComparison:
    """One trace, prepared once for comparisons at several sizes."""

    def __init__(self, trace: RoutingTrace) -> None:
        self._shape: TraceShape = trace.shape
        self._calls: tuple[LayerCall, ...] = layer_calls(trace)

    def at(self, slots_count: int) -> Comparison:
        """All policies with so many slots; raises ValueError below 1."""
        shape, calls = self._shape, self._calls
        order = default_order(shape.layers_count)
        return Comparison(
            slots_count=slots_count,
            capacity_ratio=slots_count / shape.experts_count,
            ours=replay_cache(shape, calls, order, slots_count).ratio,
            lru=replay_cache(shape, calls, Lru(), slots_count, keep_prompts=False).ratio,
            optimum=replay_optimum(shape, calls, slots_count).ratio,
            placement=replay_placement(shape, calls, slots_count).ratio,
            static=replay_static(shape, calls, slots_count).ratio,
        )


def slots_at(shape: TraceShape, capacity_ratio: float) -> int:
    """Slots that hold this share of all experts, at least one."""
    return max(1, round(capacity_ratio * shape.experts_count))


def step_demand(shape: TraceShape) -> int:
    """Distinct experts that one token needs: layers times experts per token."""
    return shape.layers_count * shape.experts_per_token


def table(found: Iterable[Comparison]) -> str:
    """Lines for people: shares of misses in percent."""
    lines = ["   size   slots    ours     lru  optimum  placement  static"]
    lines += [
        f"{100 * one.capacity_ratio:5.1f} %  {one.slots_count:6}  {100 * one.ours:6.2f}  "
        f"{100 * one.lru:6.2f}  {100 * one.optimum:7.2f}  {100 * one.placement:9.2f}  "
        f"{100 * one.static:6.2f}"
        for one in found
    ]
    return "\n".join(lines)
