"""Recordings of the choice of experts, seen from control: one at a time, with a bounded queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from freetokend.core.errors import FreetokenError, Reason, UnavailableError
from freetokend.link.trace_messages import (
    StartTrace,
    StopTrace,
    TraceCommand,
    TracedStep,
    TraceEnded,
    TraceMessage,
    TraceStarted,
)

# A decode step of a large model takes some KiB, a long prompt some MiB: minutes of a stuck reader.
QUEUE_BYTES: Final = 64 << 20

_Send = Callable[[TraceCommand], None]


class TraceRecording:
    """One recording: `started` tells the sizes, `next` the steps, `close` ends it.

    Owned by the event loop. Never holds up the link: when the reader lets more than `queue_bytes`
    wait, the recording ends with what was recorded so far.
    """

    def __init__(self, trace_id: str, send: _Send, queue_bytes: int) -> None:
        self.trace_id: Final = trace_id
        self.started: asyncio.Future[TraceStarted] = asyncio.get_running_loop().create_future()
        self.closed = False
        self._send = send
        self._queue_bytes = queue_bytes
        self._steps: deque[TracedStep] = deque()
        self._waiting_bytes = 0
        self._ended: TraceEnded | None = None
        self._wake = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Nothing more is recorded; steps may still wait for the reader."""
        return self.closed or self._ended is not None

    async def next(self) -> TracedStep | TraceEnded:
        """The next step; after the last one, why there are no more."""
        while not self._steps:
            if self._ended is not None:
                return self._ended
            self._wake.clear()
            await self._wake.wait()
        step = self._steps.popleft()
        self._waiting_bytes -= step.ids_bytes
        return step

    def close(self) -> None:
        """The reader has what it wants, or has gone: the engine records no more. Idempotent."""
        if not self.ended:
            self._send(StopTrace(trace_id=self.trace_id))
        self.closed = True

    def take(self, message: TraceMessage) -> None:
        """What the engine tells of this recording."""
        if self.ended:
            return
        match message:
            case TraceStarted():
                if not self.started.done():
                    self.started.set_result(message)
            case TracedStep():
                self._add(message)
            case TraceEnded():
                self._end(message)

    def fail(self, reason: Reason, cause: str) -> None:
        """The engine will tell nothing more."""
        if self.ended:
            return
        if not self.started.done():
            self.started.set_exception(FreetokenError(cause, reason=reason))
        self._end(TraceEnded(trace_id=self.trace_id, error_reason=reason, error_message=cause))

    def _add(self, step: TracedStep) -> None:
        if self._steps and self._waiting_bytes + step.ids_bytes > self._queue_bytes:
            self._send(StopTrace(trace_id=self.trace_id))
            self._end(
                TraceEnded(
                    trace_id=self.trace_id,
                    error_reason=Reason.QUEUE_FULL,
                    error_message="the recording was read more slowly than steps came, and "
                    f"{self._waiting_bytes} bytes of it waited; record to a faster disk, or for a "
                    "shorter time",
                )
            )
            return
        self._steps.append(step)
        self._waiting_bytes += step.ids_bytes
        self._wake.set()

    def _end(self, ended: TraceEnded) -> None:
        self._ended = ended
        self._wake.set()


class TraceRequests:
    """Owner of the recording there is; ids rise over the engine's restarts too."""

    def __init__(self, queue_bytes: int = QUEUE_BYTES) -> None:
        self._queue_bytes = queue_bytes
        self._newest = 0
        self._current: TraceRecording | None = None

    async def start(self, send: _Send, timeout_s: float) -> tuple[TraceStarted, TraceRecording]:
        """Begin to record. Raises `UnavailableError` (another one is under way, or no answer) and
        the engine's refusal."""
        if self._current is not None and not self._current.ended:
            raise UnavailableError(
                "the choice of experts is being recorded already, and one recording at a time is "
                "what there is; wait until it has ended, or end it (Ctrl-C in its "
                "`freetokenctl trace record`)",
                reason=Reason.QUEUE_FULL,
            )
        self._newest += 1
        recording = TraceRecording(f"trace-{self._newest}", send, self._queue_bytes)
        self._current = recording
        try:
            send(StartTrace(trace_id=recording.trace_id))
            async with asyncio.timeout(timeout_s):
                started = await recording.started
            if started.error_reason is not None:
                raise FreetokenError(started.error_message, reason=started.error_reason)
        except TimeoutError:
            recording.close()
            raise UnavailableError(
                f"the engine did not answer within {timeout_s:g} s: it may be in a long step; see "
                "`freetokenctl status` and try again"
            ) from None
        except BaseException:
            recording.close()
            raise
        return started, recording

    def told(self, message: TraceMessage) -> None:
        """What the engine tells; of recordings that are over it is dropped."""
        if self._current is not None and self._current.trace_id == message.trace_id:
            self._current.take(message)

    def fail(self, reason: Reason, cause: str) -> None:
        """The engine will tell nothing more."""
        if self._current is not None:
            self._current.fail(reason, cause)
