"""A short look at this machine's rates: figures that a table can be made of, true to the link."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from freetokend.core.errors import InternalError
from freetokend.device.host_arena import HostArena
from freetokend.experts.bank import MappedBank
from freetokend.experts.host_rates import (
    BUCKET_TOKENS,
    BURST_COUNT,
    HostRates,
    cost_line,
    measure_host_rates,
)
from freetokend.ftw.layout import ExpertBank
from freetokend.native.executor import Executor
from freetokend.policy.fill_table import fill_table
from tests.experts.cache_rig import RecordBank, record_bank

EXPERTS = 12


@pytest.fixture(scope="module")
def bank() -> RecordBank:
    return record_bank(layers=3, experts=EXPERTS)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:1]) as executor:
        yield executor


def arena(bank: RecordBank) -> HostArena:
    return HostArena(BURST_COUNT * bank.mapped.bank.record_bytes)


def check(rates: HostRates) -> None:
    """A table can be made of them, and each figure is a possible one."""
    assert rates.rates.problem() == ""
    assert rates.rates.fill_fixed_s >= 0
    assert rates.rates.cpu_fixed_s >= 0
    assert rates.rates.fill_bytes_per_s <= rates.rates.fill_alone_bytes_per_s
    assert rates.rates.cpu_bytes_per_s <= rates.rates.cpu_alone_bytes_per_s
    ratios = rates.rates.cpu_slowdown_ratios
    assert len(ratios) == len(BUCKET_TOKENS)
    assert list(ratios) == sorted(ratios)
    assert rates.chunk_token_s > 0
    table = fill_table(rates.rates, EXPERTS)
    assert len(table) == len(BUCKET_TOKENS)
    assert all(len(row) == EXPERTS + 1 for row in table)


@pytest.mark.parametrize("rate_bytes_per_s", [2e6, 8e6])
def test_the_rate_of_a_known_link_is_found(
    bank: RecordBank, executor: Executor, rate_bytes_per_s: float
) -> None:
    before = bytes(bank.memory)
    found = measure_host_rates(
        bank.mapped, executor, arena(bank), rate_bytes_per_s=rate_bytes_per_s
    )
    check(found)
    assert found.rates.fill_alone_bytes_per_s == pytest.approx(rate_bytes_per_s, rel=0.2)
    assert found.rates.fill_bytes_per_s == pytest.approx(rate_bytes_per_s, rel=0.2)
    assert bytes(bank.memory) == before


def test_a_link_without_a_rate_is_as_fast_as_memory(bank: RecordBank, executor: Executor) -> None:
    found = measure_host_rates(bank.mapped, executor, arena(bank))
    check(found)
    assert found.rates.fill_alone_bytes_per_s > 100e6
    assert "measured" in found.source


def test_time_that_is_up_ends_it_after_one_burst_of_each_kind(
    bank: RecordBank, executor: Executor
) -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        # a second each: no burst is long enough to be looked at again, however busy the machine is
        return float(looks)

    check(measure_host_rates(bank.mapped, executor, arena(bank), budget_s=0.0, clock=clock))
    hurried = looks
    looks = 0
    check(measure_host_rates(bank.mapped, executor, arena(bank), budget_s=1e9, clock=clock))
    assert looks > 3 * hurried


@pytest.mark.parametrize("experts", [1, 2, 7])
def test_small_layers_are_measured_too(executor: Executor, experts: int) -> None:
    small = record_bank(layers=1, experts=experts)
    found = measure_host_rates(small.mapped, executor, arena(small))
    assert found.rates.problem() == ""


def test_a_burst_that_took_less_than_one_record_is_no_infinite_rate() -> None:
    """What a busy machine measures now and then: the engine must start all the same."""
    fixed_s, rate = cost_line(1e-3, 9e-3, 9, 1 << 20)
    assert fixed_s == pytest.approx(0)
    assert rate == pytest.approx(1e3 * (1 << 20))
    fixed_s, rate = cost_line(10e-3, 1e-3, 8, 1 << 20)
    assert fixed_s == pytest.approx(0.9e-3)
    assert rate == pytest.approx(8 * (1 << 20) / 0.1e-3)


def test_a_bank_without_experts_is_refused(executor: Executor) -> None:
    bank = ExpertBank(
        format="bf16",
        offset_bytes=0,
        record_bytes=4096,
        moe_layers_count=0,
        experts_per_layer_count=0,
        hidden_size=64,
        intermediate_size=64,
        moe_layer_indices=(),
        activation="silu",
    )
    mapped = MappedBank(bank=bank, region_address=4096)
    with pytest.raises(InternalError, match="without experts"):
        measure_host_rates(mapped, executor, HostArena(4096))
