"""The sweep that the loop computes a layer at a time, between two steps. Torch-free."""

from __future__ import annotations

from freetokend.core.errors import InternalError
from freetokend.core.logs import EventLogger
from freetokend.engine.work import StepEngine, Sweep, SweepEngine
from freetokend.enginehost.faults import MOST_FAILURES_IN_A_ROW, step_fault
from freetokend.enginehost.trace_control import TraceCommands
from freetokend.scheduler.scheduler import Scheduler


class SweepLane:
    """Owner of the engine's sweep; there is at most one. None begins on an engine without them."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: StepEngine,
        log: EventLogger,
        traces: TraceCommands,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine if isinstance(engine, SweepEngine) else None
        self._log = log
        self._traces = traces
        self._sweep: Sweep | None = None
        self._failures_in_a_row_count = 0

    @property
    def is_busy(self) -> bool:
        return self._sweep is not None

    def begin(self) -> None:
        """Begin a sweep when there is none and the prompts are worth one."""
        if self._engine is None or self._sweep is not None:
            return
        self._scheduler.set_sweep_from(self._engine.sweep_from_tokens)
        work = self._scheduler.plan_sweep()
        if work is None:
            return
        self._traces.sweep_begins(work)
        try:
            self._sweep = self._engine.begin_sweep(work)
        except Exception as error:
            self._fail(error)

    def advance(self) -> bool:
        """Compute the next layer; True when the sweep has ended with it, well or not.

        Raises InternalError when sweeps fail again and again.
        """
        if self._sweep is None:
            raise InternalError("a layer of no sweep was to be computed")
        try:
            outcome = self._sweep.advance()
        except Exception as error:
            self._sweep = None
            self._fail(error)
            return True
        if outcome is None:
            return False
        self._sweep = None
        self._scheduler.commit_sweep(outcome)
        self._traces.sweep_ended()
        self._failures_in_a_row_count = 0
        return True

    def abandon(self) -> None:
        """End the sweep, if there is one, before its end."""
        if self._sweep is not None:
            sweep, self._sweep = self._sweep, None
            sweep.abandon()
            self._scheduler.sweep_abandoned()

    def abandon_deserted(self) -> None:
        """A sweep whose requests have all ended meanwhile is not computed to its end."""
        if self._scheduler.sweep_is_deserted:
            self.abandon()

    def _fail(self, error: Exception) -> None:
        self._log.exception("sweep-failed")
        fault = step_fault(error)
        self._scheduler.sweep_failed(fault)
        if fault.memory:
            return  # the next one is smaller, and in the end there is none
        self._failures_in_a_row_count += 1
        count = self._failures_in_a_row_count
        if count >= MOST_FAILURES_IN_A_ROW:
            raise InternalError(
                f"{count} sweeps in a row failed, the last with: {error}"
            ) from error
