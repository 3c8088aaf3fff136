"""The recursive estimate against least squares over all samples at once, and what it leaves out."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.policy.rate_estimate import BranchEstimate, EstimateLimits, with_sample

RECORD_BYTES = 18 << 20
FREE = EstimateLimits(outlier_ratio=1e9, outlier_least_ratio=1e9, outlier_most_ratio=1e9)


def fed(
    estimate: BranchEstimate,
    samples: list[tuple[float, float]],
    limits: EstimateLimits | None = None,
) -> BranchEstimate:
    for size_bytes, duration_s in samples:
        estimate = with_sample(
            estimate,
            size_bytes=size_bytes,
            duration_s=duration_s,
            now_s=1.0,
            limits=limits or EstimateLimits(),
        )
    return estimate


def times(
    rate: float, fixed_s: float, count: int, chance: random.Random, noise: float = 0.0
) -> list[tuple[float, float]]:
    sizes = [RECORD_BYTES * chance.randrange(1, 40) for _ in range(count)]
    return [(x, (fixed_s + x / rate) * (1 + chance.uniform(-noise, noise))) for x in sizes]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.5, 2.0)), min_size=3, max_size=40),
    st.sampled_from([0.8, 0.95, 0.99]),
)
def test_it_is_weighted_least_squares(
    steps: list[tuple[int, float]], forgetting_ratio: float
) -> None:
    limits = EstimateLimits(
        forgetting_ratio=forgetting_ratio,
        outlier_ratio=1e9,
        outlier_least_ratio=1e9,
        outlier_most_ratio=1e9,
    )
    samples = [(float(x), 0.5 + x / 10 * factor) for x, factor in steps]
    estimate = fed(BranchEstimate(bytes_per_s=10.0), samples, limits)
    sizes = np.array([x for x, _ in samples])
    durations = np.array([t for _, t in samples])
    weights = forgetting_ratio ** np.arange(len(samples))[::-1]
    mean = np.average(sizes, weights=weights)
    if np.average((sizes - mean) ** 2, weights=weights) < 1e-3 * np.average(
        sizes**2, weights=weights
    ):
        return
    slope, fixed_s = np.polyfit(sizes, durations, 1, w=np.sqrt(weights))
    if 0 <= fixed_s <= np.average(durations, weights=weights) and slope > 0:
        assert estimate.fixed_s == pytest.approx(fixed_s, abs=1e-5)
        assert 1 / estimate.bytes_per_s == pytest.approx(slope, rel=1e-5)
    assert estimate.fixed_s >= 0
    assert estimate.bytes_per_s > 0


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=30))
def test_any_samples_leave_a_line(samples: list[tuple[float, float]]) -> None:
    estimate = fed(BranchEstimate(bytes_per_s=1e9), [(abs(x) % 1e13, t) for x, t in samples])
    assert estimate.fixed_s >= 0
    assert estimate.bytes_per_s > 0


def test_steps_of_one_size_keep_the_fixed_cost() -> None:
    samples = [(1e8, 0.001 + 1e8 / 2e10)] * 50
    estimate = fed(BranchEstimate(bytes_per_s=1e10, fixed_s=0.001), samples)
    assert estimate.fixed_s == 0.001
    assert estimate.bytes_per_s == pytest.approx(2e10)


def test_outliers_are_left_out_and_a_change_is_followed() -> None:
    chance = random.Random(1)
    estimate = fed(BranchEstimate(bytes_per_s=1e10), times(2e10, 2e-4, 100, chance, 0.02))
    assert estimate.bytes_per_s == pytest.approx(2e10, rel=0.02)
    held_up = [(20.0 * RECORD_BYTES, 1.0)] * 3
    after = fed(estimate, held_up)
    assert (after.bytes_per_s, after.rejected_count) == (estimate.bytes_per_s, 3)
    slower = fed(after, times(5e9, 2e-4, 30, chance, 0.02))
    assert slower.bytes_per_s == pytest.approx(5e9, rel=0.05)
