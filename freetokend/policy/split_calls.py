"""What the calls of a step took, one by one, as the sums that an estimate is fed with.

Now and then a call is held up by something else. One such call in a step would tell more of the
line than all others: a time that is far above what its like took, expert for expert, counts as not
so far.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from freetokend.core.cache_stats import CallTimes
from freetokend.policy.rate_estimate import StepSums
from freetokend.policy.split_estimate import BranchTimes, SplitTimes

# Of the median time per expert; what is above counts as this.
_MOST_RATIO: Final = 2.5
# Of fewer calls the median says little.
_LEAST_CALLS: Final = 5


def split_times(calls: Iterable[CallTimes]) -> tuple[SplitTimes, ...]:
    """By way (split, filled, on the CPU) and bucket."""
    alike: dict[tuple[bool, bool, int], list[CallTimes]] = {}
    for call in calls:
        alike.setdefault((call.is_split, call.fills_count > 0, call.bucket), []).append(call)
    return tuple(_times(bucket, filled, group) for (_, filled, bucket), group in alike.items())


def _times(bucket: int, filled: bool, calls: Sequence[CallTimes]) -> SplitTimes:
    layers = [(call.misses_count, call.layer_s, call.layer_s) for call in calls]
    fills, cpu = [], []
    for call in calls:
        both_s = min(call.fill_s, call.cpu_s)
        if filled:
            fills.append((call.fills_count, call.fill_s, both_s))
        if call.fills_count < call.misses_count:
            cpu.append((call.cpu_count, call.cpu_s, both_s))
    return SplitTimes(
        bucket=bucket,
        misses=_branch(layers).own,
        fills=_branch(fills),
        cpu=_branch(cpu),
    )


def _branch(samples: Sequence[tuple[int, float, float]]) -> BranchTimes:
    """Of (experts, seconds, seconds beside the other branch)."""
    most_s = float("inf")
    if len(samples) >= _LEAST_CALLS:
        most_s = _MOST_RATIO * statistics.median(own_s / count for count, own_s, _ in samples)
    sum_x = sum_t = sum_xx = sum_xt = both_t = both_xt = 0.0
    for count, took_s, with_other_s in samples:
        own_s = min(took_s, count * most_s)
        beside_s = min(with_other_s, own_s)
        sum_x += count
        sum_xx += count * count
        sum_t += own_s
        sum_xt += count * own_s
        both_t += beside_s
        both_xt += count * beside_s
    calls_count = len(samples)
    return BranchTimes(
        own=StepSums(count=calls_count, sum_x=sum_x, sum_t=sum_t, sum_xx=sum_xx, sum_xt=sum_xt),
        beside=StepSums(
            count=calls_count, sum_x=sum_x, sum_t=both_t, sum_xx=sum_xx, sum_xt=both_xt
        ),
    )
