"""The q table: against brute force, the closed form, and what has one right answer."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import ConfigError, InternalError
from freetokend.experts.plan.contract import Stat
from freetokend.experts.plan.oracle import OraclePlanner, OracleState
from freetokend.policy.eviction import Lru
from freetokend.policy.fill_table import (
    LATER_RATIO,
    FillRates,
    closed_form_fills,
    fill_all_table,
    fill_table,
    ideal_rates,
    q_for,
    split_s,
    token_bucket,
)

MICROSECOND = 1e-6
NEAR, LATER = Fraction(10**9 + 1, 10**9), Fraction(LATER_RATIO)
RATES = st.floats(1e6, 1e13)
FIXED = st.one_of(st.just(0.0), st.floats(0, 1e-2))


def exact_s(rates: FillRates, bucket: int, m: int, q: int) -> Fraction:
    """The cost in exact arithmetic, written down once more: bytes that flow at the rates of the
    moment, event by event."""
    size = Fraction(rates.record_bytes)
    left = [q * size, (m - q) * size * Fraction(rates.cpu_slowdown_ratios[bucket])]
    starts = [Fraction(rates.fill_fixed_s), Fraction(rates.cpu_fixed_s)]
    beside = [Fraction(rates.fill_bytes_per_s), Fraction(rates.cpu_bytes_per_s)]
    alone = [Fraction(rates.fill_alone_bytes_per_s), Fraction(rates.cpu_alone_bytes_per_s)]
    now, ends = list(starts), [Fraction(0), Fraction(0)]
    if all(left):
        until = min(
            start + bytes_count / rate
            for start, bytes_count, rate in zip(starts, left, beside, strict=True)
            if rate
        )
        for one in (0, 1):
            left[one] -= max(until - starts[one], Fraction(0)) * beside[one]
            now[one] = max(until, starts[one])
            ends[one] = now[one]
    for one in (0, 1):
        if left[one]:
            ends[one] = now[one] + left[one] / alone[one]
    slot_s = Fraction(0)
    if not math.isinf(rates.slot_bytes_per_s):
        slot_s = q * size / Fraction(rates.slot_bytes_per_s)
    return max(ends[0] + slot_s if q else Fraction(0), ends[1])


@st.composite
def any_rates(draw: st.DrawFn) -> FillRates:
    return FillRates(
        record_bytes=draw(st.integers(4096, 64 << 20)),
        fill_bytes_per_s=draw(RATES),
        fill_alone_bytes_per_s=draw(RATES),
        cpu_bytes_per_s=draw(RATES),
        cpu_alone_bytes_per_s=draw(RATES),
        fill_fixed_s=draw(FIXED),
        cpu_fixed_s=draw(FIXED),
        cpu_slowdown_ratios=tuple(draw(st.lists(st.floats(0.5, 64), min_size=1, max_size=3))),
        slot_bytes_per_s=draw(st.one_of(st.just(math.inf), RATES)),
    )


@given(any_rates(), st.integers(0, 40))
@settings(deadline=None)
def test_no_q_is_better_than_the_table(rates: FillRates, misses_capacity: int) -> None:
    table = fill_table(rates, misses_capacity, later_ratio=1)
    later = fill_table(rates, misses_capacity)
    assert len(table) == len(rates.cpu_slowdown_ratios)
    for bucket, row in enumerate(table):
        assert len(row) == misses_capacity + 1
        assert row[0] == 0
        for m in range(1, misses_capacity + 1):
            assert 1 <= row[m] <= m
            best = min(exact_s(rates, bucket, m, q) for q in range(1, m + 1))
            assert exact_s(rates, bucket, m, row[m]) <= best * NEAR
            assert exact_s(rates, bucket, m, later[bucket][m]) <= best * NEAR * LATER
            assert later[bucket][m] >= row[m]


@given(
    fill_us=st.integers(1, 12),
    alone_us=st.integers(1, 12),
    cpu_us=st.integers(1, 12),
    fill_fixed_us=st.integers(0, 30),
    cpu_fixed_us=st.integers(0, 30),
)
@settings(deadline=None)
def test_of_equally_good_splits_the_one_with_most_fills(
    fill_us: int, alone_us: int, cpu_us: int, fill_fixed_us: int, cpu_fixed_us: int
) -> None:
    """Costs of whole microseconds, where ties are frequent."""
    size = 1 << 20
    rates = FillRates(
        record_bytes=size,
        fill_bytes_per_s=size / (fill_us * MICROSECOND),
        fill_alone_bytes_per_s=size / (alone_us * MICROSECOND),
        cpu_bytes_per_s=size / (cpu_us * MICROSECOND),
        cpu_alone_bytes_per_s=size / (cpu_us * MICROSECOND),
        fill_fixed_s=fill_fixed_us * MICROSECOND,
        cpu_fixed_s=cpu_fixed_us * MICROSECOND,
    )
    # A link that is faster beside the CPU than alone does not exist; there more fills can be
    # cheaper than fewer again, behind the best split.
    ratios = (Fraction(1), LATER, Fraction(5, 4)) if alone_us <= fill_us else (Fraction(1),)
    for ratio in ratios:
        (row,) = fill_table(rates, 16, later_ratio=float(ratio))
        for m in range(1, 17):
            costs = {q: exact_s(rates, 0, m, q) for q in range(1, m + 1)}
            most = min(costs.values()) * ratio * NEAR
            assert row[m] == max(q for q, cost in costs.items() if cost <= most), m


@pytest.mark.parametrize(
    ("link", "host", "misses", "expected"),
    [
        (11.8, 47.5, 4, 1),
        (1, 3.5, 7, 2),
        (1, 3.5, 70, 20),
        (1, 1.1, 11, 10),
        (1, 1.1, 110, 100),
        (1, 1.1, 1, 1),
        (1, 4, 1, 1),
        (1, 4, 2, 1),
        (52.7, 53.8, 8, 7),
        (2, 2, 5, 5),
        (3, 2, 5, 5),
    ],
)
def test_the_closed_form(link: float, host: float, misses: int, expected: int) -> None:
    rates = ideal_rates(1 << 20, link_bytes_per_s=link * 1e9, host_bytes_per_s=host * 1e9)
    assert fill_table(rates, misses, later_ratio=1)[0][misses] == expected


def test_the_closed_form_as_a_ratio() -> None:
    def ratio(link: float, host: float) -> float:
        return closed_form_fills(1, link_bytes_per_s=link, host_bytes_per_s=host)

    assert ratio(11.8, 47.5) == pytest.approx(0.25, abs=0.005)
    assert ratio(1, 3.5) == pytest.approx(0.29, abs=0.005)
    assert ratio(1, 1.1) == pytest.approx(0.91, abs=0.001)
    assert ratio(3, 2) == ratio(2, 2) == 1


@given(st.floats(1e9, 1e11), st.floats(1.01, 30), st.integers(1, 64))
def test_the_table_is_the_closed_form_rounded_one_way_or_the_other(
    link: float, more: float, misses: int
) -> None:
    host = link * more
    rates = ideal_rates(1 << 22, link_bytes_per_s=link, host_bytes_per_s=host)
    q = fill_table(rates, misses, later_ratio=1)[0][misses]
    closed = closed_form_fills(misses, link_bytes_per_s=link, host_bytes_per_s=host)
    assert q in (max(math.floor(closed + 1e-9), 1), max(math.ceil(closed - 1e-9), 1))


RATES_4 = ideal_rates(1 << 20, link_bytes_per_s=1e9, host_bytes_per_s=4e9)


def test_a_cpu_that_slows_down_with_tokens_gets_fewer_experts() -> None:
    table = fill_table(replace(RATES_4, cpu_slowdown_ratios=(1.0, 1.5, 3.0, 1000.0)), 16)
    assert [row[16] for row in table] == [4, 5, 8, 16]


def test_fixed_costs_decide_small_numbers() -> None:
    """Starting the CPU takes as long as three fills: it is not started for three misses."""
    rates = replace(RATES_4, cpu_fixed_s=3e-3)
    assert fill_table(rates, 6)[0] == (0, 1, 2, 3, 3, 3, 3)


def test_filling_alone_has_its_own_rate() -> None:
    contended = replace(RATES_4, fill_bytes_per_s=0.2e9, cpu_bytes_per_s=0.5e9)
    assert fill_table(contended, 4)[0] == (0, 1, 2, 3, 4)


def test_one_miss_more_is_one_fill_more_or_none() -> None:
    """As wide as the widest layer: 512 experts, with 10 buckets."""
    rates = replace(RATES_4, cpu_slowdown_ratios=tuple(1.5**b for b in range(10)))
    table = fill_table(rates, 512, later_ratio=1)
    for row in table:
        steps = [after - before for before, after in pairwise(row)]
        assert set(steps) <= {0, 1}


def test_seconds_of_a_split() -> None:
    size = 1 << 20
    rates = replace(RATES_4, fill_fixed_s=1e-4, cpu_fixed_s=2e-4)
    assert split_s(rates, bucket=0, misses_count=0, fills_count=0) == 0
    assert split_s(rates, bucket=0, misses_count=4, fills_count=0) == pytest.approx(
        2e-4 + size / 1e9
    )
    assert split_s(rates, bucket=0, misses_count=4, fills_count=4) == pytest.approx(
        1e-4 + 4 * size / 1e9
    )
    # Both run for 0.95 ms, in which the CPU moves 2.71 of its 3 records; the rest it reads alone.
    filled_s = 1e-4 + size / 1e9
    left_bytes = 3 * size - (filled_s - 2e-4) * 3e9
    assert split_s(rates, bucket=0, misses_count=4, fills_count=1) == pytest.approx(
        filled_s + left_bytes / 4e9
    )
    slow_slots = replace(rates, slot_bytes_per_s=2e9)
    assert split_s(slow_slots, bucket=0, misses_count=4, fills_count=4) == pytest.approx(
        1e-4 + 6 * size / 1e9
    )
    with pytest.raises(InternalError):
        split_s(rates, bucket=0, misses_count=1, fills_count=2)


def test_a_link_that_takes_all_memory_bandwidth_is_never_accompanied() -> None:
    rates = ideal_rates(1 << 20, link_bytes_per_s=5e9, host_bytes_per_s=4e9)
    assert rates.cpu_bytes_per_s == 0
    assert fill_table(rates, 3) == fill_all_table(3) == ((0, 1, 2, 3),)
    # What it leaves to the CPU is executed afterwards.
    assert split_s(rates, bucket=0, misses_count=2, fills_count=1) == pytest.approx(
        (1 << 20) / 5e9 + (1 << 20) / 4e9
    )


def test_no_misses() -> None:
    assert fill_table(RATES_4, 0) == fill_all_table(0) == ((0,),)
    with pytest.raises(InternalError):
        fill_table(RATES_4, -1)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("record_bytes", (0, -1, 1 << 41)),
        ("slot_bytes_per_s", (0.0, -1.0, math.nan)),
        ("fill_bytes_per_s", (0.0, -1.0, math.nan, math.inf, 1e-300)),
        ("fill_alone_bytes_per_s", (0.0, -1.0, math.nan, math.inf)),
        ("cpu_bytes_per_s", (-1.0, math.nan, math.inf, 1e-300)),
        ("cpu_alone_bytes_per_s", (0.0, -1.0, math.nan, math.inf)),
        ("fill_fixed_s", (-1e-9, math.nan, math.inf)),
        ("cpu_fixed_s", (-1e-9, math.nan, math.inf)),
        ("cpu_slowdown_ratios", ((), (0.0,), (1.0, math.nan), (math.inf,), (-1.0,))),
    ],
)
def test_what_is_no_measurement_is_refused_by_name(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        rates = replace(RATES_4, **{field: value})  # type: ignore[arg-type]
        assert field in rates.problem()
        with pytest.raises(ConfigError, match=field) as caught:
            fill_table(rates, 4)
        assert "Measure the rates again" in caught.value.message
    assert RATES_4.problem() == ""


@pytest.mark.parametrize(
    ("pairs", "distinct", "buckets", "expected"),
    [
        (0, 0, 4, 0),
        (8, 8, 4, 0),
        (9, 8, 4, 1),
        (16, 8, 4, 1),
        (17, 8, 4, 2),
        (32, 8, 4, 2),
        (33, 8, 4, 3),
        (64, 8, 4, 3),
        (8000, 8, 4, 3),
        (8000, 8, 1, 0),
        (1, 1, 1, 0),
    ],
)
def test_buckets(pairs: int, distinct: int, buckets: int, expected: int) -> None:
    assert token_bucket(pairs, distinct, buckets) == expected


TABLE = ((0, 1, 1, 2, 2), (0, 1, 2, 3, 4))


@pytest.mark.parametrize(
    ("misses", "evictable", "fillable", "cpu_kernel", "expected"),
    [
        (4, 9, True, True, 2),
        (4, 1, True, True, 1),
        (4, 0, True, True, 0),
        (0, 9, True, True, 0),
        (1, 9, True, True, 1),
        (99, 99, True, True, 2),
        (4, 9, False, True, 0),
        (4, 9, False, False, 0),
        (4, 9, True, False, 4),
        (4, 3, True, False, 3),
        (4, 0, True, False, 0),
        (0, 9, True, False, 0),
    ],
)
def test_precedence(
    misses: int, evictable: int, fillable: bool, cpu_kernel: bool, expected: int
) -> None:
    q = q_for(
        TABLE,
        misses_count=misses,
        pairs_count=8,
        distinct_count=8,
        evictable_count=evictable,
        fillable=fillable,
        cpu_kernel=cpu_kernel,
    )
    assert q == expected


def test_a_table_that_says_none_still_fills_one() -> None:
    q = q_for(
        ((0, 0, 0),),
        misses_count=2,
        pairs_count=2,
        distinct_count=2,
        evictable_count=5,
        fillable=True,
        cpu_kernel=True,
    )
    assert q == 1


@given(
    routed=st.lists(st.lists(st.integers(-1, 11), min_size=3, max_size=3), min_size=1, max_size=6),
    slots=st.integers(0, 14),
    calls=st.integers(1, 3),
    table=st.lists(st.lists(st.integers(0, 12), min_size=5, max_size=5), min_size=1, max_size=3),
    fillable=st.booleans(),
    cpu_kernel=st.booleans(),
)
@settings(deadline=None)
def test_the_plan_fills_as_many(
    routed: list[list[int]],
    slots: int,
    calls: int,
    table: list[list[int]],
    fillable: bool,
    cpu_kernel: bool,
) -> None:
    """`q_for` states what the plan call does, whatever is resident."""
    state = OracleState.empty(experts_count=12, slots_capacity=14)
    state.slots_count = slots
    planner = OraclePlanner(
        layers_count=1, experts_per_layer_count=12, cpu_kernel=cpu_kernel, order=Lru(), state=state
    )
    for first in range(calls):
        rows = routed[first:] + routed[:first]
        needed = {e for row in rows[: first + 1] for e in row if e >= 0}
        hits = {e for e in needed if state.slot_of_expert[e] >= 0}
        result = planner.plan(
            0, rows, valid_tokens=min(first + 1, len(rows)), fillable=fillable, fill_count=table
        )
        assert result.stats[Stat.FILLS] == q_for(
            table,
            misses_count=len(needed - hits),
            pairs_count=result.stats[Stat.PAIRS],
            distinct_count=len(needed),
            evictable_count=slots - len(hits),
            fillable=fillable,
            cpu_kernel=cpu_kernel,
        )
