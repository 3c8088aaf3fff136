"""An expert cache under a test's hand, as `CacheCommands` sees one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from freetokend.core.cache_stats import CacheCounters


@dataclass(frozen=True)
class Report:
    """As the slot pool tells a resize."""

    outcome: str
    slots_count: int
    committed_bytes: int
    moved_count: int = 0
    dropped_count: int = 0
    note: str = ""


@dataclass(frozen=True)
class Differing:
    slot: int
    expert_id: int
    offset_bytes: int


@dataclass(frozen=True)
class Compared:
    compared_count: int
    compared_bytes: int
    differences: tuple[Differing, ...]


class FakeCache:
    """Notes its calls; `error` and `deferred` decide the next answers."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.error: Exception | None = None
        self.deferred = ""
        self.state = CacheCounters(
            slots_count=8,
            slots_capacity=16,
            resident_count=2,
            slot_bytes=100,
            committed_bytes=800,
            generation=1,
        )

    def resize(self, slots_count: int) -> Report:
        self.sizes.append(slots_count)
        if self.error is not None:
            raise self.error
        if self.deferred:
            return Report("deferred", 8, 800, note=self.deferred)
        outcome = "unchanged" if slots_count == self.state.slots_count else "done"
        self.state = replace(self.state, slots_count=slots_count, committed_bytes=100 * slots_count)
        return Report(outcome, slots_count, 100 * slots_count, moved_count=1, dropped_count=2)

    def empty(self) -> None:
        self.resize(0)

    def verify(self, progress: Callable[[], None]) -> Compared:
        if self.error is not None:
            raise self.error
        for _ in range(2):
            progress()
        return Compared(2, 200, (Differing(slot=3, expert_id=9, offset_bytes=64),))

    def counters(self) -> CacheCounters:
        return self.state

    def close(self) -> None:
        """Nothing runs in the background."""
