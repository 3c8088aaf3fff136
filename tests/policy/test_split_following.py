"""The split that follows the machine: what the estimate learns, trials, giving up and retrying."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.cache_stats import CallTimes
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.fill_table import FillRates, branch_ends_s, fill_row, fill_table, split_s
from freetokend.policy.split_calls import split_times
from freetokend.policy.split_estimate import begin, estimated_rates, with_step
from freetokend.policy.split_following import (
    LIMITS,
    Following,
    Trial,
    after_step,
    begin_following,
)

LAYERS = 24
EXPERTS = 32
QUIET = FillRates(
    record_bytes=2_000_000,
    fill_bytes_per_s=13e9,
    fill_alone_bytes_per_s=13e9,
    cpu_bytes_per_s=36e9,
    cpu_alone_bytes_per_s=40e9,
    fill_fixed_s=8e-6,
    cpu_fixed_s=5e-6,
    cpu_slowdown_ratios=(1.0, 1.3),
)
BUSY = replace(QUIET, cpu_bytes_per_s=14e9, cpu_alone_bytes_per_s=20e9)


def call(
    truth: FillRates, misses: int, fills: int, late: float = 1.0, bucket: int = 0
) -> CallTimes:
    """As the machine would take for it."""
    fill_s, cpu_s = branch_ends_s(truth, bucket=bucket, misses_count=misses, fills_count=fills)
    return CallTimes(
        bucket=bucket,
        misses_count=misses,
        fills_count=fills,
        cpu_count=misses - fills,
        fill_s=late * fill_s,
        cpu_s=late * cpu_s,
        layer_s=late * max(fill_s, cpu_s),
    )


class Served:
    """Decode steps on a machine that may change, by the following's own split."""

    def __init__(self, profile: FillRates, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.now_s = 100.0
        self.following = begin_following(profile, EXPERTS, LAYERS, now_s=self.now_s)
        self.trials: list[Trial] = []
        self.calls_count = 0

    def fills(self, layer: int, misses: int) -> int:
        state = self.following
        way = state.branch
        if state.trial is not None and state.trial.layer == layer:
            way = state.trial.branch
        return {LayerBranch.FILL: misses, LayerBranch.CPU: 0}.get(way, state.table[0][misses])

    def run(
        self,
        truth: FillRates,
        steps_count: int,
        *,
        step_s: float = 0.05,
        took: Callable[[CallTimes], CallTimes] = lambda one: one,
        most_misses: int = 8,
    ) -> Following:
        for _ in range(steps_count):
            calls = []
            for layer in range(LAYERS):
                misses = self.chance.randrange(most_misses + 1)
                if misses:
                    late = self.chance.uniform(0.97, 1.03)
                    calls.append(took(call(truth, misses, self.fills(layer, misses), late)))
            self.now_s += step_s
            self.calls_count += len(calls)
            self.following = after_step(self.following, split_times(calls), now_s=self.now_s)
            if self.following.trial is not None:
                self.trials.append(self.following.trial)
        return self.following


def regret(table: tuple[tuple[int, ...], ...], truth: FillRates, misses: int) -> float:
    took = split_s(truth, bucket=0, misses_count=misses, fills_count=table[0][misses])
    best = min(
        split_s(truth, bucket=0, misses_count=misses, fills_count=q) for q in range(1, misses + 1)
    )
    return took / best - 1


@pytest.mark.parametrize("seed", range(3))
def test_the_table_follows_a_neighbour_and_its_end_within_fifty_steps(seed: int) -> None:
    served = Served(QUIET, seed)
    for truth in (QUIET, BUSY, QUIET):
        state = served.run(truth, 50)
        assert max(regret(state.table, truth, misses) for misses in range(2, 9)) < 0.06
        assert state.branch is LayerBranch.SPLIT
    assert state.tables_count > 2
    assert regret(fill_table(QUIET, EXPERTS), BUSY, 8) > 0.1  # what following is for


def test_the_whole_table_follows_in_the_end_and_not_only_what_steps_look_up() -> None:
    state = Served(QUIET).run(BUSY, 200)
    assert max(regret(state.table, BUSY, misses) for misses in range(9, EXPERTS + 1)) < 0.06
    rates = estimated_rates(state.estimate)
    assert rates.cpu_alone_bytes_per_s == pytest.approx(20e9, rel=0.1)
    assert rates.fill_alone_bytes_per_s == pytest.approx(13e9, rel=0.1)
    assert rates.cpu_bytes_per_s == pytest.approx(14e9, rel=0.15)


def test_trials_are_few_meet_every_layer_and_both_other_ways() -> None:
    served = Served(QUIET)
    state = served.run(QUIET, 1500)
    assert state.trials_count == len(served.trials) <= served.calls_count / LIMITS.calls_count
    assert {one.layer for one in served.trials} == set(range(LAYERS))
    assert {one.branch for one in served.trials} == {LayerBranch.FILL, LayerBranch.CPU}


def test_trials_of_a_way_that_is_much_slower_are_fewer() -> None:
    slow_link = replace(QUIET, fill_bytes_per_s=6e9, fill_alone_bytes_per_s=6e9)
    served = Served(slow_link)
    served.run(slow_link, 1500)
    by_branch = [one.branch for one in served.trials]
    # a fill of all takes about seven times as long: 6 / 0.004 calls pay for one
    assert 10 < len(by_branch) < served.calls_count / 600


def test_no_step_without_misses_changes_anything() -> None:
    state = begin_following(QUIET, EXPERTS, LAYERS, now_s=0.0)
    assert after_step(state, (), now_s=1.0) == replace(state, trial=None)


def test_a_split_that_loses_is_given_up_with_a_reason_and_tried_again_later() -> None:
    def disturbed(one: CallTimes) -> CallTimes:
        """Both at once take three times as long, whatever the rates say."""
        return replace(one, layer_s=3 * one.layer_s) if one.is_split else one

    served = Served(QUIET)
    state = served.run(QUIET, 400, took=disturbed)
    assert state.branch is LayerBranch.CPU
    assert state.fallbacks_count >= 1
    assert "leaving every miss to the CPU took" in state.reason
    assert f"tried again in {state.retry_wait_s:.0f} s" in state.reason
    assert state.retry_at_s > served.now_s or state.trial is not None
    first_wait_s = state.retry_wait_s
    state = served.run(QUIET, 2000, took=disturbed)
    assert state.fallbacks_count >= 2
    assert first_wait_s < state.retry_wait_s <= LIMITS.most_retry_s
    state = served.run(QUIET, 40, step_s=LIMITS.most_retry_s / 20)
    assert state.branch is LayerBranch.SPLIT
    assert state.reason == ""
    assert not any(count for _, count in state.losses)


def test_a_split_that_wins_is_never_given_up() -> None:
    assert Served(QUIET, 5).run(QUIET, 800).fallbacks_count == 0


def test_the_estimate_is_fresh_under_load() -> None:
    served = Served(QUIET)
    state = served.run(QUIET, 300)
    for lines in (state.estimate.fills, state.estimate.cpu):
        assert lines.taken_s is not None
        assert served.now_s - lines.taken_s < 5.0


def test_held_up_calls_do_not_move_the_table() -> None:
    served = Served(QUIET)

    def held_up(one: CallTimes) -> CallTimes:
        if served.chance.random() > 0.02:
            return one
        return replace(one, cpu_s=9 * one.cpu_s, layer_s=9 * one.layer_s)

    state = served.run(QUIET, 200, took=held_up)
    assert max(regret(state.table, QUIET, misses) for misses in range(2, 9)) < 0.06


def test_regret_is_told_while_the_machine_changes_and_fades() -> None:
    served = Served(QUIET)
    assert served.run(QUIET, 50).regret_ratio < 0.005
    peak = max(served.run(BUSY, 1).regret_ratio for _ in range(12))
    assert peak > 0.01
    assert served.run(BUSY, 60).regret_ratio < peak / 4


times = st.one_of(
    st.floats(0, 10), st.sampled_from([0.0, float("inf"), float("nan"), 1e-300, 1e300, -1.0])
)


@given(
    st.lists(
        st.builds(
            lambda m, q, a, b, c, bucket: CallTimes(
                bucket=bucket,
                misses_count=m,
                fills_count=min(q, m),
                cpu_count=max(m - q, 0),
                fill_s=a,
                cpu_s=b,
                layer_s=c,
            ),
            *(st.integers(1, EXPERTS), st.integers(0, EXPERTS), times, times, times),
            st.integers(0, 9),
        ),
        max_size=12,
    )
)
def test_whatever_is_measured_a_table_holds(calls: list[CallTimes]) -> None:
    state = begin_following(QUIET, EXPERTS, LAYERS, now_s=0.0)
    for step in range(1, 5):
        state = after_step(state, split_times(calls), now_s=3.0 * step)
    assert not estimated_rates(state.estimate).problem()
    for row in state.table:
        assert len(row) == EXPERTS + 1
        assert all(1 <= q <= m for m, q in enumerate(row) if m)


def test_a_row_alone_is_that_of_the_table() -> None:
    table = fill_table(BUSY, EXPERTS)
    assert [fill_row(BUSY, bucket, EXPERTS) for bucket in range(2)] == list(table)


def test_a_cpu_that_the_link_leaves_nothing_is_found_again() -> None:
    nothing = replace(QUIET, cpu_bytes_per_s=0.0)
    assert estimated_rates(begin(nothing)) == nothing
    state = Served(nothing).run(QUIET, 300)
    assert state.table[0][8] < 8 or state.branch is LayerBranch.CPU


def test_more_tokens_count_as_more_work_of_the_cpu() -> None:
    estimate = begin(QUIET)
    for step in range(40):
        calls = [call(BUSY, m, max(m // 2, 1), bucket=1) for m in (2, 3, 4, 6, 8)]
        estimate = with_step(estimate, split_times(calls), now_s=float(step))
    assert estimated_rates(estimate).cpu_bytes_per_s == pytest.approx(14e9, rel=0.2)
