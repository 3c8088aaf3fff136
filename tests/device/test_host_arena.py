"""The arena in ordinary memory."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freetokend.core.errors import ResourceError
from freetokend.device.arena import Arena, ArenaError
from freetokend.device.host_arena import HostArena, host_available_bytes
from freetokend.native.host import mapping_pages
from tests.device.arena_contract import CONTRACT, ArenaBench


def data_bytes() -> int:
    """What RLIMIT_DATA counts: the writable private memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell VmData")


class HostBench:
    """An `ArenaBench` over /proc."""

    def __init__(self) -> None:
        self.arenas: list[HostArena] = []

    def arena(self, reserved_bytes: int, *, limit_bytes: int | None = None) -> Arena:
        self.arenas.append(HostArena(reserved_bytes, limit_bytes=limit_bytes))
        return self.arenas[-1]

    def held_bytes(self) -> int:
        return sum(
            mapping_pages(arena.base_address, arena.reserved_bytes).resident_bytes
            for arena in self.arenas
            if arena.base_address
        )

    @contextmanager
    def growth_that_breaks(self, arena: Arena) -> Iterator[None]:
        soft_bytes, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
        tight_bytes = data_bytes() + 3 * arena.granularity_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (tight_bytes, hard_bytes))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, hard_bytes))


@pytest.fixture
def bench() -> Iterator[HostBench]:
    made = HostBench()
    yield made
    for arena in made.arenas:
        arena.close()


@pytest.mark.parametrize("scenario", CONTRACT, ids=lambda scenario: scenario.__name__)
def test_contract(scenario: Callable[[ArenaBench], None], bench: HostBench) -> None:
    scenario(bench)


def test_memory_is_read_again_just_before_each_growth() -> None:
    left_bytes = 64 << 20
    arena = HostArena(128 << 20, available_bytes=lambda: left_bytes)
    arena.grow_to(32 << 20)
    left_bytes = 16 << 20  # another program was faster
    with pytest.raises(ArenaError) as refused:
        arena.grow_to(64 << 20)
    assert (refused.value.asked_bytes, refused.value.available_bytes) == (32 << 20, 16 << 20)
    assert arena.claimed_bytes() == 32 << 20
    arena.grow_to(48 << 20)
    assert arena.claimed_bytes() == 48 << 20
    arena.close()


def test_the_machine_tells_what_it_has() -> None:
    assert 0 < host_available_bytes() < 1 << 50


def test_no_address_space_is_a_typed_error() -> None:
    soft_bytes, hard_bytes = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, hard_bytes))
    try:
        with pytest.raises(ResourceError, match="fewer slots"):
            HostArena(1 << 46)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft_bytes, hard_bytes))
