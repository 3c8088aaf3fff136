"""What a decode step costs with each backend, estimated from measured rates and the cache's size.

A step of one token asks each MoE layer for k experts. Each is missing with the same probability,
so that the number of missing ones is binomial: costs with a fixed part are not those of the mean.
A layer takes the max of two branches,

    device: fill q experts, then execute them and the hits      CPU: execute the other m - q

and the layers follow each other. These are estimates to compare backends with, not promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from freetokend.policy.fill_table import FillRates, branch_ends_s, cpu_branch_s, fill_table

# Least recently used order misses 16 % with 37 % of the experts resident and 39 % with 11 %, on
# published traces of two models; (1 - r^(1/3))^1.44 goes through both, through 1 at r = 0 and
# through 0 at r = 1.
_MISS_ROOT: Final = 1 / 3
_MISS_POWER: Final = 1.44


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The model's shape and the measured rates; `problem` says whether they make sense.

    slot_bytes_per_s: records executed from slots. device_dense_s, cpu_dense_s: all but the routed
    experts, per token, where it is computed.
    """

    moe_layers_count: int
    experts_per_layer_count: int
    top_k: int
    rates: FillRates
    slot_bytes_per_s: float
    device_dense_s: float
    cpu_dense_s: float

    def problem(self) -> str:
        """Why nothing can be estimated from these figures; empty when it can."""
        if not (self.moe_layers_count >= 1 and 1 <= self.top_k <= self.experts_per_layer_count):
            return (
                f"the model has {self.moe_layers_count} MoE layers, top {self.top_k} of "
                f"{self.experts_per_layer_count} experts"
            )
        if not 0 < self.slot_bytes_per_s < math.inf:
            return f"slot_bytes_per_s is {self.slot_bytes_per_s}; it must be a number above 0"
        for name, seconds in (
            ("device_dense_s", self.device_dense_s),
            ("cpu_dense_s", self.cpu_dense_s),
        ):
            if not 0 <= seconds < math.inf:
                return f"{name} is {seconds}; it must be a number of at least 0"
        return self.rates.problem()


def estimated_miss_ratio(resident_ratio: float) -> float:
    """Of the experts that decode asks for, the share that has no slot: 1 at 0, 0 at 1."""
    within = min(max(resident_ratio, 0.0), 1.0)
    return math.pow(max(1.0 - math.pow(within, _MISS_ROOT), 0.0), _MISS_POWER)


def misses_probabilities(top_k: int, miss_ratio: float) -> tuple[float, ...]:
    """Of 0, 1, ..., top_k missing experts; binomial."""
    return tuple(
        math.comb(top_k, m) * miss_ratio**m * (1 - miss_ratio) ** (top_k - m)
        for m in range(top_k + 1)
    )


def layer_s(costs: StepCosts, *, misses_count: int, fills_count: int) -> float:
    """Seconds of the routed experts of one layer for one token, so many of them missing."""
    executed_count = costs.top_k - misses_count + fills_count
    slot_s = executed_count * costs.rates.record_bytes / costs.slot_bytes_per_s
    filled_s, cpu_s = branch_ends_s(
        replace(costs.rates, slot_bytes_per_s=math.inf),
        bucket=0,
        misses_count=misses_count,
        fills_count=fills_count,
    )
    return max(filled_s + slot_s, cpu_s)


def fused_s(costs: StepCosts) -> float:
    """Seconds per token where every expert has a slot."""
    return costs.device_dense_s + costs.moe_layers_count * layer_s(
        costs, misses_count=0, fills_count=0
    )


def cpu_s(costs: StepCosts) -> float:
    """Seconds per token where the CPU computes everything."""
    experts_s = cpu_branch_s(costs.rates, costs.top_k, bucket=0, alone=True)
    return costs.cpu_dense_s + costs.moe_layers_count * experts_s


def offload_s(costs: StepCosts, *, miss_ratio: float, unfillable_layers_count: int = 0) -> float:
    """Seconds per token where every miss is filled; the CPU executes those of layers that cannot
    be filled."""
    return _cached_s(costs, miss_ratio, unfillable_layers_count, lambda misses: misses)


def hybrid_s(costs: StepCosts, *, miss_ratio: float, unfillable_layers_count: int = 0) -> float:
    """Seconds per token where misses are split by the table; likewise."""
    row = fill_table(costs.rates, costs.top_k, later_ratio=1)[0]
    return _cached_s(costs, miss_ratio, unfillable_layers_count, row.__getitem__)


def _cached_s(
    costs: StepCosts,
    miss_ratio: float,
    unfillable_layers_count: int,
    fills_of: Callable[[int], int],
) -> float:
    probabilities = misses_probabilities(costs.top_k, miss_ratio)
    fillable_s = sum(
        share * layer_s(costs, misses_count=m, fills_count=fills_of(m))
        for m, share in enumerate(probabilities)
    )
    unfillable_s = sum(
        share * layer_s(costs, misses_count=m, fills_count=0)
        for m, share in enumerate(probabilities)
    )
    fillable_count = costs.moe_layers_count - unfillable_layers_count
    return (
        costs.device_dense_s + fillable_count * fillable_s + unfillable_layers_count * unfillable_s
    )
