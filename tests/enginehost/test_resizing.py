"""Slots and KV pages changed together, against every order of success and failure."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.cache_stats import CacheCounters
from freetokend.core.errors import FreetokenError, InvalidInputError, Reason, ResourceError
from freetokend.enginehost.resizing import Sizes, resize, sizes_of
from freetokend.link.messages import CacheResized, ResizeOutcome
from tests.enginehost.fake_cache import Report

SLOT_BYTES, PAGE_BYTES = 100, 10
CAPACITY = 16


@dataclass
class Memory:
    """What the device has, shared by both; `log` has every change in its order."""

    total_bytes: int
    slots_count: int = 4
    pages_count: int = 8
    in_use_count: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def used_bytes(self) -> int:
        return self.slots_count * SLOT_BYTES + self.pages_count * PAGE_BYTES

    def take(self, missing_bytes: int) -> None:
        free_bytes = self.total_bytes - self.used_bytes
        if missing_bytes > free_bytes:
            raise ResourceError(
                f"{missing_bytes} asked, {free_bytes} free.", reason=Reason.DEVICE_MEMORY
            )


class FakeSlots:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def resize(self, slots_count: int) -> Report:
        memory = self.memory
        before = memory.slots_count
        memory.take(max(slots_count - before, 0) * SLOT_BYTES)
        memory.log.append(f"slots {before}>{slots_count}")
        memory.slots_count = slots_count
        outcome = "done" if slots_count != before else "unchanged"
        return Report(outcome, slots_count, slots_count * SLOT_BYTES)

    def counters(self) -> CacheCounters:
        return CacheCounters(
            slots_count=self.memory.slots_count,
            slots_capacity=CAPACITY,
            resident_count=0,
            slot_bytes=SLOT_BYTES,
            committed_bytes=self.memory.slots_count * SLOT_BYTES,
            generation=1,
        )


class FakeKv:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @property
    def pages_count(self) -> int:
        return self.memory.pages_count

    @property
    def committed_bytes(self) -> int:
        return self.memory.pages_count * PAGE_BYTES

    def check_count(self, pages_count: int) -> None:
        if not 1 <= pages_count <= 2 * CAPACITY:
            raise InvalidInputError("there can be 1 to 32 KV pages", param="kv_pages_count")

    def shrink(self, pages_count: int) -> str:
        left = max(pages_count, min(self.memory.in_use_count, self.memory.pages_count))
        self.memory.log.append(f"pages {self.memory.pages_count}>{left}")
        self.memory.pages_count = left
        return "" if left == pages_count else f"{left} KV pages are kept"

    def grow(self, pages_count: int) -> None:
        self.memory.take((pages_count - self.memory.pages_count) * PAGE_BYTES)
        self.memory.log.append(f"pages {self.memory.pages_count}>{pages_count}")
        self.memory.pages_count = pages_count


def do(memory: Memory, slots_count: int, pages_count: int | None) -> CacheResized:
    return resize(
        FakeSlots(memory),
        FakeKv(memory),
        generation=7,
        slots_count=slots_count,
        kv_pages_count=pages_count,
    )


def test_what_shrinks_makes_room_for_what_grows() -> None:
    memory = Memory(total_bytes=480)
    answer = do(memory, 2, 20)
    assert (answer.generation, answer.outcome) == (7, ResizeOutcome.DONE)
    assert (answer.slots_before_count, answer.slots_count) == (4, 2)
    assert (answer.committed_before_bytes, answer.committed_bytes) == (400, 200)
    assert (answer.kv_pages_before_count, answer.kv_pages_count) == (8, 20)
    assert (answer.kv_before_bytes, answer.kv_bytes) == (80, 200)
    memory = Memory(total_bytes=480, slots_count=2, pages_count=28)
    assert do(memory, 4, 8).outcome is ResizeOutcome.DONE
    assert memory.log == ["pages 28>8", "slots 2>4"]


def test_pages_in_use_defer_and_nothing_grows() -> None:
    memory = Memory(total_bytes=1000, in_use_count=6)
    answer = do(memory, 9, 3)
    assert answer.outcome is ResizeOutcome.DEFERRED
    assert answer.note == ("6 KV pages are kept. The rest is done when the command comes again.")
    assert (answer.slots_count, answer.kv_pages_count) == (4, 6)
    memory.in_use_count = 0
    again = do(memory, 9, 3)
    assert (again.outcome, again.slots_count, again.kv_pages_count) == (ResizeOutcome.DONE, 9, 3)


def test_as_it_was_is_unchanged() -> None:
    memory = Memory(total_bytes=480)
    assert do(memory, 4, None).outcome is ResizeOutcome.UNCHANGED
    assert do(memory, 4, 8).outcome is ResizeOutcome.UNCHANGED


@pytest.mark.parametrize(("slots", "pages"), [(17, 3), (2, 0), (2, 33)])
def test_a_number_that_cannot_be_is_refused_before_anything_changes(slots: int, pages: int) -> None:
    memory = Memory(total_bytes=480)
    with pytest.raises(InvalidInputError):
        do(memory, slots, pages)
    assert memory.log == []


@given(
    spare_bytes=st.integers(0, 600),
    in_use=st.integers(0, 12),
    slots=st.integers(0, CAPACITY),
    pages=st.integers(1, 2 * CAPACITY),
)
def test_it_is_all_done_or_deferred_or_as_before(
    spare_bytes: int, in_use: int, slots: int, pages: int
) -> None:
    memory = Memory(total_bytes=480 + spare_bytes, in_use_count=in_use)
    before = sizes_of(FakeSlots(memory), FakeKv(memory))
    kept = min(in_use, 8)
    fits = slots * SLOT_BYTES + pages * PAGE_BYTES <= memory.total_bytes
    try:
        answer = do(memory, slots, pages)
    except ResourceError:
        assert not fits
        assert sizes_of(FakeSlots(memory), FakeKv(memory)) == before
        return
    now = (answer.slots_count, answer.kv_pages_count)
    assert now == (memory.slots_count, memory.pages_count)
    if answer.outcome is ResizeOutcome.DEFERRED:
        assert pages < kept
        assert now == (min(slots, 4), kept)
    else:
        assert fits
        assert now == (slots, pages)
        assert (answer.outcome is ResizeOutcome.UNCHANGED) == ((slots, pages) == (4, 8))


def test_what_cannot_be_had_back_is_told() -> None:
    """Somebody else takes what had shrunk before it can be taken again."""
    memory = Memory(total_bytes=480)

    class Grabbed(FakeKv):
        def grow(self, pages_count: int) -> None:
            memory.total_bytes = memory.used_bytes
            super().grow(pages_count)

    with pytest.raises(FreetokenError, match=r"there are 2 of 4 slots and 8 of 8 KV pages now"):
        resize(FakeSlots(memory), Grabbed(memory), generation=1, slots_count=2, kv_pages_count=30)
    assert sizes_of(FakeSlots(memory), FakeKv(memory)) == Sizes(
        slots_count=2, slots_bytes=200, kv_pages_count=8, kv_bytes=80
    )
