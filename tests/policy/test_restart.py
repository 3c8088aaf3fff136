"""The restart budget: a table for the edges, a property for all histories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetokend.policy.restart import (
    GiveUp,
    RestartAfter,
    RestartBudget,
    RestartHistory,
    after_death,
)

BUDGET = RestartBudget(
    restarts_count=3, window_s=100.0, first_delay_s=1.0, delay_factor=4.0, max_delay_s=10.0
)


def decisions(deaths_s: list[float], budget: RestartBudget = BUDGET) -> list[RestartAfter | GiveUp]:
    history = RestartHistory()
    made = []
    for now_s in deaths_s:
        history, decision = after_death(budget, history, now_s=now_s, restart_can_help=True)
        made.append(decision)
    return made


def test_delays_grow_to_the_cap_then_the_budget_is_spent() -> None:
    first, second, third, fourth = decisions([0.0, 2.0, 7.0, 18.0])
    assert (first, second, third) == (
        RestartAfter(delay_s=1.0),
        RestartAfter(delay_s=4.0),
        RestartAfter(delay_s=10.0),
    )
    assert isinstance(fourth, GiveUp)
    assert "4 times within 100 s" in fourth.text
    assert "budget of 3" in fourth.text


def test_deaths_outside_the_window_are_forgotten() -> None:
    assert decisions([0.0, 100.0, 200.0, 300.0, 400.0]) == [RestartAfter(delay_s=1.0)] * 5


def test_no_restart_when_it_cannot_help() -> None:
    _, decision = after_death(BUDGET, RestartHistory(), now_s=0.0, restart_can_help=False)
    assert isinstance(decision, GiveUp)
    assert "cannot help" in decision.text


def test_budget_of_zero_never_restarts() -> None:
    (decision,) = decisions([0.0], RestartBudget(restarts_count=0))
    assert isinstance(decision, GiveUp)


@given(
    st.lists(st.floats(0.0, 200.0), max_size=30),
    st.integers(0, 6),
    st.floats(1.0, 500.0),
)
def test_never_more_restarts_in_a_window_than_granted(
    gaps_s: list[float], restarts_count: int, window_s: float
) -> None:
    budget = RestartBudget(restarts_count=restarts_count, window_s=window_s)
    history = RestartHistory()
    now_s = 0.0
    granted_s: list[float] = []
    for gap_s in gaps_s:
        now_s += gap_s
        history, decision = after_death(budget, history, now_s=now_s, restart_can_help=True)
        assert len(history.deaths_s) <= len(gaps_s)
        if isinstance(decision, GiveUp):
            break
        assert 0.0 < decision.delay_s <= budget.max_delay_s
        granted_s.append(now_s)
        in_window = [at_s for at_s in granted_s if now_s - at_s < window_s]
        assert len(in_window) <= restarts_count
