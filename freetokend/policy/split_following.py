"""The split of missing experts as it follows the machine: tables, trials, and giving up.

After each step: the estimate takes what the step's calls took; where it moved, the rows of the
table that steps look up are made anew, for about as many misses as there are; the whole table
follows now and then. A small share of a layer's calls goes another way than the table says, all
filled or all on the CPU: that keeps the rates alone fresh, and tells whether the split is worth it.
When it loses several trials in a row the better way is taken, with a reason, and the split is tried
again later, after a time that doubles each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.fill_table import FillRates, fill_row, fill_table, split_s
from freetokend.policy.rate_estimate import BranchEstimate, StepSums, with_sums
from freetokend.policy.split_estimate import (
    ALONE_LIMITS,
    SplitEstimate,
    SplitTimes,
    begin,
    estimated_rates,
    with_step,
)

FillTable = tuple[tuple[int, ...], ...]

# A table of rates this near to the present ones is not made anew.
_SAME_RATES_RATIO: Final = 0.02
# What is made anew at once has so many times the columns of the misses that a step has on average.
_MISSES_SPREAD: Final = 2
_LEAST_COLUMNS: Final = 16
_REGRET_KEEP_RATIO: Final = 0.9
_WAYS: Final = (LayerBranch.FILL, LayerBranch.CPU, LayerBranch.SPLIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLimits:
    """calls_count: one call in so many is a trial, and fewer of a way so much slower than the
    present one that trying it would take more than trial_ratio of the time. The split loses a trial
    at lose_ratio times the other way's time, and is given up after lose_count in a row, for retry_s
    at first and most_retry_s at last. The whole table is made anew at most every table_s."""

    calls_count: int = 128
    trial_ratio: float = 0.004
    lose_ratio: float = 1.05
    lose_count: int = 3
    retry_s: float = 30.0
    most_retry_s: float = 960.0
    table_s: float = 2.0


LIMITS: Final = FollowLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """In the next step the misses of one of the layers that are split go this way."""

    layer: int
    branch: LayerBranch


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """Begin with `begin_following`.

    branch: where misses go now, but for the trial's layer: SPLIT as long as it is worth it.
    table: made of `table_rates`; all of it of `whole_rates`. layer_costs: seconds of a layer by its
    misses, by way. regret_ratio: what steps lately took longer than with the table that followed
    from them, by the estimate. losses: how often in a row the split lost, by way.
    """

    estimate: SplitEstimate
    layers_count: int
    table: FillTable
    table_rates: FillRates
    whole_rates: FillRates
    whole_at_s: float
    branch: LayerBranch = LayerBranch.SPLIT
    reason: str = ""
    trial: Trial | None = None
    trials_count: int = 0
    calls_since_trial_count: int = 0
    calls_to_trial_count: int = 0
    layer_costs: tuple[tuple[LayerBranch, BranchEstimate], ...] = ()
    losses: tuple[tuple[LayerBranch, int], ...] = ()
    retry_at_s: float = math.inf
    retry_wait_s: float = 0.0
    fallbacks_count: int = 0
    tables_count: int = 0
    regret_ratio: float = 0.0


def begin_following(
    profile: FillRates, misses_capacity: int, layers_count: int, *, now_s: float
) -> Following:
    """layers_count: of layers that are split; a trial names one of them. ConfigError as of
    `fill_table`."""
    return Following(
        estimate=begin(profile),
        layers_count=layers_count,
        table=fill_table(profile, misses_capacity),
        table_rates=profile,
        whole_rates=profile,
        whole_at_s=now_s,
    )


def after_step(
    state: Following,
    calls: Sequence[SplitTimes],
    *,
    now_s: float,
    limits: FollowLimits = LIMITS,
) -> Following:
    """What holds from the next step on."""
    state = replace(state, estimate=with_step(state.estimate, calls, now_s=now_s))
    state = _judged(_with_costs(state, calls, now_s), calls, now_s, limits)
    state = _followed(state, calls, now_s, limits)
    return _with_trial(state, calls, limits)


def _way(calls: SplitTimes) -> LayerBranch:
    if calls.is_split:
        return LayerBranch.SPLIT
    return LayerBranch.FILL if calls.fills.own.count else LayerBranch.CPU


def _with_costs(state: Following, calls: Sequence[SplitTimes], now_s: float) -> Following:
    """Of the way that all layers go, and of the one that was tried."""
    tried = None if state.trial is None else state.trial.branch
    costs = dict(state.layer_costs)
    for way in _WAYS:
        if way not in (state.branch, tried):
            continue
        sums = sum((one.misses for one in calls if _way(one) is way), StepSums())
        before = costs.get(way)
        if before is None and sums.sum_t > 0:
            before = BranchEstimate(bytes_per_s=sums.sum_x / sums.sum_t)
        if before is not None:
            costs[way] = with_sums(before, sums, now_s=now_s, limits=ALONE_LIMITS)
    return replace(state, layer_costs=tuple(costs.items()))


def _judged(
    state: Following, calls: Sequence[SplitTimes], now_s: float, limits: FollowLimits
) -> Following:
    """Whether the split has lost too often, or is to be tried again."""
    if state.branch is not LayerBranch.SPLIT:
        if now_s < state.retry_at_s:
            return state
        costs = dict(state.layer_costs)
        costs.pop(LayerBranch.SPLIT, None)  # it is another split by now
        return replace(
            state,
            branch=LayerBranch.SPLIT,
            reason="",
            losses=(),
            layer_costs=tuple(costs.items()),
        )
    tried = None if state.trial is None else state.trial.branch
    costs = dict(state.layer_costs)
    split = costs.get(LayerBranch.SPLIT)
    other = None if tried is None else costs.get(tried)
    sums = sum((one.misses for one in calls if one.is_split), StepSums())
    if tried is None or split is None or other is None or other.weight < 1.5 or not sums.count:
        return state
    misses = sums.sum_x / sums.count
    split_took_s, other_took_s = split.expected_s(misses), other.expected_s(misses)
    losses = dict(state.losses)
    lost = split_took_s > limits.lose_ratio * other_took_s
    losses[tried] = losses.get(tried, 0) + 1 if lost else 0
    if losses[tried] < limits.lose_count:
        return replace(state, losses=tuple(losses.items()))
    return _fallen_back(state, tried, (split_took_s, other_took_s), now_s, limits)


def _fallen_back(
    state: Following,
    branch: LayerBranch,
    took_s: tuple[float, float],
    now_s: float,
    limits: FollowLimits,
) -> Following:
    # What held for as long as it was given up before was worth it.
    held = now_s > state.retry_at_s + state.retry_wait_s
    wait_s = limits.retry_s
    if state.fallbacks_count and not held:
        wait_s = min(2.0 * state.retry_wait_s, limits.most_retry_s)
    way = "filling every miss" if branch is LayerBranch.FILL else "leaving every miss to the CPU"
    return replace(
        state,
        branch=branch,
        reason=(
            f"{way} took {1e6 * took_s[1]:.0f} us a layer where the split took "
            f"{1e6 * took_s[0]:.0f} us; the split is tried again in {wait_s:.0f} s"
        ),
        losses=(),
        retry_at_s=now_s + wait_s,
        retry_wait_s=wait_s,
        fallbacks_count=state.fallbacks_count + 1,
    )


def _followed(
    state: Following, calls: Sequence[SplitTimes], now_s: float, limits: FollowLimits
) -> Following:
    rates = estimated_rates(state.estimate)
    if not state.layers_count or rates.problem():
        return state  # nobody goes by a table, or none can be made and the present one holds
    misses_capacity = len(state.table[0]) - 1
    changed = not _same(rates, state.table_rates)
    table = state.table
    if not _same(rates, state.whole_rates) and now_s >= state.whole_at_s + limits.table_s:
        table = fill_table(rates, misses_capacity)
        state = replace(state, whole_rates=rates, whole_at_s=now_s)
    elif changed:
        table = _with_seen_rows(table, rates, calls)
    regret = _regret(rates, state.table, table, calls) if changed else 0.0
    state = replace(
        state,
        regret_ratio=_REGRET_KEEP_RATIO * state.regret_ratio + (1 - _REGRET_KEEP_RATIO) * regret,
    )
    if not changed and table is state.table:
        return state
    return replace(
        state,
        table=table,
        table_rates=rates,
        tables_count=state.tables_count + (table != state.table),
    )


def _same(rates: FillRates, others: FillRates) -> bool:
    pairs = (
        (rates.fill_bytes_per_s, others.fill_bytes_per_s),
        (rates.fill_alone_bytes_per_s, others.fill_alone_bytes_per_s),
        (rates.cpu_bytes_per_s, others.cpu_bytes_per_s),
        (rates.cpu_alone_bytes_per_s, others.cpu_alone_bytes_per_s),
    )
    each_s = rates.record_bytes / rates.fill_alone_bytes_per_s
    fixed = (rates.fill_fixed_s - others.fill_fixed_s, rates.cpu_fixed_s - others.cpu_fixed_s)
    return all(
        abs(one - other) <= _SAME_RATES_RATIO * max(one, other) for one, other in pairs
    ) and all(abs(change_s) <= 0.1 * each_s for change_s in fixed)


def _bucket(table: FillTable, calls: SplitTimes) -> int:
    return min(calls.bucket, len(table) - 1)


def _with_seen_rows(table: FillTable, rates: FillRates, calls: Sequence[SplitTimes]) -> FillTable:
    """The rows that this step looked up, as far as its like will."""
    rows = list(table)
    columns: dict[int, int] = {}
    for one in calls:
        if one.misses.count:
            mean = math.ceil(one.misses.sum_x / one.misses.count)
            bucket = _bucket(table, one)
            columns[bucket] = max(columns.get(bucket, _LEAST_COLUMNS), _MISSES_SPREAD * mean)
    for bucket, wanted in columns.items():
        row = fill_row(rates, bucket, min(wanted, len(rows[bucket]) - 1))
        rows[bucket] = (*row, *rows[bucket][len(row) :])
    return tuple(rows)


def _regret(
    rates: FillRates, before: FillTable, after: FillTable, calls: Sequence[SplitTimes]
) -> float:
    """How much longer than with the new table the old one's splits take, by these rates."""
    old_s = new_s = 0.0
    for one in calls:
        if not one.is_split:
            continue
        bucket = _bucket(before, one)
        misses = min(round(one.misses.sum_x / one.misses.count), len(before[bucket]) - 1)
        took_s = [
            split_s(rates, bucket=bucket, misses_count=misses, fills_count=table[bucket][misses])
            for table in (before, after)
        ]
        old_s += one.misses.count * took_s[0]
        new_s += one.misses.count * took_s[1]
    return max(old_s / new_s - 1.0, 0.0) if new_s else 0.0


def _with_trial(state: Following, calls: Sequence[SplitTimes], limits: FollowLimits) -> Following:
    count = state.calls_since_trial_count + sum(one.misses.count for one in calls)
    if not state.layers_count or count < max(state.calls_to_trial_count, limits.calls_count):
        return replace(state, calls_since_trial_count=count, trial=None)
    others = [way for way in _WAYS if way is not state.branch]
    number = state.trials_count
    way = others[number % len(others)]
    return replace(
        state,
        calls_since_trial_count=0,
        calls_to_trial_count=_calls_to_pay(state, way, limits),
        trials_count=number + 1,
        # Every way meets every layer.
        trial=Trial(layer=(number // len(others)) % state.layers_count, branch=way),
    )


def _calls_to_pay(state: Following, way: LayerBranch, limits: FollowLimits) -> int:
    """Over so many calls what a trial of this way takes longer is trial_ratio of the time."""
    costs = dict(state.layer_costs)
    present, tried = costs.get(state.branch), costs.get(way)
    if present is None or tried is None or not present.weight:
        return 0
    misses = present.sum_x / present.weight
    longer_ratio = tried.expected_s(misses) / present.expected_s(misses) - 1.0
    return math.ceil(min(longer_ratio / limits.trial_ratio, 1e6))
