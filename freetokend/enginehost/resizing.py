"""Slots and KV pages changed together, at a safe point: first what shrinks, then what grows.

A growth that fails leaves both as they were. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from freetokend.core.cache_stats import CacheCounters
from freetokend.core.errors import FreetokenError, InvalidInputError, Reason
from freetokend.link.messages import CacheResized, ResizeOutcome


class ResizeReport(Protocol):
    """The truth after a resize. `outcome` is "done", "unchanged" or "deferred"."""

    @property
    def outcome(self) -> str: ...

    @property
    def slots_count(self) -> int: ...

    @property
    def committed_bytes(self) -> int: ...

    @property
    def moved_count(self) -> int: ...

    @property
    def dropped_count(self) -> int: ...

    @property
    def note(self) -> str: ...


class Slots(Protocol):
    """The slots of an expert cache."""

    def resize(self, slots_count: int) -> ResizeReport:
        """Have exactly so many slots. Raises FreetokenError: refused, or no memory."""
        ...

    def counters(self) -> CacheCounters:
        """State and statistics; from any thread."""
        ...


class Kv(Protocol):
    """KV pages, as `KvControl` has them."""

    @property
    def pages_count(self) -> int: ...

    @property
    def committed_bytes(self) -> int: ...

    def check_count(self, pages_count: int) -> None: ...

    def shrink(self, pages_count: int) -> str: ...

    def grow(self, pages_count: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is held of the device beside fixed costs."""

    slots_count: int = 0
    slots_bytes: int = 0
    kv_pages_count: int = 0
    kv_bytes: int = 0


def sizes_of(slots: Slots | None, kv: Kv | None) -> Sizes:
    """As they are now; from any thread."""
    sizes = Sizes()
    if slots is not None:
        now = slots.counters()
        sizes = replace(sizes, slots_count=now.slots_count, slots_bytes=now.committed_bytes)
    if kv is not None:
        sizes = replace(sizes, kv_pages_count=kv.pages_count, kv_bytes=kv.committed_bytes)
    return sizes


def answer(
    generation: int, outcome: ResizeOutcome, before: Sizes, after: Sizes, **more: object
) -> CacheResized:
    """An answer with its sizes; more: other fields of it."""
    return CacheResized(
        generation=generation,
        outcome=outcome,
        slots_count=after.slots_count,
        slots_before_count=before.slots_count,
        committed_bytes=after.slots_bytes,
        committed_before_bytes=before.slots_bytes,
        kv_pages_count=after.kv_pages_count,
        kv_pages_before_count=before.kv_pages_count,
        kv_bytes=after.kv_bytes,
        kv_before_bytes=before.kv_bytes,
        **more,  # type: ignore[arg-type]
    )


def resize(
    slots: Slots, kv: Kv | None, *, generation: int, slots_count: int, kv_pages_count: int | None
) -> CacheResized:
    """What was done, and what holds now. None for KV pages: leave them.

    Raises FreetokenError, with slots and pages as before: a number that there cannot be, or a
    growth for which there is no memory. The one exception says so in its message.
    """
    before = sizes_of(slots, kv)
    pages_count = before.kv_pages_count if kv_pages_count is None else kv_pages_count
    _check(slots, kv, slots_count, kv_pages_count)
    notes, moved_count, dropped_count = [], 0, 0
    if slots_count < before.slots_count:
        report = slots.resize(slots_count)
        moved_count, dropped_count = report.moved_count, report.dropped_count
        notes.append(report.note)
    if kv is not None and kv_pages_count is not None:
        # Also where there are as many: an earlier shrink may have wanted fewer.
        notes.append(kv.shrink(min(pages_count, before.kv_pages_count)))
    note = "; ".join(one.rstrip(".") for one in notes if one)
    if not note:
        _grow(slots, kv, before, slots_count, pages_count)
    after = sizes_of(slots, kv)
    outcome = ResizeOutcome.DONE
    if note:
        outcome = ResizeOutcome.DEFERRED
    elif after == before:
        outcome = ResizeOutcome.UNCHANGED
    return answer(
        generation,
        outcome,
        before,
        after,
        moved_count=moved_count,
        dropped_count=dropped_count,
        note=f"{note}. The rest is done when the command comes again." if note else "",
    )


def _check(slots: Slots, kv: Kv | None, slots_count: int, kv_pages_count: int | None) -> None:
    capacity = slots.counters().slots_capacity
    if not 0 <= slots_count <= capacity:
        raise InvalidInputError(
            f"the cache can have 0 to {capacity} slots, not {slots_count}", param="slots"
        )
    if kv_pages_count is None:
        return
    if kv is None:
        raise FreetokenError(
            "the KV pages of this engine are not resized", reason=Reason.DEVICE_UNUSABLE
        )
    kv.check_count(kv_pages_count)


def _grow(slots: Slots, kv: Kv | None, before: Sizes, slots_count: int, pages_count: int) -> None:
    """What is to grow; if it fails, back to before."""
    undo: list[Callable[[], object]] = []
    if slots_count < before.slots_count:
        undo.append(lambda: slots.resize(before.slots_count))
    if kv is not None and pages_count < before.kv_pages_count:
        undo.append(lambda: kv.grow(before.kv_pages_count))
    try:
        if slots_count >= before.slots_count:
            # Also where there are as many: a shrink may not have given all memory back.
            slots.resize(slots_count)
            undo.append(lambda: slots.resize(before.slots_count))
        if kv is not None and pages_count > before.kv_pages_count:
            kv.grow(pages_count)
    except Exception as error:
        for one in reversed(undo):
            with suppress(Exception):
                one()
        now = sizes_of(slots, kv)
        if (now.slots_count, now.kv_pages_count) == (before.slots_count, before.kv_pages_count):
            raise
        raise FreetokenError(
            f"{error} What had shrunk for it could not be had back: there are {now.slots_count} "
            f"of {before.slots_count} slots and {now.kv_pages_count} of {before.kv_pages_count} "
            "KV pages now.",
            reason=Reason.DEVICE_MEMORY,
        ) from error
