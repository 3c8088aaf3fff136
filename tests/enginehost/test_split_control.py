"""The split follows the steps of the host device's real cache, and its results stay the pool's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from freetokend.core.cache_stats import CallTimes
from freetokend.core.logs import logger
from freetokend.enginehost.split_control import (
    PASSIVE,
    PROFILE,
    FollowedSplit,
    SplitFollower,
)
from freetokend.native.executor import Executor
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.fill_table import FillRates, fill_table
from tests.experts.cache_rig import RecordBank, Rig, record_bank, routed

LAYERS, EXPERTS = 3, 12
SLOTS = 8
SLOW_LINK_BYTES_PER_S = 4e6
# Of a link that is as fast as the CPU: half of the misses are filled.
EQUAL = FillRates(
    record_bytes=24_576,
    fill_bytes_per_s=4e9,
    fill_alone_bytes_per_s=4e9,
    cpu_bytes_per_s=4e9,
    cpu_alone_bytes_per_s=4e9,
)


@pytest.fixture(scope="module")
def bank() -> RecordBank:
    return record_bank(layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:2]) as executor:
        yield executor


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Steps:
    """Decode steps as the engine's loop makes them."""

    def __init__(self, rig: Rig, branches: Sequence[LayerBranch]) -> None:
        self.rig = rig
        self.clock = Clock()
        rig.cache.set_branches(branches)
        rig.cache.set_fill_counts(fill_table(EQUAL, EXPERTS))
        self.follower = SplitFollower(
            FollowedSplit(cache=rig.cache, branches=tuple(branches), rates=EQUAL),
            log=logger(__name__),
            clock=self.clock,
        )
        self.steps_count = 0

    def run(self, count: int) -> None:
        for _ in range(count):
            self.steps_count += 1
            self.follower.step_begins()
            for layer in range(LAYERS):
                seed = LAYERS * self.steps_count + layer
                self.rig.decode(layer, routed(2, 4, seed, among=range(EXPERTS)))
            self.clock.now_s += 0.02
            self.follower.step_ended()


@pytest.fixture
def rig(bank: RecordBank, executor: Executor) -> Iterator[Rig]:
    rig = Rig(bank, executor, slots_count=SLOTS, rate_bytes_per_s=SLOW_LINK_BYTES_PER_S)
    yield rig
    rig.cache.close()


def test_a_link_that_is_slower_than_its_profile_gets_less_to_do(rig: Rig) -> None:
    steps = Steps(rig, [LayerBranch.SPLIT] * LAYERS)
    before = rig.counters().fill_counts
    assert before[0][8] >= 4
    steps.run(30)
    assert rig.counters().fill_counts[0][8] == 1
    state = steps.follower.following
    assert rig.counters().fill_counts[0] == state.table[0]
    told = steps.follower.counters()
    fills = next(one for one in told.bandwidths if one.link == "fill" and one.beside)
    assert fills.source == PASSIVE
    assert fills.age_s == 0.0
    # the link stands still for what it has to copy, whatever the machine is like
    assert fills.bytes_per_s < 1.2 * SLOW_LINK_BYTES_PER_S
    assert told.tables_count >= 1


def test_before_any_step_the_profile_is_told_with_its_age(rig: Rig) -> None:
    steps = Steps(rig, [LayerBranch.SPLIT] * LAYERS)
    steps.clock.now_s += 7.0
    told = steps.follower.counters()
    assert {one.source for one in told.bandwidths} == {PROFILE}
    assert {one.age_s for one in told.bandwidths} == {7.0}
    assert told.branch == "split"


def test_trials_come_and_go_and_results_stay_the_pools(rig: Rig) -> None:
    rig.cache.set_rate_bytes_per_s(None)
    branches = [LayerBranch.SPLIT, LayerBranch.FILL, LayerBranch.CPU]
    steps = Steps(rig, branches)
    seen: set[tuple[LayerBranch, ...]] = set()
    told = rig.cache.set_branches

    def noted(branches: Sequence[LayerBranch]) -> None:
        seen.add(tuple(branches))
        told(branches)

    rig.cache.set_branches = noted  # type: ignore[method-assign]
    steps.run(200)
    assert steps.follower.counters().trials_count >= 2
    # the layers that are not split are never tried, and the other one goes back each time
    assert {one[1:] for one in seen} == {(LayerBranch.FILL, LayerBranch.CPU)}
    assert {LayerBranch.FILL, LayerBranch.CPU} <= {one[0] for one in seen}


def test_where_nothing_is_split_rates_are_told_and_nothing_changes(rig: Rig) -> None:
    steps = Steps(rig, [LayerBranch.FILL] * LAYERS)
    steps.run(60)
    told = steps.follower.counters()
    assert told.branch == ""
    assert told.trials_count == told.tables_count == 0
    alone = next(one for one in told.bandwidths if one.link == "fill" and not one.beside)
    assert alone.source == PASSIVE


class BrokenCache:
    """Tells nonsense from the second step on."""

    experts_per_layer_count = EXPERTS

    def __init__(self) -> None:
        self.branches: list[Sequence[LayerBranch]] = []
        self.steps_count = 0

    def take_call_times(self) -> Sequence[CallTimes]:
        self.steps_count += 1
        if self.steps_count > 1:
            raise ZeroDivisionError
        return ()

    def set_fill_counts(self, table: Sequence[Sequence[int]]) -> None:
        raise AssertionError(table)

    def set_branches(self, branches: Sequence[LayerBranch]) -> None:
        self.branches.append(branches)


def test_what_cannot_be_followed_is_told_and_steps_go_on() -> None:
    cache, branches = BrokenCache(), (LayerBranch.SPLIT, LayerBranch.CPU)
    follower = SplitFollower(
        FollowedSplit(cache=cache, branches=branches, rates=EQUAL),
        log=logger(__name__),
    )
    for _ in range(4):
        follower.step_begins()
        follower.step_ended()
    assert cache.branches == [branches]
    assert cache.steps_count == 2
    assert "see the journal" in follower.counters().reason
