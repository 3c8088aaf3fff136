"""The estimate of rates in a machine that changes: the split that follows from it in the end."""

from __future__ import annotations

import random

import pytest

from freetokend.policy.fill_table import FillRates, fill_table, split_s
from freetokend.policy.rate_estimate import BranchEstimate, with_sample

RECORD_BYTES = 18 << 20
MOST_MISSES = 40
STEPS_COUNT = 50
# A table is made anew only now and then, and one step in so many tries another split.
TABLE_STEPS_COUNT = 10
TRIED_STEPS_COUNT = 8


def rates(
    fill_bytes_per_s: float, cpu_bytes_per_s: float, fill_fixed_s: float, cpu_fixed_s: float
) -> FillRates:
    return FillRates(
        record_bytes=RECORD_BYTES,
        fill_bytes_per_s=fill_bytes_per_s,
        fill_alone_bytes_per_s=fill_bytes_per_s,
        cpu_bytes_per_s=cpu_bytes_per_s,
        cpu_alone_bytes_per_s=cpu_bytes_per_s,
        fill_fixed_s=fill_fixed_s,
        cpu_fixed_s=cpu_fixed_s,
    )


class Decode:
    """Steps whose split follows the estimate, which follows the steps."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.fill = BranchEstimate(bytes_per_s=1e10)
        self.cpu = BranchEstimate(bytes_per_s=1e10)
        self.table: tuple[int, ...] = ()

    def run(self, truth: FillRates, *, calm: bool) -> None:
        for step in range(STEPS_COUNT):
            if step % TABLE_STEPS_COUNT == 0:
                self.learn()
            misses = self.chance.randrange(4, MOST_MISSES)
            q = self.table[misses]
            if step % TRIED_STEPS_COUNT == 0:
                q = self.chance.randrange(1, misses)
            late = 1.0 if calm or self.chance.random() > 0.1 else self.chance.uniform(2, 20)
            self.fill = self._sampled(
                self.fill, q, truth.fill_fixed_s, truth.fill_bytes_per_s, late
            )
            self.cpu = self._sampled(
                self.cpu, misses - q, truth.cpu_fixed_s, truth.cpu_bytes_per_s, late
            )

    def _sampled(
        self, estimate: BranchEstimate, count: int, fixed_s: float, rate: float, late: float
    ) -> BranchEstimate:
        size_bytes = count * RECORD_BYTES
        duration_s = (fixed_s + size_bytes / rate) * late
        return with_sample(estimate, size_bytes=size_bytes, duration_s=duration_s, now_s=0.0)

    def learn(self) -> None:
        fill, cpu = self.fill, self.cpu
        learned = rates(fill.bytes_per_s, cpu.bytes_per_s, fill.fixed_s, cpu.fixed_s)
        (self.table,) = fill_table(learned, MOST_MISSES, later_ratio=1.0)


@pytest.mark.parametrize("seed", range(50))
def test_the_split_is_within_two_percent_of_the_best_once_all_is_calm(seed: int) -> None:
    """Rates change three times under steps that are held up now and then; then fifty calm ones."""
    chance = random.Random(seed)
    decode = Decode(chance)
    for phase in range(4):
        truth = rates(
            chance.uniform(5e9, 5e10),
            chance.uniform(1e10, 8e10),
            chance.uniform(1e-5, 3e-4),
            chance.uniform(1e-5, 3e-4),
        )
        decode.run(truth, calm=phase == 3)
    decode.learn()
    for misses in range(1, MOST_MISSES + 1):
        costs = [
            split_s(truth, bucket=0, misses_count=misses, fills_count=q)
            for q in range(1, misses + 1)
        ]
        assert costs[decode.table[misses] - 1] <= 1.02 * min(costs), misses
