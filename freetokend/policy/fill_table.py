"""How many of a layer's missing experts are filled into slots, the CPU executing the others (q).

Of m missing experts q are copied over the link and executed on the device while the CPU executes
the other m - q in place. A layer waits for the slower branch, so q minimises the max of the two:

    max(a_fill + q * S / B_fill,  a_cpu + (m - q) * S / B_cpu)

S: bytes of a record; a: the fixed cost of a branch, paid if it has anything to do; B: its rate
while the other branch runs as well, for both read the same memory and neither keeps the rate it
has alone. A branch that runs alone (q = m or q = 0) has the rate of one alone. The CPU's cost per
expert grows with the tokens per expert, a fill's does not: hence one row of the table per bucket
of tokens per expert.

Without fixed costs, and where the link takes B_P of the memory's B_H and leaves B_H - B_P to the
CPU, both branches end together at q = m * B_P / B_H (`closed_form_fills`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import ConfigError, InternalError

# Costs are compared as whole numbers of this unit, so that a tie is a tie.
_TICKS_PER_S: Final = 10**18
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
    cpu_alone_bytes_per_s: each while the other rests. cpu_slowdown_ratios: for each bucket of
    `token_bucket`, how many times as long as with one token the CPU needs for an expert.
    """

    record_bytes: int
    fill_bytes_per_s: float
    fill_alone_bytes_per_s: float
    cpu_bytes_per_s: float
    cpu_alone_bytes_per_s: float
    fill_fixed_s: float = 0.0
    cpu_fixed_s: float = 0.0
    cpu_slowdown_ratios: tuple[float, ...] = (1.0,)

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
    """Seconds of the slower branch for one layer; infinite where the CPU would never end."""
    if not 0 <= fills_count <= misses_count:
        raise InternalError(f"{fills_count} fills of {misses_count} missing experts")
    cpu_count = misses_count - fills_count
    return max(
        fill_branch_s(rates, fills_count, alone=cpu_count == 0),
        cpu_branch_s(rates, cpu_count, bucket=bucket, alone=fills_count == 0),
    )


def fill_table(rates: FillRates, misses_capacity: int) -> tuple[tuple[int, ...], ...]:
    """fill_count[bucket][m] for m = 0 to misses_capacity: the best q among 1 to m, 0 for m = 0.

    Of equally good ones the smallest, which evicts least. q = 0 is not among them: it is decided
    by what can be filled and evicted, see `q_for`. Time is linear in the size of the table.
    Raises ConfigError where the rates have a `problem`.
    """
    if misses_capacity < 0:
        raise InternalError(f"a table for {misses_capacity} missing experts")
    problem = rates.problem()
    if problem:
        raise ConfigError(
            f"The split between fills and the CPU cannot be chosen: {problem}. "
            "Measure the rates again, or set the split by hand."
        )
    return tuple(
        _fill_row(rates, slowdown_ratio, misses_capacity)
        for slowdown_ratio in rates.cpu_slowdown_ratios
    )


def fill_all_table(misses_capacity: int) -> tuple[tuple[int, ...], ...]:
    """q = m: every missing expert is filled."""
    return (tuple(range(misses_capacity + 1)),)


def _fill_row(rates: FillRates, slowdown_ratio: float, misses_capacity: int) -> tuple[int, ...]:
    """The fill branch rises with q and the CPU branch falls, so the max of both is least where they
    cross: at the first q whose fills take at least as long as the CPU, or just before it. One
    expert more moves that place by one or not at all, so that one pass finds all of them."""
    fill_fixed, cpu_fixed = _ticks(rates.fill_fixed_s), _ticks(rates.cpu_fixed_s)
    fill_each = max(_ticks(rates.record_bytes / rates.fill_bytes_per_s), 1)
    alone_each = max(_ticks(rates.record_bytes / rates.fill_alone_bytes_per_s), 1)
    if rates.cpu_bytes_per_s == 0:
        return tuple(range(misses_capacity + 1))
    cpu_each = max(_ticks(rates.record_bytes * slowdown_ratio / rates.cpu_bytes_per_s), 1)

    def both(misses: int, fills: int) -> int:
        return max(fill_fixed + fills * fill_each, cpu_fixed + (misses - fills) * cpu_each)

    row = [0]
    crossing = 1
    for misses in range(1, misses_capacity + 1):
        fill_ticks = fill_fixed + crossing * fill_each
        if fill_ticks < cpu_fixed + (misses - crossing) * cpu_each:
            crossing += 1
        best, best_ticks = misses, fill_fixed + misses * alone_each
        # Downwards, so that of equals the smaller stays.
        for fills in (min(crossing, misses - 1), min(crossing, misses - 1) - 1):
            if fills >= 1 and both(misses, fills) <= best_ticks:
                best, best_ticks = fills, both(misses, fills)
        row.append(best)
    return tuple(row)


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


def _ticks(duration_s: float) -> int:
    return round(duration_s * _TICKS_PER_S)
