"""The arithmetic of the declared device, and what the benchmarks make of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.device_clock import DeviceClock, LayerLoad
from benchmarks.hybrid import AHEAD, Cell, clocks, rivals, rows
from benchmarks.split_cases import constant_table, share_table
from freetokend.policy.fill_table import fill_table, split_s

OFF = DeviceClock(
    record_bytes=1000,
    link_bytes_per_s=10_000.0,
    cpu_bytes_per_s=20_000.0,
    slot_bytes_per_s=100_000.0,
    fill_fixed_s=0.01,
    cpu_fixed_s=0.02,
    contention=False,
    slowdown_ratios=(1.0, 2.0, 4.0),
)
SHARED = replace(OFF, contention=True)


def load(hits: int, fills: int, *cpu_tokens: int) -> LayerLoad:
    return LayerLoad(hits_count=hits, fills_count=fills, cpu_tokens=cpu_tokens)


def test_without_contention_each_branch_has_its_own_time() -> None:
    assert OFF.layer_s(load(0, 0)) == 0
    assert OFF.layer_s(load(5, 0)) == pytest.approx(0.05)
    # one fill is there after 0.01 + 0.1 s and takes 0.01 s more
    assert OFF.device_s(load(5, 1)) == pytest.approx(0.12)
    # twenty hits last longer than the fill
    assert OFF.device_s(load(20, 1)) == pytest.approx(0.21)
    assert OFF.cpu_s(load(0, 1, 1, 1, 1)) == pytest.approx(0.02 + 3 * 0.05)
    assert OFF.layer_s(load(5, 1, 1, 1, 1)) == pytest.approx(0.17)


def test_an_expert_of_several_tokens_takes_the_cpu_longer() -> None:
    assert OFF.cpu_s(load(0, 0, 1, 2, 3, 100)) == pytest.approx(0.02 + 0.05 * (1 + 2 + 4 + 4))


def test_with_contention_the_cpu_has_what_the_link_leaves_while_it_runs() -> None:
    assert SHARED.cpu_beside_bytes_per_s == 10_000
    # 0.02 to 0.11 s beside the fill: 900 bytes; the other 2,100 at 20,000 bytes a second
    assert SHARED.cpu_s(load(0, 1, 1, 1, 1)) == pytest.approx(0.11 + 0.105)
    # a CPU that ends before the fill has no more than the rest, too
    assert SHARED.cpu_s(load(0, 4, 1)) == pytest.approx(0.02 + 0.1)
    assert SHARED.cpu_s(load(0, 0, 1)) == OFF.cpu_s(load(0, 0, 1))


def test_a_cpu_that_begins_before_the_link_has_all_memory_until_then() -> None:
    late = replace(SHARED, fill_fixed_s=0.05, cpu_fixed_s=0.0)
    assert late.cpu_s(load(0, 1, 1)) == pytest.approx(0.05)
    # 1,000 bytes until 0.05 s, 1,000 beside the fill until 0.15 s, 1,000 alone
    assert late.cpu_s(load(0, 1, 1, 1, 1)) == pytest.approx(0.2)


def test_a_link_faster_than_memory_takes_all_of_it() -> None:
    fast = replace(SHARED, link_bytes_per_s=1e9)
    assert fast.usable_link_bytes_per_s == 20_000
    assert fast.cpu_beside_bytes_per_s == 0
    assert fast.cpu_s(load(0, 2, 1)) == pytest.approx(0.01 + 0.1 + 0.05)
    assert replace(OFF, link_bytes_per_s=1e9).usable_link_bytes_per_s == 1e9


@pytest.mark.parametrize("label_and_clock", tuple(clocks()), ids=lambda one: one[0])
def test_the_policys_estimate_is_never_below_the_clock(
    label_and_clock: tuple[str, DeviceClock, bool],
) -> None:
    """It takes the CPU to be disturbed also before the link begins; otherwise they agree."""
    _, device, _ = label_and_clock
    rates = device.rates()
    for misses in range(1, 12):
        for fills in range(misses + 1):
            charged = device.layer_s(load(0, fills, *[1] * (misses - fills)))
            estimated = split_s(rates, bucket=0, misses_count=misses, fills_count=fills)
            assert charged <= estimated * (1 + 1e-9)
            assert estimated == pytest.approx(charged, rel=0.05)
        (best, *_) = fill_table(rates, misses)
        assert 1 <= best[misses] <= misses


def test_tables_that_the_split_is_compared_with() -> None:
    assert constant_table(3, 4) == [[0, 1, 2, 3, 3]]
    assert share_table(0.25, 4) == [[0, 1, 1, 1, 1]]
    assert share_table(1.0, 4) == [[0, 1, 2, 3, 4]]
    names = rivals(8)
    assert len(names) == 7 + 8
    assert list(names)[-1] == "q = 1 m"


def cell(**changes: float | bool) -> Cell:
    values: dict[str, float | bool] = {
        "table_s": 1.0, "best_s": 0.98, "fill_only_s": 1.3, "cpu_only_s": 1.5,
        "judged_ahead": True,
    }  # fmt: skip
    return Cell(case="c", best_name="q = 1", **(values | changes))  # type: ignore[arg-type]


def test_gates() -> None:
    assert [row.verdict for row in rows(cell())] == ["pass"] * 3
    assert [row.verdict for row in rows(cell(best_s=0.96))] == ["miss", "pass", "pass"]
    assert [row.verdict for row in rows(cell(fill_only_s=1.19))] == ["pass", "miss", "pass"]
    assert [row.verdict for row in rows(cell(cpu_only_s=1.0, judged_ahead=False))] == [
        "pass",
        "reported",
        "reported",
    ]
    assert cell().single_s == 1.3
    assert math.isclose(AHEAD, 1.2)
