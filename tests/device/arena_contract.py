"""What every arena promises, as scenarios over a bench that knows the device."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Protocol

import pytest

from freetokend.core.errors import InternalError, Reason, ResourceError
from freetokend.device.arena import Arena, ArenaError, rounded_up


class ArenaBench(Protocol):
    """Makes arenas of one kind and sees what they hold from the outside."""

    def arena(self, reserved_bytes: int, *, limit_bytes: int | None = None) -> Arena:
        """A new arena on a device that has `limit_bytes` of memory."""
        ...

    def held_bytes(self) -> int:
        """Memory of the device that is in use, counted without asking the arena."""
        ...

    def growth_that_breaks(self, arena: Arena) -> AbstractContextManager[None]:
        """While inside, growth by four granules or more fails after part of it is done."""
        ...


def usable(address: int) -> bool:
    """Whether the byte can be read, without a fault when it cannot."""
    read_end, write_end = os.pipe()
    try:
        return bool(ctypes.CDLL(None).write(write_end, ctypes.c_void_p(address), 1) == 1)
    finally:
        os.close(read_end)
        os.close(write_end)


def put(address: int, value: bytes) -> None:
    """Write into device memory."""
    ctypes.memmove(address, value, len(value))


def at(address: int, length_bytes: int) -> bytes:
    """Read device memory."""
    return ctypes.string_at(address, length_bytes)


def a_new_arena_holds_address_space_and_no_memory(bench: ArenaBench) -> None:
    before_bytes = bench.held_bytes()
    arena = bench.arena(100 << 20)
    assert arena.reserved_bytes >= 100 << 20
    assert arena.base_address % arena.granularity_bytes == 0
    assert (arena.committed_bytes, arena.claimed_bytes()) == (0, 0)
    assert bench.held_bytes() == before_bytes
    assert not usable(arena.base_address)


def growth_commits_granules_at_the_end(bench: ArenaBench) -> None:
    arena = bench.arena(100 << 20)
    granule, base = arena.granularity_bytes, arena.base_address
    arena.grow_to(1)
    assert arena.committed_bytes == arena.claimed_bytes() == granule
    put(base, b"first")
    put(base + granule - 4, b"last")
    arena.grow_to(3 * granule + 1)
    assert arena.committed_bytes == arena.claimed_bytes() == 4 * granule
    assert arena.base_address == base
    assert at(base, 5) == b"first"
    assert at(base + granule - 4, 4) == b"last"
    put(base + 4 * granule - 4, b"more")
    assert not usable(base + 4 * granule)


def shrinking_gives_the_end_back(bench: ArenaBench) -> None:
    before_bytes = bench.held_bytes()
    arena = bench.arena(100 << 20)
    granule, base = arena.granularity_bytes, arena.base_address
    arena.grow_to(5 * granule)
    put(base, b"kept")
    arena.shrink_to(granule + 1)
    assert arena.committed_bytes == arena.claimed_bytes() == 2 * granule
    assert bench.held_bytes() - before_bytes == 2 * granule
    assert at(base, 4) == b"kept"
    assert not usable(base + 2 * granule)
    arena.shrink_to(0)
    assert arena.claimed_bytes() == bench.held_bytes() - before_bytes == 0
    assert arena.base_address == base


def sizes_in_the_wrong_direction_change_nothing(bench: ArenaBench) -> None:
    arena = bench.arena(100 << 20)
    arena.grow_to(3 * arena.granularity_bytes)
    arena.grow_to(arena.granularity_bytes)
    arena.shrink_to(4 * arena.granularity_bytes)
    assert arena.committed_bytes == arena.claimed_bytes() == 3 * arena.granularity_bytes


def nothing_goes_beyond_the_reserved_length(bench: ArenaBench) -> None:
    arena = bench.arena(10 << 20)
    arena.grow_to(arena.reserved_bytes)
    assert arena.claimed_bytes() == arena.reserved_bytes
    with pytest.raises(InternalError, match=str(arena.reserved_bytes + 1)):
        arena.grow_to(arena.reserved_bytes + 1)
    with pytest.raises(InternalError):
        arena.shrink_to(-arena.granularity_bytes)
    assert arena.claimed_bytes() == arena.reserved_bytes


def growth_without_memory_is_refused_with_the_numbers(bench: ArenaBench) -> None:
    arena = bench.arena(200 << 20, limit_bytes=64 << 20)
    arena.grow_to(40 << 20)
    committed_bytes, held_bytes = arena.committed_bytes, bench.held_bytes()
    put(arena.base_address + committed_bytes - 4, b"kept")
    with pytest.raises(ArenaError) as refused:
        arena.grow_to(committed_bytes + (48 << 20))
    assert refused.value.asked_bytes == 48 << 20
    assert refused.value.available_bytes == (64 << 20) - committed_bytes
    assert str(48 << 20) in str(refused.value)
    assert str((64 << 20) - committed_bytes) in str(refused.value)
    assert refused.value.reason is Reason.DEVICE_MEMORY
    assert arena.committed_bytes == arena.claimed_bytes() == committed_bytes
    assert bench.held_bytes() == held_bytes
    assert at(arena.base_address + committed_bytes - 4, 4) == b"kept"
    arena.grow_to(64 << 20)
    assert arena.claimed_bytes() == 64 << 20


def growth_that_breaks_half_way_rolls_back(bench: ArenaBench) -> None:
    arena = bench.arena(200 << 20)
    granule = arena.granularity_bytes
    arena.grow_to(granule)
    held_bytes = bench.held_bytes()
    with bench.growth_that_breaks(arena), pytest.raises(ArenaError, match="refused") as refused:
        arena.grow_to(6 * granule)
    assert isinstance(refused.value, ResourceError)
    assert arena.committed_bytes == arena.claimed_bytes() == granule
    assert bench.held_bytes() == held_bytes
    assert not usable(arena.base_address + granule)
    arena.grow_to(6 * granule)
    put(arena.base_address + 6 * granule - 4, b"last")


def cycles_do_not_drift(bench: ArenaBench) -> None:
    before_bytes = bench.held_bytes()
    arena = bench.arena(100 << 20)
    base, chance = arena.base_address, random.Random(5)
    for _ in range(10):
        length_bytes = chance.randrange(arena.reserved_bytes + 1)
        arena.grow_to(length_bytes)
        arena.shrink_to(length_bytes)
        assert arena.committed_bytes == rounded_up(length_bytes, arena.granularity_bytes)
        assert arena.claimed_bytes() == arena.committed_bytes
        assert bench.held_bytes() - before_bytes == arena.committed_bytes
        assert arena.base_address == base


def two_arenas_are_counted_apart(bench: ArenaBench) -> None:
    arenas = [bench.arena(20 << 20) for _ in range(4)]
    for arena in arenas:
        arena.grow_to(arena.reserved_bytes)
    arenas[1].shrink_to(0)
    assert [arena.claimed_bytes() for arena in arenas] == [
        arena.committed_bytes for arena in arenas
    ]
    assert arenas[1].claimed_bytes() == 0


def closing_gives_everything_back(bench: ArenaBench) -> None:
    before_bytes = bench.held_bytes()
    arena = bench.arena(50 << 20)
    arena.grow_to(30 << 20)
    arena.close()
    arena.close()
    assert bench.held_bytes() == before_bytes
    assert (arena.committed_bytes, arena.claimed_bytes()) == (0, 0)


CONTRACT: Final[tuple[Callable[[ArenaBench], None], ...]] = (
    a_new_arena_holds_address_space_and_no_memory,
    growth_commits_granules_at_the_end,
    shrinking_gives_the_end_back,
    sizes_in_the_wrong_direction_change_nothing,
    nothing_goes_beyond_the_reserved_length,
    growth_without_memory_is_refused_with_the_numbers,
    growth_that_breaks_half_way_rolls_back,
    cycles_do_not_drift,
    two_arenas_are_counted_apart,
    closing_gives_everything_back,
)
