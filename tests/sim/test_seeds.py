"""The controller in the simulated machine: 200 seeds, what once failed, 10,000 with --full."""

from __future__ import annotations

import pytest

from tests.sim.run import simulate
from tests.sim.seeds import failed_seeds

SEEDS_COUNT = 200
MANY = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS_COUNT, 20))
def test_nothing_that_must_hold_is_broken(first: int) -> None:
    for seed in range(first, first + 20):
        verdict = simulate(seed)
        assert not verdict.violations, verdict


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in failed_seeds() if seed >= SEEDS_COUNT])
def test_what_once_failed_holds(seed: int) -> None:
    assert not simulate(seed).violations


@pytest.mark.full
@pytest.mark.parametrize("first", range(SEEDS_COUNT, MANY, 100))
def test_ten_thousand_seeds(first: int) -> None:
    for seed in range(first, min(first + 100, MANY)):
        verdict = simulate(seed)
        assert not verdict.violations, verdict


def test_a_seed_is_the_same_run_again() -> None:
    assert simulate(3) == simulate(3)
