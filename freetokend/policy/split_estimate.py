"""What the split of missing experts costs, learned from the steps that are served.

Four lines of time by bytes: fills and the CPU, each beside the other and each alone. A call that
was split tells those beside, one whose misses went one way that way's rate alone. Of a split call
the branch that ended first had company all the time; the other went on alone, faster by the ratio
that the profile measured, and that part of its time counts for as much more. Where this ratio is
not the right one any more, the error is in proportion to the time that one branch waits for the
other, which is what a table made of the estimate makes small.

When a line begins anew because the machine has changed, its partner moves with it at once and
believes its own next sample. A line that got no sample for long while its partner did is moved with
it: the profile's ratio between the two is a better guess than the rate of another hour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from freetokend.policy.fill_table import FillRates
from freetokend.policy.rate_estimate import BranchEstimate, EstimateLimits, StepSums, with_sums

# Of a branch that has company a line may not be told apart from nought.
_LEAST_SHARE: Final = 1e-3
# A ratio of two rates beyond this is a fault in what measured them.
_MOST_RATIO: Final = 8.0
# Steps with samples of its partner after which a line without any is moved with it.
STALE_STEPS_COUNT: Final = 48
_NOTHING: Final = StepSums()
_FIXED_RATIO: Final = 0.03
BESIDE_LIMITS: Final = EstimateLimits(fixed_ratio=_FIXED_RATIO)
# Alone is what few calls are: they have to count at once.
ALONE_LIMITS: Final = EstimateLimits(forgetting_ratio=0.7, change_count=2, fixed_ratio=_FIXED_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTimes:
    """One branch in the calls of a step, x in experts: own, the time it took; beside, the part of
    it in which the other branch ran as well."""

    own: StepSums = _NOTHING
    beside: StepSums = _NOTHING


_AT_REST: Final = BranchTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTimes:
    """The calls of one step that had misses and went the same way, in one bucket of tokens.

    misses: x missing experts, in how long a layer took; fills, cpu: of a call that was split both.
    """

    bucket: int
    misses: StepSums
    fills: BranchTimes = _AT_REST
    cpu: BranchTimes = _AT_REST

    @property
    def is_split(self) -> bool:
        return self.fills.own.count > 0 and self.cpu.own.count > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchLines:
    """Beside the other branch and alone; at which step each had its last sample."""

    beside: BranchEstimate
    alone: BranchEstimate
    beside_at: int = 0
    alone_at: int = 0

    @property
    def taken_s(self) -> float | None:
        """When the newest sample was taken; None before the first."""
        times = [one.taken_s for one in (self.beside, self.alone) if one.taken_s is not None]
        return max(times, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitEstimate:
    """Begin with `begin`. profile: what it began with; steps_count: those with samples."""

    profile: FillRates
    fills: BranchLines
    cpu: BranchLines
    steps_count: int = 0


def begin(profile: FillRates) -> SplitEstimate:
    """From rates that were measured or declared, and have no `problem`."""
    least = _LEAST_SHARE * profile.cpu_alone_bytes_per_s
    return SplitEstimate(
        profile=profile,
        fills=BranchLines(
            beside=_line(profile.fill_bytes_per_s, profile.fill_fixed_s),
            alone=_line(profile.fill_alone_bytes_per_s, profile.fill_fixed_s),
        ),
        cpu=BranchLines(
            beside=_line(max(profile.cpu_bytes_per_s, least), profile.cpu_fixed_s),
            alone=_line(profile.cpu_alone_bytes_per_s, profile.cpu_fixed_s),
        ),
    )


def _line(bytes_per_s: float, fixed_s: float) -> BranchEstimate:
    return BranchEstimate(bytes_per_s=bytes_per_s, fixed_s=fixed_s)


def with_step(
    estimate: SplitEstimate, calls: Iterable[SplitTimes], *, now_s: float
) -> SplitEstimate:
    """The estimate after a step. Calls of buckets that the profile does not have count as of its
    last."""
    profile = estimate.profile
    fill_ratio = _alone_by_beside(profile.fill_alone_bytes_per_s, profile.fill_bytes_per_s)
    cpu_ratio = _alone_by_beside(profile.cpu_alone_bytes_per_s, profile.cpu_bytes_per_s)
    sums = dict.fromkeys(("fills", "cpu", "fills_alone", "cpu_alone"), _NOTHING)
    for one in calls:
        last = len(profile.cpu_slowdown_ratios) - 1
        cpu_each = profile.record_bytes * profile.cpu_slowdown_ratios[min(one.bucket, last)]
        fills, cpu = _of_bytes(one.fills, profile.record_bytes), _of_bytes(one.cpu, cpu_each)
        if one.is_split:
            sums["fills"] += _all_beside(fills, fill_ratio)
            sums["cpu"] += _all_beside(cpu, cpu_ratio)
        else:
            sums["fills_alone"] += fills.own
            sums["cpu_alone"] += cpu.own
    if not any(one.count for one in sums.values()):
        return estimate
    step = estimate.steps_count + 1
    return replace(
        estimate,
        fills=_with_sums(estimate.fills, sums["fills"], sums["fills_alone"], step, now_s),
        cpu=_with_sums(estimate.cpu, sums["cpu"], sums["cpu_alone"], step, now_s),
        steps_count=step,
    )


def _with_sums(
    lines: BranchLines, beside: StepSums, alone: StepSums, step: int, now_s: float
) -> BranchLines:
    after = BranchLines(
        beside=with_sums(lines.beside, beside, now_s=now_s, limits=BESIDE_LIMITS),
        alone=with_sums(lines.alone, alone, now_s=now_s, limits=ALONE_LIMITS),
        beside_at=step if beside.count else lines.beside_at,
        alone_at=step if alone.count else lines.alone_at,
    )
    if _began_anew(lines.beside, after.beside):
        return replace(after, alone=_moved(after.alone, lines.beside, after.beside))
    if _began_anew(lines.alone, after.alone):
        return replace(after, beside=_moved(after.beside, lines.alone, after.alone))
    return after


def _began_anew(before: BranchEstimate, after: BranchEstimate) -> bool:
    return before.weight > after.weight == 1.0


def _moved(line: BranchEstimate, before: BranchEstimate, after: BranchEstimate) -> BranchEstimate:
    """As its partner was, if nothing says yet that it was too."""
    if line.weight == 1.0:
        return line
    ratio = _rate_at(after, before.fixed_s) / before.bytes_per_s
    return BranchEstimate(
        bytes_per_s=line.bytes_per_s * ratio, fixed_s=line.fixed_s, taken_s=line.taken_s
    )


def _alone_by_beside(alone_bytes_per_s: float, beside_bytes_per_s: float) -> float:
    if beside_bytes_per_s * _MOST_RATIO < alone_bytes_per_s:
        return _MOST_RATIO
    return max(alone_bytes_per_s / beside_bytes_per_s, 1.0)


def _of_bytes(times: BranchTimes, each_bytes: float) -> BranchTimes:
    return BranchTimes(own=_scaled(times.own, each_bytes), beside=_scaled(times.beside, each_bytes))


def _scaled(sums: StepSums, factor: float) -> StepSums:
    return StepSums(
        count=sums.count,
        sum_x=sums.sum_x * factor,
        sum_t=sums.sum_t,
        sum_xx=sums.sum_xx * factor * factor,
        sum_xt=sums.sum_xt * factor,
    )


def _all_beside(times: BranchTimes, ratio: float) -> StepSums:
    """As if the other branch had never ended: what was done without it would have taken longer."""
    own, beside = times.own, times.beside
    return replace(
        own,
        sum_t=beside.sum_t + ratio * (own.sum_t - beside.sum_t),
        sum_xt=beside.sum_xt + ratio * (own.sum_xt - beside.sum_xt),
    )


def estimated_rates(estimate: SplitEstimate) -> FillRates:
    """What a table is made of now; never with a `problem` where the profile has none."""
    profile = estimate.profile
    fill_beside, fill_alone, fill_fixed_s = _rates(
        estimate.fills, profile.fill_bytes_per_s, profile.fill_alone_bytes_per_s
    )
    cpu_beside, cpu_alone, cpu_fixed_s = _rates(
        estimate.cpu, profile.cpu_bytes_per_s, profile.cpu_alone_bytes_per_s
    )
    if not estimate.cpu.beside_at:
        cpu_beside = min(cpu_beside, profile.cpu_bytes_per_s)
    return replace(
        profile,
        fill_bytes_per_s=fill_beside,
        fill_alone_bytes_per_s=fill_alone,
        cpu_bytes_per_s=cpu_beside,
        cpu_alone_bytes_per_s=cpu_alone,
        fill_fixed_s=fill_fixed_s,
        cpu_fixed_s=cpu_fixed_s,
    )


def _rates(
    lines: BranchLines, profile_beside: float, profile_alone: float
) -> tuple[float, float, float]:
    """(beside, alone, fixed): one fixed cost for both, that of the line with newer samples."""
    ratio = _alone_by_beside(profile_alone, profile_beside)
    from_beside = lines.beside_at >= lines.alone_at
    newer, older = (lines.beside, lines.alone) if from_beside else (lines.alone, lines.beside)
    fixed_s = newer.fixed_s
    newer_rate, older_rate = newer.bytes_per_s, _rate_at(older, fixed_s)
    if abs(lines.beside_at - lines.alone_at) >= STALE_STEPS_COUNT:
        older_rate = newer_rate * ratio if from_beside else newer_rate / ratio
    beside, alone = (newer_rate, older_rate) if from_beside else (older_rate, newer_rate)
    return (
        (beside, max(alone, beside), fixed_s)
        if from_beside
        else (
            min(beside, alone),
            alone,
            fixed_s,
        )
    )


def _rate_at(line: BranchEstimate, fixed_s: float) -> float:
    """Of a line, with another fixed cost: as fast for what its samples were of."""
    if not line.weight:
        return line.bytes_per_s
    size_bytes = line.sum_x / line.weight
    moving_s = line.expected_s(size_bytes) - fixed_s
    return size_bytes / moving_s if moving_s > size_bytes / 1e15 else line.bytes_per_s
