"""Recording which experts steps choose, while they are served. Torch-free.

A recording never holds up a step and never has a hole: when control takes the steps more slowly
than they come, or one of them has no room, it ends there and says so. It knows numbers of experts,
and neither tokens nor whose they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from freetokend.core.errors import FreetokenError, InternalError, Reason
from freetokend.core.logs import EventLogger
from freetokend.engine.work import StepWork
from freetokend.enginehost.routed_steps import routed_steps
from freetokend.ftw.index import FtwIndex
from freetokend.link.trace_messages import (
    RoutedRows,
    StartTrace,
    TraceCommand,
    TracedStep,
    TraceEnded,
    TraceMessage,
    TraceStarted,
)
from freetokend.native.routing_tap import Tapped
from freetokend.traces.trace import Phase, TraceShape

# Of one step; a sweep of 16,000 tokens through 48 layers with 8 experts each has room.
STEP_CAPACITY_IDS: Final = 8 << 20
# Of steps that wait for control to take them.
WAITING_BYTES: Final = 32 << 20


class Tap(Protocol):
    """See `native.routing_tap.RoutingTap`."""

    def start(self, capacity_ids: int) -> None: ...

    def stop(self) -> None: ...

    def clear(self) -> None: ...

    def take(self) -> Tapped: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTaps:
    """Where an engine's routing is seen; `sweeps` is None where it computes none."""

    steps: Tap
    sweeps: Tap | None = None

    @property
    def all(self) -> tuple[Tap, ...]:
        return (self.steps,) if self.sweeps is None else (self.steps, self.sweeps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What can be recorded: the taps, the sizes, and which weights, for people."""

    taps: RoutingTaps
    shape: TraceShape
    source: str


class TraceCommands:
    """Owner of the recording under way; there is at most one. Called by the loop's thread.

    Commands come between steps, perhaps between two layers of a sweep: a sweep that began before
    the recording is not part of it.
    """

    def __init__(
        self,
        traced: Traced | FreetokenError,
        *,
        send: Callable[[TraceMessage], None],
        waiting_bytes: Callable[[], int],
        log: EventLogger,
    ) -> None:
        """traced: an error where nothing can be recorded, which every recording is refused with.
        waiting_bytes: of the steps that were sent and control has not taken."""
        self._traced = None if isinstance(traced, FreetokenError) else traced
        self._refusal = traced if isinstance(traced, FreetokenError) else None
        self._send = send
        self._waiting_bytes = waiting_bytes
        self._log = log
        self._trace_id: str | None = None
        self._steps_count = 0
        self._sweep: StepWork | None = None

    def take(self, command: TraceCommand) -> None:
        """Begin or end; a beginning is answered."""
        if isinstance(command, StartTrace):
            self._send(self._started(command))
        elif command.trace_id == self._trace_id:
            self._finish("asked")

    def step_begins(self) -> None:
        """What a step that failed has left behind is not the next one's."""
        if self._trace_id is not None and self._traced is not None:
            self._traced.taps.steps.clear()

    def step_ended(self, work: StepWork) -> None:
        """Tell the step that was just computed."""
        if self._trace_id is not None and self._traced is not None:
            self._tell(work, self._traced.taps.steps)

    def sweep_begins(self, work: StepWork) -> None:
        """As `step_begins`, of a sweep."""
        if self._traced is not None and self._traced.taps.sweeps is not None:
            self._traced.taps.sweeps.clear()
            self._sweep = work if self._trace_id is not None else None

    def sweep_ended(self) -> None:
        """Tell the sweep whose last layer was just computed."""
        work, self._sweep = self._sweep, None
        tap = None if self._traced is None else self._traced.taps.sweeps
        if self._trace_id is not None and work is not None and tap is not None:
            self._tell(work, tap)

    def _started(self, command: StartTrace) -> TraceStarted:
        if self._refusal is not None:
            return self._refused(command, self._refusal.reason, self._refusal.message)
        if self._traced is None:
            raise InternalError("there is neither a tap nor a reason for that")
        if self._trace_id is not None:
            return self._refused(
                command,
                Reason.QUEUE_FULL,
                "another recording is under way; wait until it has ended",
            )
        try:
            for tap in self._traced.taps.all:
                tap.start(STEP_CAPACITY_IDS)
        except Exception as error:  # who cannot record still serves
            self._log.exception("trace-failed")
            return self._refused(command, Reason.INTERNAL, f"{type(error).__name__}: {error}")
        self._trace_id, self._steps_count, self._sweep = command.trace_id, 0, None
        self._log.info("trace-started", trace_id=command.trace_id)
        shape = self._traced.shape
        return TraceStarted(
            trace_id=command.trace_id,
            layers_count=shape.layers_count,
            experts_per_layer_count=shape.experts_per_layer,
            experts_per_token_count=shape.experts_per_token,
            source=self._traced.source,
        )

    def _refused(self, command: StartTrace, reason: Reason, message: str) -> TraceStarted:
        return TraceStarted(trace_id=command.trace_id, error_reason=reason, error_message=message)

    def _tell(self, work: StepWork, tap: Tap) -> None:
        try:
            self._tell_taken(work, tap.take())
        except Exception as error:  # a step that cannot be told was computed all the same
            self._log.exception("trace-failed")
            self._give_up(Reason.INTERNAL, f"a step could not be recorded: {error}")

    def _tell_taken(self, work: StepWork, tapped: Tapped) -> None:
        if self._traced is None or self._trace_id is None:
            return
        if tapped.overflowed:
            self._give_up(
                Reason.HOST_MEMORY,
                f"a step of {work.tokens_count} tokens chose more than {STEP_CAPACITY_IDS} "
                "experts; lower engine.step_tokens or engine.sweep_tokens",
            )
            return
        steps = routed_steps(work, tapped, self._traced.shape)
        message = TracedStep(
            trace_id=self._trace_id,
            parts=tuple(
                RoutedRows(
                    is_prefill=step.phase is Phase.PREFILL,
                    rows_count=step.tokens_count,
                    expert_ids=step.ids.astype(np.dtype("<u2")).tobytes(),
                )
                for step in steps
            ),
        )
        waiting_bytes = self._waiting_bytes()
        if waiting_bytes and waiting_bytes + message.ids_bytes > WAITING_BYTES:
            self._give_up(
                Reason.QUEUE_FULL,
                "the recording was taken more slowly than steps came, and "
                f"{waiting_bytes} bytes of it waited; record for a shorter time, or when the "
                "machine is less busy",
            )
            return
        self._steps_count += 1
        self._send(message)

    def _give_up(self, reason: Reason, message: str) -> None:
        if self._trace_id is not None:
            self._send(
                TraceEnded(trace_id=self._trace_id, error_reason=reason, error_message=message)
            )
            self._finish(message)

    def _finish(self, cause: str) -> None:
        if self._traced is not None:
            for tap in self._traced.taps.all:
                tap.stop()
        self._log.info(
            "trace-ended", trace_id=self._trace_id, steps_count=self._steps_count, cause=cause
        )
        self._trace_id, self._sweep = None, None


def no_experts() -> FreetokenError:
    """For a model without routed experts."""
    return FreetokenError(
        "the model has no routed experts, so that there is no choice to record",
        reason=Reason.MODEL_UNSUPPORTED,
    )


def trace_source(index: FtwIndex) -> str:
    """Which weights a trace is of: names of the model's kind and files, nothing of its use."""
    return f"{index.architecture} {index.identity[:16]}, experts {index.expert_bank.format}"
