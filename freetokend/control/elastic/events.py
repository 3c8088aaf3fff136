"""What happened to the memory: the last events, for those who watch and for those who ask later."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from freetokend.core import logs

_KEPT_COUNT: Final = 1024

_log = logs.logger(__name__)


class EventKind(StrEnum):
    """What kind of thing happened. Stable: stream, journal and metrics show it."""

    REASON = "reason"  # why things stay as they are is another reason now
    RESIZE = "resize"  # decided, and sent to the engine
    RESIZED = "resized"  # what became of it
    SLEEP = "sleep"
    WAKE = "wake"
    REFUSED = "refused"  # a request could not wake the engine
    HOLD = "hold"
    RELEASED = "released"
    PROBE = "probe"
    HOST_MEMORY = "host-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Of the engine's memory on the card; size_bytes: of slots and KV together."""

    slots_count: int
    kv_pages_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticEvent:
    """One event. `event_id` rises by one, from 1 at the start of the daemon; `time_s` is Unix time.

    `code`: a reason code of the controller, or an outcome. `generation`: of the command it is
    about, 0 where it is about none.
    """

    event_id: int
    time_s: float
    kind: EventKind
    code: str
    text: str
    generation: int = 0
    before: CacheSizes | None = None
    after: CacheSizes | None = None


class EventRing:
    """Owns the events and their numbers; each is logged once. Belongs to the event loop."""

    def __init__(
        self, *, kept_count: int = _KEPT_COUNT, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._events: deque[ElasticEvent] = deque(maxlen=kept_count)
        self._counts: Counter[EventKind] = Counter(dict.fromkeys(EventKind, 0))
        self._newest_id = 0
        self._wall_clock = wall_clock
        self._change = asyncio.Event()

    @property
    def newest_id(self) -> int:
        """Of the last event; 0 before the first."""
        return self._newest_id

    @property
    def counts(self) -> Mapping[EventKind, int]:
        """How many there were of each kind since the start, also of those not kept any more."""
        return self._counts

    def add(
        self,
        kind: EventKind,
        code: str,
        text: str,
        *,
        generation: int = 0,
        before: CacheSizes | None = None,
        after: CacheSizes | None = None,
    ) -> ElasticEvent:
        """Keep it, log it, and wake those who watch."""
        self._newest_id += 1
        event = ElasticEvent(
            event_id=self._newest_id,
            time_s=self._wall_clock(),
            kind=kind,
            code=code,
            text=text,
            generation=generation,
            before=before,
            after=after,
        )
        self._events.append(event)
        self._counts[kind] += 1
        _log.info("memory-event", id=event.event_id, kind=kind.value, code=code, text=text)
        change, self._change = self._change, asyncio.Event()
        change.set()
        return event

    def after(self, event_id: int) -> tuple[ElasticEvent, ...]:
        """Those that are kept and newer, oldest first."""
        return tuple(event for event in self._events if event.event_id > event_id)

    async def changed(self, event_id: int) -> None:
        """Wait until there is a newer one."""
        while self._newest_id <= event_id:
            await self._change.wait()
