"""Tracking of the split by the clock: what the benchmark charges, and its gates on short runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.hybrid import clock
from benchmarks.q_tracking import (
    LAYERS_COUNT,
    SETTLE_STEPS,
    WINDOW_STEPS,
    Charges,
    RoutedCall,
    StepCharge,
    Track,
    fills_of,
    routed_calls,
    rows,
    tracked,
)
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.split_following import Trial, begin_following

CALL = RoutedCall(hits_count=3, tokens=(1, 2, 1, 1), bucket=1)


def track(*, online_s: float, settled_s: float, contention: bool = False) -> Track:
    """A change at step 0; the static profile takes 1.1, the oracle 1."""

    def step(seconds: float) -> StepCharge:
        return StepCharge(static_s=1.1, online_s=seconds, best_s=1.0)

    return Track(
        case="c",
        contention=contention,
        steps=(step(online_s),) * SETTLE_STEPS + (step(settled_s),) * WINDOW_STEPS,
        changes=(0,),
        fallbacks_count=0,
    )


def test_the_oracle_is_the_best_of_all_q() -> None:
    charges = Charges(clock(0.5, contention=False))
    each = [charges.layer_s(CALL, q) for q in range(5)]
    assert charges.best_s(CALL) == min(each[1:])
    assert each[4] == charges.device.device_s(CALL.load(4))
    assert charges.best_s(replace(CALL, tokens=())) == charges.device.layer_s(
        replace(CALL, tokens=()).load(0)
    )


def test_a_trial_goes_its_own_way_and_the_others_by_the_table() -> None:
    following = begin_following(clock(0.5, contention=False).rates(), 8, 4, now_s=0.0)
    tried = replace(following, trial=Trial(layer=2, branch=LayerBranch.CPU))
    assert fills_of(tried, 2, CALL) == 0
    assert fills_of(tried, 1, CALL) == following.table[1][4]
    assert fills_of(replace(tried, branch=LayerBranch.FILL), 1, CALL) == 4


def test_gates() -> None:
    good = [row.verdict for row in rows(track(online_s=1.02, settled_s=1.01))]
    assert good == ["pass", "pass", "pass"]
    slow = [row.verdict for row in rows(track(online_s=1.2, settled_s=1.01))]
    assert slow == ["miss", "miss", "pass"]
    unsettled = [row.verdict for row in rows(track(online_s=1.0, settled_s=1.05))]
    assert unsettled == ["pass", "pass", "miss"]
    shared = [row.verdict for row in rows(track(online_s=1.2, settled_s=1.01, contention=True))]
    assert shared[1] == "reported"


@pytest.mark.parametrize("tokens_count", [1, 16])
def test_the_split_follows_the_neighbour(tokens_count: int) -> None:
    chance = random.Random(tokens_count)
    calls = routed_calls(tokens_count, 12, chance)
    followed = tracked("c", clock(0.5, contention=False), calls, chance)
    assert followed.online_regret < 0.03
    assert followed.online_regret < followed.static_regret
    assert followed.settled_regret < 0.03
    assert followed.fallbacks_count == 0
    assert len(followed.changes) == 3
    assert LAYERS_COUNT > 1
