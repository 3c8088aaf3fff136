"""How fast prompts are said to be computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.policy.prefill_estimate import PrefillMeter, estimated_prefill_s


def test_only_time_with_prompts_waiting_counts() -> None:
    meter = PrefillMeter()
    assert meter.tokens_per_s == 0
    meter.look(100.0, 0, 0)
    meter.look(500.0, 0, 60)  # 400 s of idling, then a prompt of 60
    meter.look(501.0, 40, 20)
    meter.look(502.0, 60, 0)
    meter.look(900.0, 60, 0)
    assert meter.tokens_per_s == pytest.approx(30, rel=1e-2)


def test_a_step_without_prompt_tokens_costs_them_time() -> None:
    meter = PrefillMeter()
    meter.look(0.0, 0, 100)
    meter.look(1.0, 0, 100)
    meter.look(2.0, 100, 0)
    assert meter.tokens_per_s == pytest.approx(50, rel=1e-2)


def test_what_was_long_ago_is_forgotten() -> None:
    meter = PrefillMeter()
    meter.look(0.0, 0, 1)
    meter.look(1000.0, 1000, 1)  # one token a second
    for step in range(1, 200):
        meter.look(1000.0 + step, 1000 + 1000 * step, 1)
    assert meter.tokens_per_s == pytest.approx(1000, rel=0.02)


@given(
    steps=st.lists(
        st.tuples(st.floats(0.01, 10), st.integers(0, 5000), st.integers(0, 1000)), max_size=60
    )
)
def test_the_rate_lies_between_the_slowest_and_the_fastest_step(
    steps: list[tuple[float, int, int]],
) -> None:
    meter = PrefillMeter()
    now_s, computed, pending_before = 0.0, 0, 0
    rates = []
    for took_s, tokens, pending in steps:
        now_s += took_s
        computed += tokens
        if pending_before:
            rates.append(tokens / took_s)
        meter.look(now_s, computed, pending)
        pending_before = pending
    if any(rates):
        assert 0 < meter.tokens_per_s <= max(rates) * (1 + 1e-6)
        assert meter.tokens_per_s >= min(rates) * (1 - 1e-6)
    else:
        assert meter.tokens_per_s == 0


def test_a_prompt_waits_for_those_before_it() -> None:
    assert estimated_prefill_s(100, 300, 50.0) == 8.0
    assert estimated_prefill_s(100, 300, 0.0) is None
