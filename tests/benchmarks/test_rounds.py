"""When rounds that cannot be repeated are too disturbed to tell anything."""

from __future__ import annotations

import pytest

from benchmarks.busy_core import OURS, rows_of
from benchmarks.rounds import Burst, is_busy


def bursts(*rates: float, share: float = 1.0) -> list[Burst]:
    return [Burst(rate=rate, cpu_share=share) for rate in rates]


@pytest.mark.parametrize(
    ("rates", "busy"),
    [
        ((10, 10, 9, 9, 10, 8.6, 10), False),
        ((10, 10, 9, 9, 10, 3, 3), False),  # two of seven are allowed
        ((10, 10, 9, 9, 3, 3, 3), True),
        ((30, 10, 10, 10, 10, 10, 10), True),  # the best tells what the others lost
    ],
)
def test_a_reference_that_swings_means_a_busy_machine(rates: tuple[float, ...], busy: bool) -> None:
    assert is_busy(bursts(*rates)) is busy


def test_threads_that_waited_for_a_core_mean_it_too() -> None:
    assert is_busy([*bursts(*[10] * 4), *bursts(*[10] * 3, share=0.9)])


def test_busy_core_says_so_instead_of_passing() -> None:
    quiet = [bursts(10, 7, 5) for _ in range(7)]
    swinging = [bursts(rate, 7, 5) for rate in (10, 8, 6, 10, 6, 6, 6)]
    verdicts = {
        row.case.split(", ")[1]: row.verdict
        for row in rows_of({OURS: quiet, "rival": swinging}, "layer", 4096)
    }
    assert verdicts[f"{OURS} beside 2 busy loops"] == "pass"
    assert verdicts["rival beside 2 busy loops"] == "machine busy"
