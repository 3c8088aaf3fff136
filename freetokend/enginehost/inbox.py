"""The engine's view of what control sends: one queue, also while the engine is still loading."""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Final, Protocol

from freetokend.link.messages import (
    ControlMessage,
    Disconnected,
    EngineMessage,
    Shutdown,
)

Incoming = ControlMessage | Disconnected

# A signal that arrives between the interpreter's last look and the wait itself does not end the
# wait, so the wait ends by itself now and then.
_SIGNAL_CHECK_S: Final = 0.25


class Link(Protocol):
    """What the engine host needs of its link (`EngineLinkClient` has it)."""

    def send(self, message: EngineMessage) -> None: ...

    def progress(self, count: int = 1) -> None: ...

    def set_busy(self, busy: bool) -> None: ...


class Inbox:
    """Messages in order. `stop` is set as soon as one of them ends the engine's work at once.

    `peek` is called from the loading code, so that a long load can be abandoned; it takes nothing
    away from the loop, which reads with `take`.
    """

    def __init__(self, source: queue.SimpleQueue[Incoming]) -> None:
        self._source = source
        self._seen: deque[Incoming] = deque()
        self.stop = threading.Event()

    def peek(self) -> None:
        """Look at what has arrived, without waiting."""
        while (message := self._next(wait=False)) is not None:
            self._seen.append(message)

    def take(self, *, wait: bool) -> Incoming | None:
        """The next message; None only when there is none and `wait` is false."""
        if self._seen:
            return self._seen.popleft()
        return self._next(wait=wait)

    def _next(self, *, wait: bool) -> Incoming | None:
        try:
            message = self._source.get(block=False)
        except queue.Empty:
            if not wait:
                return None
            message = self._wait()
        if isinstance(message, Disconnected) or (
            isinstance(message, Shutdown) and not message.drain
        ):
            self.stop.set()
        return message

    def _wait(self) -> Incoming:
        while True:
            try:
                return self._source.get(timeout=_SIGNAL_CHECK_S)
            except queue.Empty:
                continue
