"""How many of a layer's missing experts are filled into slots, the CPU executing the others (q).

Of m missing experts q are copied over the link and executed on the device while the CPU executes
the other m - q in place. A layer waits for the slower branch, so q minimises the later end of

    a_fill + q * S / B_fill, then q * S / B_slot      and      a_cpu + (m - q) * S / B_cpu

S: bytes of a record; a: the fixed cost of a branch, paid if it has anything to do; B_slot: the rate
at which the device executes what has arrived; the other B: a branch's rate while the other runs as
well, for both read the same memory and neither keeps the rate it has alone. When one has moved its
bytes, the other goes on at the rate of one alone; without that refinement the table is up to 5 %
slower than the best q where the link takes half of the memory's rate (`benchmarks.hybrid`). The
CPU's cost per expert grows with the tokens per expert, a fill's does not: hence one row of the
table per bucket of tokens per expert.

What is filled is there for later steps, which the two ends do not count. A step may therefore be up
to 2 % slower than its best split if more is filled in it (`benchmarks.hybrid`: without that the
table is up to 4.7 % slower than the best constant split of a recorded trace, with it 2.9 %).

Without fixed costs, and where the link takes B_P of the memory's B_H and leaves B_H - B_P to the
CPU, both branches end together at q = m * B_P / B_H (`closed_form_fills`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import ConfigError, InternalError

# Costs this near to each other are the same.
_SAME_RATIO: Final = 1 + 1e-9
# What a step may cost of its best split to have more experts resident behind it.
LATER_RATIO: Final = 1.02
# What is outside of these bounds was not measured but is a fault in what measured it.
_LEAST_BYTES_PER_S: Final = 1.0
_MOST_BYTES_PER_S: Final = 1e15
_MOST_FIXED_S: Final = 3600.0
_MOST_RECORD_BYTES: Final = 1 << 40
_MOST_SLOWDOWN_RATIO: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class FillRates:
    """Both branches' costs for one kind of expert; `problem` says whether they make sense.

    fill_bytes_per_s, cpu_bytes_per_s: each while the other branch runs. The CPU's may be 0: the
    link leaves it nothing, so a fill is never accompanied. fill_alone_bytes_per_s,
    cpu_alone_bytes_per_s: each while the other rests. slot_bytes_per_s: what was filled, executed
    on the device; infinite where that is not worth counting. cpu_slowdown_ratios: for each bucket
    of `token_bucket`, how many times as long as with one token the CPU needs for an expert.
    """

    record_bytes: int
    fill_bytes_per_s: float
    fill_alone_bytes_per_s: float
    cpu_bytes_per_s: float
    cpu_alone_bytes_per_s: float
    fill_fixed_s: float = 0.0
    cpu_fixed_s: float = 0.0
    cpu_slowdown_ratios: tuple[float, ...] = (1.0,)
    slot_bytes_per_s: float = math.inf

    def problem(self) -> str:
        """Why no table can be made of these figures, with the figure; empty when one can."""
        if not 1 <= self.record_bytes <= _MOST_RECORD_BYTES:
            return f"record_bytes is {self.record_bytes}; it must be from 1 to {_MOST_RECORD_BYTES}"
        rates = (
            ("fill_bytes_per_s", self.fill_bytes_per_s),
            ("fill_alone_bytes_per_s", self.fill_alone_bytes_per_s),
            ("cpu_bytes_per_s", self.cpu_bytes_per_s),
            ("cpu_alone_bytes_per_s", self.cpu_alone_bytes_per_s),
        )
        for name, rate in rates:
            zero = name == "cpu_bytes_per_s" and rate == 0
            if not (zero or _LEAST_BYTES_PER_S <= rate <= _MOST_BYTES_PER_S):
                return (
                    f"{name} is {rate}; a rate must be a number from {_LEAST_BYTES_PER_S:g} to "
                    f"{_MOST_BYTES_PER_S:g} bytes per second"
                )
        if not self.slot_bytes_per_s >= _LEAST_BYTES_PER_S:
            return (
                f"slot_bytes_per_s is {self.slot_bytes_per_s}; a rate must be a number of at least "
                f"{_LEAST_BYTES_PER_S:g} bytes per second"
            )
        for name, fixed_s in (
            ("fill_fixed_s", self.fill_fixed_s),
            ("cpu_fixed_s", self.cpu_fixed_s),
        ):
            if not 0 <= fixed_s <= _MOST_FIXED_S:
                return (
                    f"{name} is {fixed_s}; a fixed cost must be a number from 0 to "
                    f"{_MOST_FIXED_S:g} seconds"
                )
        if not self.cpu_slowdown_ratios:
            return "cpu_slowdown_ratios is empty; it must have a ratio for each bucket of tokens"
        for ratio in self.cpu_slowdown_ratios:
            if not 0 < ratio <= _MOST_SLOWDOWN_RATIO:
                return (
                    f"cpu_slowdown_ratios has {ratio}; a ratio must be a number above 0, at most "
                    f"{_MOST_SLOWDOWN_RATIO:g}"
                )
        return ""


def closed_form_fills(
    misses_count: int, *, link_bytes_per_s: float, host_bytes_per_s: float
) -> float:
    """q* = m * B_P / B_H, not rounded; m where the memory is not faster than the link."""
    return misses_count * min(link_bytes_per_s / host_bytes_per_s, 1.0)


def ideal_rates(
    record_bytes: int, *, link_bytes_per_s: float, host_bytes_per_s: float
) -> FillRates:
    """What two isolated rates say where nothing was measured in pairs.

    The link keeps B_P whatever happens, the CPU gets B_H - B_P beside it and B_H alone. Real
    branches slow each other down more than that: use measured figures where there are any.
    """
    return FillRates(
        record_bytes=record_bytes,
        fill_bytes_per_s=link_bytes_per_s,
        fill_alone_bytes_per_s=link_bytes_per_s,
        cpu_bytes_per_s=max(host_bytes_per_s - link_bytes_per_s, 0.0),
        cpu_alone_bytes_per_s=host_bytes_per_s,
    )


def fill_branch_s(rates: FillRates, fills_count: int, *, alone: bool) -> float:
    """Seconds to fill so many experts, while the CPU rests (alone) or runs; 0 for none."""
    if fills_count == 0:
        return 0.0
    rate = rates.fill_alone_bytes_per_s if alone else rates.fill_bytes_per_s
    return rates.fill_fixed_s + fills_count * rates.record_bytes / rate


def cpu_branch_s(rates: FillRates, experts_count: int, *, bucket: int, alone: bool) -> float:
    """Seconds for the CPU to execute so many experts, while nothing is filled (alone) or something
    is; 0 for none, infinite where fills leave the CPU nothing."""
    if experts_count == 0:
        return 0.0
    rate = rates.cpu_alone_bytes_per_s if alone else rates.cpu_bytes_per_s
    if rate == 0:
        return math.inf
    slowdown_ratio = rates.cpu_slowdown_ratios[bucket]
    return rates.cpu_fixed_s + experts_count * rates.record_bytes * slowdown_ratio / rate


def split_s(rates: FillRates, *, bucket: int, misses_count: int, fills_count: int) -> float:
    """Seconds of the slower branch for one layer."""
    return max(
        branch_ends_s(rates, bucket=bucket, misses_count=misses_count, fills_count=fills_count)
    )


def branch_ends_s(
    rates: FillRates, *, bucket: int, misses_count: int, fills_count: int
) -> tuple[float, float]:
    """When the device has filled and executed its part, and the CPU executed the rest; 0 for a
    branch without work."""
    if not 0 <= fills_count <= misses_count:
        raise InternalError(f"{fills_count} fills of {misses_count} missing experts")
    return _ends_s(rates, rates.cpu_slowdown_ratios[bucket], misses_count, fills_count)


def _ends_s(
    rates: FillRates, slowdown_ratio: float, misses_count: int, fills_count: int
) -> tuple[float, float]:
    fill_bytes = fills_count * rates.record_bytes
    cpu_bytes = (misses_count - fills_count) * rates.record_bytes * slowdown_ratio
    slot_s = fill_bytes / rates.slot_bytes_per_s
    if not cpu_bytes:
        alone_s = rates.fill_fixed_s + fill_bytes / rates.fill_alone_bytes_per_s
        return (alone_s + slot_s if fill_bytes else 0.0), 0.0
    if not fill_bytes:
        return 0.0, rates.cpu_fixed_s + cpu_bytes / rates.cpu_alone_bytes_per_s
    filled_s, cpu_s = _beside_s(rates, fill_bytes, cpu_bytes)
    if filled_s <= cpu_s:
        left_bytes = cpu_bytes - max(filled_s - rates.cpu_fixed_s, 0.0) * rates.cpu_bytes_per_s
        cpu_s = max(filled_s, rates.cpu_fixed_s) + left_bytes / rates.cpu_alone_bytes_per_s
    else:
        left_bytes = fill_bytes - max(cpu_s - rates.fill_fixed_s, 0.0) * rates.fill_bytes_per_s
        filled_s = max(cpu_s, rates.fill_fixed_s) + left_bytes / rates.fill_alone_bytes_per_s
    return filled_s + slot_s, cpu_s


def _beside_s(rates: FillRates, fill_bytes: float, cpu_bytes: float) -> tuple[float, float]:
    """When each branch would have moved its bytes, did the other never end."""
    cpu_s = math.inf
    if rates.cpu_bytes_per_s:
        cpu_s = rates.cpu_fixed_s + cpu_bytes / rates.cpu_bytes_per_s
    return rates.fill_fixed_s + fill_bytes / rates.fill_bytes_per_s, cpu_s


def fill_table(
    rates: FillRates, misses_capacity: int, *, later_ratio: float = LATER_RATIO
) -> tuple[tuple[int, ...], ...]:
    """fill_count[bucket][m] for m = 0 to misses_capacity: the q among 1 to m, 0 for m = 0.

    It is the largest with at most `later_ratio` of the best one's cost: later steps will find what
    was filled resident. q = 0 is not among them: it is decided by what can be filled and evicted,
    see `q_for`. Time is about linear in the size of the table.
    Raises ConfigError where the rates have a `problem`.
    """
    if misses_capacity < 0:
        raise InternalError(f"a table for {misses_capacity} missing experts")
    problem = rates.problem()
    if problem:
        raise ConfigError(
            f"The split between fills and the CPU cannot be chosen: {problem}. "
            "Measure the rates again (they are measured when the engine starts), or set "
            'engine.backend to "offload", which fills every miss, or to "cpu".'
        )
    buckets = range(len(rates.cpu_slowdown_ratios))
    return tuple(
        fill_row(rates, bucket, misses_capacity, later_ratio=later_ratio) for bucket in buckets
    )


def fill_row(
    rates: FillRates, bucket: int, misses_capacity: int, *, later_ratio: float = LATER_RATIO
) -> tuple[int, ...]:
    """One row of `fill_table`, of rates without a `problem`."""
    slowdown_ratio = rates.cpu_slowdown_ratios[bucket]
    return _fill_row(rates, slowdown_ratio, misses_capacity, later_ratio * _SAME_RATIO)


def fill_all_table(misses_capacity: int) -> tuple[tuple[int, ...], ...]:
    """q = m: every missing expert is filled."""
    return (tuple(range(misses_capacity + 1)),)


def _fill_row(
    rates: FillRates, slowdown_ratio: float, misses_capacity: int, later_ratio: float
) -> tuple[int, ...]:
    """Both branches' ends are piecewise linear in q, and so is the later one: it is least at a
    place where the pieces meet. Those are 1, m - 1 and m; where one branch starts just when the
    other ends; where both have moved their bytes at the same time; and where both end together.
    The last two move by one or not at all with one expert more, so that one pass finds them."""
    head_start_s = rates.cpu_fixed_s - rates.fill_fixed_s
    early = _whole(head_start_s * rates.fill_bytes_per_s / rates.record_bytes, misses_capacity)
    cpu_each_bytes = rates.record_bytes * slowdown_ratio
    late = _whole(-head_start_s * rates.cpu_bytes_per_s / cpu_each_bytes, misses_capacity)

    def fills_move_first(misses: int, fills: int) -> bool:
        cpu_bytes = (misses - fills) * cpu_each_bytes
        filled_s, cpu_s = _beside_s(rates, fills * rates.record_bytes, cpu_bytes)
        return filled_s < cpu_s

    def device_ends_first(misses: int, fills: int) -> bool:
        device_s, cpu_s = _ends_s(rates, slowdown_ratio, misses, fills)
        return device_s < cpu_s

    row = [0]
    moved = ended = 1
    for misses in range(1, misses_capacity + 1):
        while moved < misses and fills_move_first(misses, moved):
            moved += 1
        while ended < misses and device_ends_first(misses, ended):
            ended += 1
        places = (
            *(1, early, early + 1, moved - 1, moved, ended - 1, ended),
            *(misses - late - 1, misses - late, misses - 1, misses),
        )
        costs = {
            fills: max(_ends_s(rates, slowdown_ratio, misses, fills))
            for fills in places
            if 1 <= fills <= misses
        }
        most_s = min(costs.values()) * later_ratio
        enough = max(fills for fills, cost_s in costs.items() if cost_s <= most_s)
        row.append(_more_fills(rates, slowdown_ratio, misses, enough, most_s))
    return tuple(row)


def _more_fills(
    rates: FillRates, slowdown_ratio: float, misses: int, enough: int, most_s: float
) -> int:
    """The most fills from `enough` up that end by then: behind the best split the end is the
    device's, which comes later with each."""
    low, high = enough, misses
    while low < high:
        middle = (low + high + 1) // 2
        if max(_ends_s(rates, slowdown_ratio, misses, middle)) <= most_s:
            low = middle
        else:
            high = middle - 1
    return low


def _whole(value: float, most: int) -> int:
    return math.floor(min(max(value, 0.0), float(most)))


def token_bucket(pairs_count: int, distinct_count: int, buckets_count: int) -> int:
    """The row of the table for so many (token, expert) pairs over so many distinct experts.

    The buckets of tokens per expert, rounded up: 1, 2, 3-4, 5-8, ...; the last has no end.
    """
    if distinct_count == 0:
        return 0
    tokens_per_expert = -(-pairs_count // distinct_count)
    return min(buckets_count - 1, max(tokens_per_expert - 1, 0).bit_length())


def q_for(
    fill_count: Sequence[Sequence[int]],
    *,
    misses_count: int,
    pairs_count: int,
    distinct_count: int,
    evictable_count: int,
    fillable: bool,
    cpu_kernel: bool,
) -> int:
    """How many misses a plan call fills: what is possible goes before what is fastest.

    A layer that cannot be filled: 0. A format without a CPU kernel: all, as far as slots can be
    evicted (the rest in further rounds). Otherwise what the table says, at least one and not more
    than can be evicted, so 0 where nothing can. `fill_count[bucket][m]` as `fill_table` makes it;
    more misses than it has columns are looked up in its last.
    """
    if not fillable:
        return 0
    if not cpu_kernel:
        return min(misses_count, evictable_count)
    if misses_count == 0:
        return 0
    row = fill_count[token_bucket(pairs_count, distinct_count, len(fill_count))]
    best = max(row[min(misses_count, len(row) - 1)], 1)
    return min(best, misses_count, evictable_count)
