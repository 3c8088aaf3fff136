"""Estimates of a step's seconds: against sums written out, and where they have to agree."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.policy.fill_table import FillRates, fill_table, ideal_rates
from freetokend.policy.step_cost import (
    StepCosts,
    cpu_s,
    estimated_miss_ratio,
    fused_s,
    hybrid_s,
    layer_s,
    misses_probabilities,
    offload_s,
)

SIZE = 1 << 20
COSTS = StepCosts(
    moe_layers_count=10,
    experts_per_layer_count=64,
    top_k=4,
    rates=replace(
        ideal_rates(SIZE, link_bytes_per_s=1e9, host_bytes_per_s=4e9),
        fill_bytes_per_s=0.9e9,
        fill_fixed_s=2e-5,
        cpu_fixed_s=3e-5,
    ),
    slot_bytes_per_s=1e11,
    device_dense_s=1e-3,
    cpu_dense_s=2e-2,
)
# Both rates within a factor of 100, as they are found.
RATE = st.floats(1e9, 1e11)


@st.composite
def any_costs(draw: st.DrawFn) -> StepCosts:
    link, host = draw(RATE), draw(RATE)
    return replace(
        COSTS,
        top_k=draw(st.integers(1, 10)),
        rates=replace(
            ideal_rates(SIZE, link_bytes_per_s=link, host_bytes_per_s=host),
            fill_fixed_s=draw(st.floats(0, 1e-3)),
            cpu_fixed_s=draw(st.floats(0, 1e-3)),
        ),
        slot_bytes_per_s=draw(st.floats(1e10, 1e13)),
    )


@pytest.mark.parametrize(
    ("resident", "misses"), [(0.37, 0.16), (0.11, 0.39), (0.0, 1.0), (1.0, 0.0), (-1, 1), (2, 0)]
)
def test_the_curve_goes_through_the_published_points(resident: float, misses: float) -> None:
    assert estimated_miss_ratio(resident) == pytest.approx(misses, abs=0.005)


@given(st.floats(0, 1), st.floats(0, 1))
def test_more_slots_never_miss_more(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= estimated_miss_ratio(high) <= estimated_miss_ratio(low) <= 1


@pytest.mark.parametrize("miss_ratio", [0.0, 0.3, 1.0])
def test_probabilities_count_every_outcome(miss_ratio: float) -> None:
    counted = [0.0] * 5
    for outcome in itertools.product((False, True), repeat=4):
        counted[sum(outcome)] += math.prod(miss_ratio if m else 1 - miss_ratio for m in outcome)
    assert misses_probabilities(4, miss_ratio) == pytest.approx(counted)


def test_a_layer_by_hand() -> None:
    slot_s, link_s, beside_s, alone_s = SIZE / 1e11, SIZE / 1e9, SIZE / 3e9, SIZE / 4e9
    assert layer_s(COSTS, misses_count=0, fills_count=0) == pytest.approx(4 * slot_s)
    assert layer_s(COSTS, misses_count=2, fills_count=2) == pytest.approx(
        2e-5 + 2 * link_s + 4 * slot_s
    )
    # The CPU ends first; what the link has not moved by then, it moves alone.
    cpu_s = 3e-5 + 3 * beside_s
    left_ratio = 1 - 0.9 * (cpu_s - 2e-5) / link_s
    assert layer_s(COSTS, misses_count=4, fills_count=1) == pytest.approx(
        cpu_s + left_ratio * link_s + slot_s
    )
    assert layer_s(COSTS, misses_count=4, fills_count=0) == pytest.approx(3e-5 + 4 * alone_s)


def test_backends_by_hand() -> None:
    assert fused_s(COSTS) == pytest.approx(1e-3 + 10 * 4 * SIZE / 1e11)
    assert cpu_s(COSTS) == pytest.approx(2e-2 + 10 * (3e-5 + 4 * SIZE / 4e9))
    row = fill_table(COSTS.rates, 4)[0]
    assert row[4] == 1
    # Everything misses: one outcome.
    assert hybrid_s(COSTS, miss_ratio=1.0) == pytest.approx(
        1e-3 + 10 * layer_s(COSTS, misses_count=4, fills_count=1)
    )
    assert offload_s(COSTS, miss_ratio=1.0, unfillable_layers_count=3) == pytest.approx(
        1e-3
        + 7 * layer_s(COSTS, misses_count=4, fills_count=4)
        + 3 * layer_s(COSTS, misses_count=4, fills_count=0)
    )
    # Half misses: the mean over 16 outcomes.
    assert hybrid_s(COSTS, miss_ratio=0.5) == pytest.approx(
        1e-3
        + 10
        * sum(
            math.comb(4, m) / 16 * layer_s(COSTS, misses_count=m, fills_count=row[m])
            for m in range(5)
        )
    )


@given(any_costs(), st.floats(0, 1))
def test_splitting_is_never_estimated_slower_than_filling_all(
    costs: StepCosts, miss_ratio: float
) -> None:
    hybrid = hybrid_s(costs, miss_ratio=miss_ratio)
    assert hybrid <= offload_s(costs, miss_ratio=miss_ratio) * (1 + 1e-9)
    assert hybrid < math.inf


@given(any_costs())
def test_without_misses_all_that_use_the_device_are_alike(costs: StepCosts) -> None:
    assert offload_s(costs, miss_ratio=0.0) == pytest.approx(fused_s(costs))
    assert hybrid_s(costs, miss_ratio=0.0) == pytest.approx(fused_s(costs))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"moe_layers_count": 0}, "0 MoE layers"),
        ({"top_k": 0}, "top 0"),
        ({"top_k": 65}, "top 65"),
        ({"slot_bytes_per_s": 0.0}, "slot_bytes_per_s"),
        ({"slot_bytes_per_s": math.nan}, "slot_bytes_per_s"),
        ({"slot_bytes_per_s": math.inf}, "slot_bytes_per_s"),
        ({"device_dense_s": -1.0}, "device_dense_s"),
        ({"cpu_dense_s": math.nan}, "cpu_dense_s"),
    ],
)
def test_figures_that_estimate_nothing(changes: dict[str, float], named: str) -> None:
    assert COSTS.problem() == ""
    assert named in replace(COSTS, **changes).problem()  # type: ignore[arg-type]


def test_the_rates_problem_is_the_costs_problem() -> None:
    broken: FillRates = replace(COSTS.rates, fill_bytes_per_s=0.0)
    assert "fill_bytes_per_s" in replace(COSTS, rates=broken).problem()
