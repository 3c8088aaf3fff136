"""Budgets of tokens after a shortage of memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetokend.scheduler.budget import TokenBudget
from freetokend.scheduler.scheduler import STEPS_PATIENCE_COUNT
from tests.scheduler.paged_echo import PagedEchoEngine
from tests.scheduler.support import Bench, request


def test_it_comes_back_after_many_successes_and_later_the_next_time() -> None:
    budget = TokenBudget(256, least_tokens=5, patience_count=3)
    budget.fell_short(256)
    assert budget.tokens == 128
    for _ in range(5):
        budget.succeeded()
    assert budget.tokens == 128
    budget.succeeded()
    assert budget.tokens == 256
    budget.fell_short(200)
    assert budget.tokens == 100
    for _ in range(12):
        budget.succeeded()
    assert budget.tokens == 200


def test_a_success_counts_from_the_last_shortage() -> None:
    budget = TokenBudget(64, least_tokens=0, patience_count=2)
    budget.fell_short(64)
    for _ in range(3):
        budget.succeeded()
    budget.fell_short(32)
    assert budget.tokens == 16
    for _ in range(7):
        budget.succeeded()
    assert budget.tokens == 16


@given(
    limit=st.integers(0, 500),
    least=st.integers(0, 40),
    events=st.lists(st.one_of(st.none(), st.integers(0, 500)), max_size=80),
)
def test_it_stays_within_its_bounds_and_always_comes_back(
    limit: int, least: int, events: list[int | None]
) -> None:
    budget = TokenBudget(limit, least_tokens=least, patience_count=1)
    for shortage in events:
        before = budget.tokens
        if shortage is None:
            budget.succeeded()
            assert budget.tokens >= before
        else:
            budget.fell_short(shortage)
            assert budget.tokens <= before
        assert min(least, limit) <= budget.tokens <= limit
    shortages_count = sum(event is not None for event in events)
    if shortages_count < 8:
        for _ in range(10 * 2**shortages_count):
            budget.succeeded()
        assert budget.tokens == limit


def test_steps_grow_again_when_the_memory_is_back() -> None:
    engine = PagedEchoEngine(4, largest_step_tokens=70)
    bench = Bench(pages_count=1200, step_tokens=128, engine=engine)
    bench.submit(request("first", [1] * 128, 1))
    bench.run()
    engine.largest_step_tokens = 1 << 30
    bench.submit(request("second", [2], 2 * STEPS_PATIENCE_COUNT))
    bench.run()
    bench.submit(request("third", [3] * 128, 1))
    bench.run()
    assert engine.steps[-1].tokens_count == 128
