"""The engine's outgoing messages: bounded by coalescing, so that the engine never blocks on it."""

from __future__ import annotations

import threading
from collections import deque

from freetokend.link.merging import merge_reports
from freetokend.link.messages import (
    EngineMessage,
    Heartbeat,
    LoadProgress,
    StepReport,
)
from freetokend.link.trace_messages import (
    TracedStep,
)


class Outbox:
    """Messages waiting for the wire, in order; thread-safe, one consumer.

    At most one `StepReport`, one `LoadProgress` and one `Heartbeat` wait at a time: a newer report
    is merged into the waiting one (nothing is lost), a newer progress or heartbeat replaces it.
    The other kinds are sent once in an engine's life, or once per command of control. So its size
    is bounded by the tokens of the running requests, however slowly control reads. Only recorded
    steps pile up: who sends them asks `traced_bytes` first and gives up when it grows.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[EngineMessage] = deque()
        self._traced_bytes = 0
        self._closed = False

    def put(self, message: EngineMessage) -> None:
        """Add or merge; never blocks for the wire. After `close` the message is dropped."""
        with self._changed:
            if self._closed:
                return
            if not self._merge(message):
                self._waiting.append(message)
            if isinstance(message, TracedStep):
                self._traced_bytes += message.ids_bytes
            self._changed.notify_all()

    def _merge(self, message: EngineMessage) -> bool:
        if not isinstance(message, StepReport | LoadProgress | Heartbeat):
            return False
        for index, older in enumerate(self._waiting):
            if isinstance(message, StepReport) and isinstance(older, StepReport):
                self._waiting[index] = merge_reports(older, message)
                return True
            if type(older) is type(message):
                self._waiting[index] = message
                return True
        return False

    def take(self) -> EngineMessage | None:
        """The next message; waits for one. None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            message = self._waiting.popleft() if self._waiting else None
            if isinstance(message, TracedStep):
                self._traced_bytes -= message.ids_bytes
            self._changed.notify_all()
            return message

    def close(self) -> None:
        """No more messages; what waits is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def waiting_count(self) -> int:
        """How many messages wait now."""
        with self._changed:
            return len(self._waiting)

    def traced_bytes(self) -> int:
        """What the recorded steps take that wait now."""
        with self._changed:
            return self._traced_bytes
