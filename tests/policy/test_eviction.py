"""Orders of eviction: the integer arithmetic against the formula it stands for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.policy.eviction import (
    COLDEST,
    HALF_LIFE_STEPS,
    NEVER,
    PROMPT_DOUBLINGS,
    DecayedUse,
    Lru,
    default_order,
)

HALF_LIVES = st.integers(1, 1 << 16)
CLOCKS = st.integers(0, (1 << 40) - 1)


def test_lru_is_the_clock() -> None:
    order = Lru()
    assert order.score_on_use(NEVER, 7) == order.score_on_prompt(NEVER, 7, 1, 2) == NEVER
    assert order.key(NEVER, 7) == 7
    assert order.ticks_per_layer == 0


@given(HALF_LIVES, CLOCKS)
def test_a_first_use_is_keyed_as_in_lru(half_life: int, clock: int) -> None:
    order = DecayedUse(half_life, 1)
    assert order.key(order.score_on_use(NEVER, clock), clock) == clock


@given(HALF_LIVES, CLOCKS, st.integers(-(1 << 20), 1 << 20))
def test_the_bonus_is_near_the_logarithm(half_life: int, clock: int, ahead: int) -> None:
    """Off by less than 0.11 of a half-life (and the rounding), never below the greater part."""
    score = clock + ahead
    joined = DecayedUse(half_life, 1).score_on_use(score, clock)
    exact = max(score, clock) + half_life * math.log2(1 + 2 ** (-abs(ahead) / half_life))
    assert joined >= max(score, clock)
    assert abs(joined - exact) <= 0.11 * half_life + 1


@given(HALF_LIVES, CLOCKS, st.integers(NEVER, 1 << 40), st.integers(NEVER, 1 << 40))
def test_more_use_before_never_lowers_a_score(
    half_life: int, clock: int, one: int, other: int
) -> None:
    order = DecayedUse(half_life, 1)
    low, high = sorted((one, other))
    assert order.score_on_use(low, clock) <= order.score_on_use(high, clock)


@given(st.integers(1, 256), st.integers(1, 400))
def test_scores_stay_bounded_under_steady_use(layers: int, uses: int) -> None:
    """Used in every step: the bonus settles below that of a prompt, so it cannot run away."""
    order = default_order(layers)
    score = NEVER
    for step in range(uses):
        score = order.score_on_use(score, step * layers)
    assert score - (uses - 1) * layers < PROMPT_DOUBLINGS * order.half_life_ticks


@given(HALF_LIVES, CLOCKS, st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_a_prompt_counts_by_the_share_of_its_tokens(
    half_life: int, clock: int, one: int, other: int
) -> None:
    uses, tokens = sorted((one, other))
    order = DecayedUse(half_life, 1)
    moved = (order.score_on_prompt(NEVER, clock, uses, tokens) - clock) / half_life
    # log2 is linear between powers of two (off by 0.09 at most, twice) in 256 parts and ticks
    assert abs(moved - PROMPT_DOUBLINGS - math.log2(uses / tokens)) < 0.19 + 2 / half_life
    assert order.score_on_prompt(NEVER, clock, tokens, tokens) == clock + 6 * half_life


@pytest.mark.parametrize("layers", [1, 30, 40, 43])
def test_the_default_counts_in_steps(layers: int) -> None:
    order = default_order(layers)
    assert order.half_life_ticks == HALF_LIFE_STEPS * layers
    # The term with the layers is worth a half-life over a whole step.
    assert order.ticks_per_layer * layers == order.half_life_ticks
    assert COLDEST < NEVER
