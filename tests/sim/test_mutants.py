"""The checks can fail: controllers with one fault each do not come through the ordinary seeds."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate
from tests.sim.test_seeds import SEEDS_COUNT


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_controller_is_found(name: str) -> None:
    for seed in range(SEEDS_COUNT):
        if simulate(seed, MUTANTS[name]()).violations:
            return
    raise AssertionError(f"{SEEDS_COUNT} seeds say nothing against a controller with: {name}")
