"""What the two branches of a layer cost, learned step by step from their times.

A branch that has x bytes to read takes t = fixed + x / rate. Each step in which it had work is a
sample (x, t); the estimate is the weighted least squares line through all samples, in which one
weighs `forgetting_ratio` times as much as the next, kept as sums, so that a step costs the same
whatever came before. A step beside the other branch and one alone are different quantities: give
each an estimate of its own.

A time that lies far off the line is left out (something else held the step up), unless so many come
in a row that the machine must have changed; then the line begins anew with them.

Steps of one size say nothing of the fixed cost: then it stays what it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

# Of the mean square of x, below which its spread is rounding and not different steps.
_LEAST_SPREAD_RATIO: Final = 1e-4
_MOST_BYTES_PER_S: Final = 1e15
# What is beyond these was not measured but is a fault in what measured it.
_MOST_BYTES: Final = float(1 << 50)
_MOST_S: Final = 3600.0
# A line through fewer samples cannot tell which one is the outlier.
_TRUSTED_COUNT: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateLimits:
    """forgetting_ratio 0.9: the last ten samples have two thirds of the weight, fifty nearly all.

    A sample is left out beyond outlier_ratio times the mean distance from the line, or
    outlier_least_ratio of its expected time if that is more, always beyond outlier_most_ratio of
    it, or one that was let in would let in the next; change_count of them in a row are the
    machine's new state. Of what the line says of the fixed cost fixed_ratio is believed at once:
    the calls of few steps are seldom of sizes so different that they tell it from noise.
    """

    forgetting_ratio: float = 0.9
    outlier_ratio: float = 6.0
    outlier_least_ratio: float = 0.1
    outlier_most_ratio: float = 0.3
    change_count: int = 4
    fixed_ratio: float = 1.0


_LIMITS: Final = EstimateLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchEstimate:
    """One branch. Begin with a measured or declared rate and fixed cost.

    weight and the sums are of the samples that count, distance_s the mean distance of a sample from
    the line; taken_s: when the last one was taken. outliers_count: left out in a row now.
    """

    bytes_per_s: float
    fixed_s: float = 0.0
    weight: float = 0.0
    sum_x: float = 0.0
    sum_t: float = 0.0
    sum_xx: float = 0.0
    sum_xt: float = 0.0
    distance_s: float = 0.0
    taken_s: float | None = None
    outliers_count: int = 0
    rejected_count: int = 0

    def expected_s(self, size_bytes: float) -> float:
        """What so many bytes take."""
        return self.fixed_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """What the calls of one step add up to, x bytes in t seconds each; xx and xt: of the products.
    Together they are one sample, in which differences between the calls are not lost."""

    count: int = 0
    sum_x: float = 0.0
    sum_t: float = 0.0
    sum_xx: float = 0.0
    sum_xt: float = 0.0

    def __add__(self, other: StepSums) -> StepSums:
        return StepSums(
            count=self.count + other.count,
            sum_x=self.sum_x + other.sum_x,
            sum_t=self.sum_t + other.sum_t,
            sum_xx=self.sum_xx + other.sum_xx,
            sum_xt=self.sum_xt + other.sum_xt,
        )


def with_sample(
    estimate: BranchEstimate,
    *,
    size_bytes: float,
    duration_s: float,
    now_s: float,
    limits: EstimateLimits = _LIMITS,
) -> BranchEstimate:
    """The estimate after a step in which the branch read so many bytes in so long. What cannot be
    (no bytes, no time, not a number) changes nothing."""
    sums = StepSums(
        count=1,
        sum_x=size_bytes,
        sum_t=duration_s,
        sum_xx=size_bytes * size_bytes,
        sum_xt=size_bytes * duration_s,
    )
    return with_sums(estimate, sums, now_s=now_s, limits=limits)


def with_sums(
    estimate: BranchEstimate, sums: StepSums, *, now_s: float, limits: EstimateLimits = _LIMITS
) -> BranchEstimate:
    """The estimate after a step of several calls, which weighs what one of a single call does. As
    of `with_sample`."""
    if sums.count < 1:
        return estimate
    size_bytes, duration_s = sums.sum_x / sums.count, sums.sum_t / sums.count
    if not (1 <= size_bytes <= _MOST_BYTES and 0 < duration_s <= _MOST_S):
        return estimate
    mean_xx, mean_xt = sums.sum_xx / sums.count, sums.sum_xt / sums.count
    if not (0 < mean_xx < math.inf and 0 < mean_xt < math.inf):
        return estimate
    expected_s = estimate.expected_s(size_bytes)
    off_s = abs(duration_s - expected_s)
    most_s = min(limits.outlier_ratio * estimate.distance_s, limits.outlier_most_ratio * expected_s)
    most_s = max(most_s, limits.outlier_least_ratio * expected_s)
    if estimate.weight >= min(_TRUSTED_COUNT, _most_weight(limits) / 2) and off_s > most_s:
        outliers = estimate.outliers_count + 1
        if outliers < limits.change_count:
            return replace(
                estimate, outliers_count=outliers, rejected_count=estimate.rejected_count + 1
            )
        # The line was of another machine, so to speak; its last figures hold until there are two.
        estimate = BranchEstimate(
            bytes_per_s=estimate.bytes_per_s,
            fixed_s=estimate.fixed_s,
            rejected_count=estimate.rejected_count,
        )
        off_s = 0.0
    keep = limits.forgetting_ratio
    weight = estimate.weight * keep + 1.0
    summed = replace(
        estimate,
        weight=weight,
        sum_x=estimate.sum_x * keep + size_bytes,
        sum_t=estimate.sum_t * keep + duration_s,
        sum_xx=estimate.sum_xx * keep + mean_xx,
        sum_xt=estimate.sum_xt * keep + mean_xt,
        distance_s=(estimate.distance_s * (weight - 1.0) + off_s) / weight,
        taken_s=now_s,
        outliers_count=0,
    )
    return _fitted(summed, limits)


def _most_weight(limits: EstimateLimits) -> float:
    return 1.0 / max(1.0 - limits.forgetting_ratio, 1e-9)


def _fitted(estimate: BranchEstimate, limits: EstimateLimits) -> BranchEstimate:
    """The line through the sums: no fixed cost below nought, no rate that is none."""
    mean_x = estimate.sum_x / estimate.weight
    mean_t = estimate.sum_t / estimate.weight
    mean_xx = estimate.sum_xx / estimate.weight
    spread = mean_xx - mean_x * mean_x
    fixed_s = min(estimate.fixed_s, mean_t)
    if spread > _LEAST_SPREAD_RATIO * mean_xx:
        slope = (estimate.sum_xt / estimate.weight - mean_x * mean_t) / spread
        fixed_s += limits.fixed_ratio * (min(max(mean_t - slope * mean_x, 0.0), mean_t) - fixed_s)
    # With the fixed cost held, the slope of least squares; for the free one it is the same line.
    per_byte_s = (estimate.sum_xt - fixed_s * estimate.sum_x) / estimate.sum_xx
    if per_byte_s * _MOST_BYTES_PER_S < 1.0:
        return replace(estimate, fixed_s=fixed_s)
    return replace(estimate, fixed_s=fixed_s, bytes_per_s=1.0 / per_byte_s)
