"""The CUDA side of `device`, over the fake driver: run as a module where the loader finds it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import pytest
from hypothesis import given, settings

from freetokend.core.errors import Reason
from freetokend.device.arena import Arena, ArenaError
from freetokend.device.copier import CopyRange
from freetokend.device.cuda_arena import CudaArena, CudaCopier
from freetokend.device.cuda_driver import CudaDriver, CudaError
from freetokend.experts.slot_pool import ResizeOutcome
from tests.device.arena_contract import CONTRACT, ArenaBench, at, put, usable
from tests.device.driver_rules import RULE_SCENARIOS
from tests.device.pinning_scenarios import PINNING_SCENARIOS
from tests.device.scenarios_on_fake import run_scenarios
from tests.experts.slot_pool_contract import (
    CAPACITY,
    RECORD_BYTES,
    SCENARIOS,
    Scenario,
    Step,
    check_history,
    histories,
    make_bank,
    make_cache,
    resize,
)
from tests.fakes.libcuda import GIB, FakeLibcuda

CHUNK: Final = 2 << 20
OUT_OF_MEMORY: Final = 2
ILLEGAL_ADDRESS: Final = 700


class CudaBench:
    """An `ArenaBench` over the fake driver's own accounts."""

    def __init__(self) -> None:
        self.fake = FakeLibcuda()
        self.fake.reset()
        self.driver = CudaDriver()

    def arena(self, reserved_bytes: int, *, limit_bytes: int | None = None) -> Arena:
        return self.cuda_arena(reserved_bytes, limit_bytes=limit_bytes)

    def cuda_arena(self, reserved_bytes: int, *, limit_bytes: int | None = None) -> CudaArena:
        if limit_bytes is not None:
            self.fake.set_foreign_bytes(8 * GIB - limit_bytes)
        return CudaArena(self.driver, reserved_bytes, chunk_bytes=CHUNK)

    def held_bytes(self) -> int:
        return self.fake.used_bytes

    @contextmanager
    def growth_that_breaks(self, arena: Arena) -> Iterator[None]:
        with self.fake.failing("cuMemCreate", nth=4):
            yield


def growth_takes_the_calls_in_order(bench: CudaBench) -> None:
    arena = bench.cuda_arena(20 << 20)
    with bench.fake.recording() as calls:
        arena.grow_to(2 * CHUNK)
    one = [f"cuMemCreate {CHUNK}", f"cuMemMap {CHUNK}"]
    assert [call for call in calls if "Ctx" not in call] == [
        "cuMemGetInfo_v2 .",
        *one,
        "cuMemRelease 1",
        *one,
        "cuMemRelease 2",
        f"cuMemSetAccess {2 * CHUNK}",
    ]
    with bench.fake.recording() as calls:
        arena.close()
    assert [call for call in calls if "Ctx" not in call] == [
        f"cuMemUnmap {CHUNK}",
        f"cuMemUnmap {CHUNK}",
        f"cuMemAddressFree {arena.reserved_bytes}",
    ]


def every_call_that_fails_rolls_growth_back(bench: CudaBench) -> None:
    arena = bench.cuda_arena(20 << 20)
    arena.grow_to(CHUNK)
    put(arena.base_address, b"kept")
    for call, last in (
        ("cuMemGetInfo_v2", 1),
        ("cuMemCreate", 4),
        ("cuMemMap", 4),
        ("cuMemSetAccess", 1),
    ):
        for nth in range(1, last + 1):
            for code, kind in ((OUT_OF_MEMORY, ArenaError), (ILLEGAL_ADDRESS, CudaError)):
                expected = CudaError if call == "cuMemGetInfo_v2" else kind
                with bench.fake.failing(call, nth=nth, code=code), pytest.raises(expected):
                    arena.grow_to(5 * CHUNK)
                assert arena.committed_bytes == arena.claimed_bytes() == bench.held_bytes() == CHUNK
                assert at(arena.base_address, 4) == b"kept"
                assert not usable(arena.base_address + CHUNK)
    arena.grow_to(5 * CHUNK)
    assert bench.held_bytes() == arena.claimed_bytes() == 5 * CHUNK


def a_handle_that_stays_takes_no_mapping_along(bench: CudaBench) -> None:
    arena = bench.cuda_arena(20 << 20)
    with (
        bench.fake.failing("cuMemRelease", code=ILLEGAL_ADDRESS),
        pytest.raises(CudaError, match="cuMemRelease"),
    ):
        arena.grow_to(CHUNK)
    assert arena.claimed_bytes() == 0
    arena.grow_to(CHUNK)
    assert arena.claimed_bytes() == CHUNK


def another_program_takes_memory_before_growth(bench: CudaBench) -> None:
    arena = bench.cuda_arena(1 * GIB)
    arena.grow_to(10 * CHUNK)
    bench.fake.set_foreign_bytes(8 * GIB - 14 * CHUNK)
    with bench.fake.recording() as calls, pytest.raises(ArenaError) as refused:
        arena.grow_to(15 * CHUNK)
    assert (refused.value.asked_bytes, refused.value.available_bytes) == (5 * CHUNK, 4 * CHUNK)
    assert refused.value.reason is Reason.DEVICE_MEMORY
    assert not [call for call in calls if call.startswith("cuMemCreate")]
    arena.grow_to(14 * CHUNK)
    assert bench.driver.memory().free_bytes == 0


def a_refused_release_says_what_is_left(bench: CudaBench) -> None:
    arena = bench.cuda_arena(20 << 20)
    arena.grow_to(6 * CHUNK)
    with (
        bench.fake.failing("cuMemUnmap", nth=3, code=ILLEGAL_ADDRESS),
        pytest.raises(CudaError, match="cuMemUnmap") as refused,
    ):
        arena.shrink_to(0)
    assert refused.value.reason is Reason.DEVICE_UNUSABLE
    assert arena.committed_bytes == arena.claimed_bytes() == bench.held_bytes() == 4 * CHUNK
    arena.shrink_to(0)
    assert bench.held_bytes() == 0


def a_dead_context_is_an_error_and_not_an_arena(bench: CudaBench) -> None:
    arena = bench.cuda_arena(20 << 20)
    bench.fake.poison(ILLEGAL_ADDRESS)
    for call in (
        lambda: arena.grow_to(CHUNK),
        CudaDriver,
        lambda: CudaArena(bench.driver, 20 << 20),
    ):
        with pytest.raises(CudaError) as failed:
            call()
        assert failed.value.code == ILLEGAL_ADDRESS
        assert not failed.value.out_of_memory
    bench.fake.poison(0)


def a_device_that_is_not_there_is_named(bench: CudaBench) -> None:
    with pytest.raises(CudaError, match="cuDeviceGet"):
        CudaDriver(3)


def slots_are_copied_and_compared(bench: CudaBench) -> None:
    arena = bench.cuda_arena(20 << 20)
    arena.grow_to(20 << 20)
    copier, base, length = CudaCopier(bench.driver), arena.base_address, 5 << 20
    put(base, bytes(range(256)) * (length // 256))
    host = bytearray(bytes(range(256)) * (length // 256))
    put(base + length, b"x" * length)
    copier.copy([CopyRange(from_address=base, to_address=base + length, length_bytes=length)])
    for wrong in (0, (4 << 20) - 1, 4 << 20, length - 1):
        changed = bytearray(host)
        changed[wrong] ^= 1
        assert copier.first_difference(base + length, address_of(changed), length) == wrong
    assert copier.first_difference(base + length, address_of(host), length) is None
    with pytest.raises(CudaError, match="cuMemcpyDtoH"):
        copier.first_difference(base + arena.reserved_bytes, address_of(host), 1)
    copier.close()


def host_memory_is_registered_up_to_a_limit(bench: CudaBench) -> None:
    memory = bytearray(16 << 20)
    address = address_of(memory)
    bench.fake.set_register_limit(10 << 20)
    bench.driver.register_host(address, 8 << 20)
    with pytest.raises(CudaError) as refused:
        bench.driver.register_host(address + (8 << 20), 4 << 20)
    assert refused.value.out_of_memory
    bench.driver.register_host(address + (8 << 20), 2 << 20)
    with pytest.raises(CudaError, match="712"):
        bench.driver.register_host(address, 1 << 20)
    assert bench.fake.registered_bytes == 10 << 20
    bench.driver.unregister_host(address)
    bench.driver.unregister_host(address + (8 << 20))
    with pytest.raises(CudaError, match="713"):
        bench.driver.unregister_host(address)
    assert bench.fake.registered_bytes == 0


def the_context_is_retained_and_released(bench: CudaBench) -> None:
    with bench.fake.recording() as calls:
        CudaDriver().close()
    assert calls[-1] == "cuDevicePrimaryCtxRelease_v2 0"
    assert any(call.startswith("cuDevicePrimaryCtxRetain") for call in calls)


def address_of(memory: bytearray) -> int:
    """Of its first byte."""
    return ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))


# ---- the slot pool over it


def random_histories_of_slots(bench: CudaBench) -> None:
    bank = make_bank()

    @given(history=histories)
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    def live(history: list[Step]) -> None:
        arena, copier = bench.cuda_arena(CAPACITY * RECORD_BYTES), CudaCopier(bench.driver)
        check_history(make_cache(arena, copier, bank), history)
        copier.close()
        arena.close()
        assert bench.held_bytes() == 0

    live()


def slot_scenario(scenario: Scenario, bench: CudaBench) -> None:
    arena, copier = bench.cuda_arena(CAPACITY * RECORD_BYTES), CudaCopier(bench.driver)
    scenario(make_cache(arena, copier, make_bank()))


def a_resize_that_finds_no_memory_keeps_the_cache(bench: CudaBench) -> None:
    arena, copier = bench.cuda_arena(CAPACITY * RECORD_BYTES), CudaCopier(bench.driver)
    cache = make_cache(arena, copier, make_bank())
    resize(cache, 4, held_may_move=False)
    cache.demand([1, 2, 3, 4])
    with bench.fake.failing("cuMemCreate", nth=2), pytest.raises(ArenaError):
        cache.pool.resize(CAPACITY)
    cache.check()
    with bench.fake.failing("cuMemcpyDtoDAsync_v2", code=ILLEGAL_ADDRESS), pytest.raises(CudaError):
        cache.pool.resize(2)
    cache.read_back()
    cache.check()
    assert cache.pool.resize(2).outcome is ResizeOutcome.DONE
    cache.read_back()
    assert set(cache.resident()) == {3, 4}
    cache.check()


OWN: Final[tuple[Callable[[CudaBench], None], ...]] = (
    growth_takes_the_calls_in_order,
    every_call_that_fails_rolls_growth_back,
    a_handle_that_stays_takes_no_mapping_along,
    another_program_takes_memory_before_growth,
    a_refused_release_says_what_is_left,
    a_dead_context_is_an_error_and_not_an_arena,
    a_device_that_is_not_there_is_named,
    slots_are_copied_and_compared,
    host_memory_is_registered_up_to_a_limit,
    the_context_is_retained_and_released,
    random_histories_of_slots,
    a_resize_that_finds_no_memory_keeps_the_cache,
)


def _on_bench(scenario: Callable[[CudaBench], None] | Callable[[ArenaBench], None]) -> None:
    scenario(CudaBench())


def scenarios() -> dict[str, Callable[[], None]]:
    """All of this module and what it shares with others, by name."""
    named: dict[str, Callable[[], None]] = {
        scenario.__name__: partial(_on_bench, scenario) for scenario in (*CONTRACT, *OWN)
    }
    for scenario in SCENARIOS:
        named[scenario.__name__] = partial(_on_bench, partial(slot_scenario, scenario))
    for rule in (*RULE_SCENARIOS, *PINNING_SCENARIOS):
        named[rule.__name__] = rule
    return named


if __name__ == "__main__":
    sys.exit(run_scenarios(scenarios()))
