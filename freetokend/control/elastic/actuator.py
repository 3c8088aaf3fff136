"""Carries commands to the engine and brings its answers back; it decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, assert_never

from freetokend.core import logs
from freetokend.core.errors import FreetokenError
from freetokend.link.messages import (
    CacheResized,
    ResizeCache,
    SizeCommand,
    SleepEngine,
    WakeEngine,
)
from freetokend.policy.controller import EngineCommand, Resize, Sleep, Wake

_log = logs.logger(__name__)


class EnginePort(Protocol):
    """The daemon's way to the engine's memory."""

    async def resize_engine(self, command: SizeCommand) -> CacheResized:
        """Send it and wait for the answer, whatever that says. Raises `UnavailableError` when
        none comes."""
        ...

    def refuse_waiting(self, message: str) -> int:
        """Answer every request of an engine that sleeps: not now, and why; returns how many."""
        ...


class Actuator:
    """Sends each command at once, as often as it is told to, and waits for all answers beside.

    `answered` is called with the command and its answer; a command without one is forgotten, for
    the controller sends it again. Belongs to the event loop.
    """

    def __init__(
        self, port: EnginePort, answered: Callable[[EngineCommand, CacheResized], None]
    ) -> None:
        self._port = port
        self._answered = answered
        self._waiting: set[asyncio.Task[None]] = set()

    def carry_out(self, command: EngineCommand) -> None:
        """Send it; returns at once."""
        task = asyncio.create_task(self._send(command), name=f"resize-{command.generation}")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Wait for no answer any more."""
        waiting = set(self._waiting)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)

    async def _send(self, command: EngineCommand) -> None:
        try:
            answer = await self._port.resize_engine(_message(command))
        except FreetokenError as error:
            _log.debug("command-unanswered", generation=command.generation, cause=error.message)
            return
        self._answered(command, answer)


def _message(command: EngineCommand) -> SizeCommand:
    match command:
        case Resize():
            return ResizeCache(
                generation=command.generation,
                slots_count=command.slots_count,
                kv_pages_count=command.kv_pages_count,
                urgent=command.urgent,
            )
        case Sleep():
            return SleepEngine(generation=command.generation)
        case Wake():
            return WakeEngine(
                generation=command.generation,
                slots_count=command.slots_count,
                kv_pages_count=command.kv_pages_count,
            )
        case _ as never:
            assert_never(never)
