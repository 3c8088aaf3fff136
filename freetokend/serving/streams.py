"""Runs the choices of one HTTP request at once and merges what they say, in the order it comes.

Leaving the `ChoiceStreams` context cancels every sequence that still runs: that is how a client
that hangs up frees the engine, whether it was queued, in prefill or in decode.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

from freetokend.link.messages import EngineGateway
from freetokend.serving.admission import Admitted
from freetokend.serving.generation import TextUpdate, generate_text
from freetokend.serving.model_text import ModelText

# Updates that wait for a slow client; beyond it the sequence's task waits, the gateway coalesces.
_QUEUE_EVENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvent:
    """One update of one choice, or the error that ended it."""

    index: int
    update: TextUpdate | None = None
    error: Exception | None = None


class ChoiceStreams:
    """All sequences of a request. Owner of their tasks; async context manager."""

    def __init__(self, gateway: EngineGateway, text: ModelText, admitted: Admitted) -> None:
        self._gateway = gateway
        self._text = text
        self._admitted = admitted
        self._events: asyncio.Queue[ChoiceEvent] = asyncio.Queue(_QUEUE_EVENTS)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ChoiceStreams:
        self._tasks = [
            asyncio.create_task(self._run(index)) for index in range(len(self._admitted.requests))
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Not awaited: this may run inside a cancelled scope, where every await is cut short. The
        # tasks clean up after themselves.
        for task in self._tasks:
            task.cancel()

    @property
    def choices_count(self) -> int:
        """How many choices there are."""
        return len(self._admitted.requests)

    async def next_event(self, timeout_s: float | None) -> ChoiceEvent | None:
        """The next event of any choice; None when `timeout_s` passed without one."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return None

    async def _run(self, index: int) -> None:
        try:
            updates = generate_text(
                self._gateway, self._text, self._admitted.requests[index], self._admitted.stop
            )
            try:
                async for update in updates:
                    await self._events.put(ChoiceEvent(index=index, update=update))
            finally:
                await updates.aclose()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # told to the client by whoever reads the events
            await self._events.put(ChoiceEvent(index=index, error=error))
