"""The main loop: messages in, one scheduler step, one report out. Torch-free.

While a sweep is computed, each turn of the loop ends with one layer of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from freetokend.core.errors import InternalError, InvalidInputError, Reason, reaction
from freetokend.core.logs import EventLogger, set_log_level
from freetokend.engine.work import StepEngine, StepWork
from freetokend.enginehost.bandwidth_control import BandwidthCommands, BandwidthParts
from freetokend.enginehost.cache_control import CacheCommands
from freetokend.enginehost.faults import MOST_FAILURES_IN_A_ROW, step_fault
from freetokend.enginehost.inbox import Inbox, Incoming, Link
from freetokend.enginehost.split_control import NoSplit, SplitSteps
from freetokend.enginehost.sweeping import SweepLane
from freetokend.enginehost.trace_control import TraceCommands, no_experts
from freetokend.link.bandwidth_messages import MeasureBandwidth
from freetokend.link.messages import (
    Cancel,
    Disconnected,
    EngineSettings,
    EngineStats,
    GenerateRequest,
    ResizeCache,
    SetLogLevel,
    Shutdown,
    SleepEngine,
    StepReport,
    VerifyCache,
    WakeEngine,
)
from freetokend.link.trace_messages import StartTrace, StopTrace
from freetokend.policy.prefill_estimate import PrefillMeter
from freetokend.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCommands:
    """Who does what control asks for between steps; `traces` and `split` also hear of every step.
    `beside` is called between steps, and while there is nothing to do, until it returns False."""

    cache: CacheCommands
    traces: TraceCommands
    beside: Callable[[], bool] = lambda: False
    split: SplitSteps = field(default_factory=NoSplit)
    bandwidth: BandwidthCommands | None = None


class StepLoop:
    """Serves until told to stop; waits on the inbox when there is nothing to compute.

    `probe` computes one known token and raises if that fails. `gauges` adds what the loop does not
    know (pinning, expert executions) to the statistics; it may be called from other threads.
    `commands`, of the cache and of recordings, are done between steps; None: there is neither.
    """

    def __init__(
        self,
        *,
        inbox: Inbox,
        link: Link,
        scheduler: Scheduler,
        engine: StepEngine,
        probe: Callable[[], object],
        gauges: Callable[[EngineStats], EngineStats],
        log: EventLogger,
        commands: LoopCommands | None = None,
    ) -> None:
        self._inbox = inbox
        self._link = link
        self._scheduler = scheduler
        self._engine = engine
        self._probe = probe
        self._gauges = gauges
        self._log = log
        if commands is None:
            commands = LoopCommands(
                cache=CacheCommands(None, send=link.send, log=log),
                traces=TraceCommands(
                    no_experts(), send=link.send, waiting_bytes=lambda: 0, log=log
                ),
            )
        self._traces = commands.traces
        self._lane = SweepLane(scheduler, engine, log, self._traces)
        self._cache_commands = commands.cache
        self._beside = commands.beside
        self._split = commands.split
        self._bandwidth = commands.bandwidth or BandwidthCommands(
            BandwidthParts(parts={}), send=link.send, log=log
        )
        self._has_more_beside = True
        self._ending: Shutdown | Disconnected | None = None
        self._failures_in_a_row_count = 0
        self._reports_count = 0
        self._step_s = 0.0
        self._prefill = PrefillMeter()

    def run(self) -> int:
        """The exit code. Raises InternalError when the engine is found broken."""
        while True:
            self._take_messages()
            self._lane.abandon_deserted()
            match self._ending:
                case Disconnected():
                    self._log.warning("control-gone", cause=self._ending.cause)
                    self._lane.abandon()
                    return reaction(Reason.ENGINE_UNAVAILABLE).exit_code
                case Shutdown(drain=False):
                    self._lane.abandon()
                    self._scheduler.abandon(Reason.DRAINING, "The service is stopping.")
                    self._report()
                    return 0
                case Shutdown() if not self._scheduler.has_work:
                    self._report()
                    return 0
                case Shutdown() if self._cache_commands.is_asleep:
                    # Nobody will wake an engine that is to end.
                    self._scheduler.abandon(Reason.DRAINING, "The service is stopping.")
                    self._report()
                    return 0
                case _ if self._cache_commands.is_asleep:
                    self._link.set_busy(False)
                    if self._scheduler.has_updates:
                        self._report()
                case _:
                    if self._scheduler.has_work:
                        self._link.set_busy(True)
                    self._look_at_prefill()
                    self._lane.begin()
                    self._step()
                    if self._lane.is_busy:
                        self._sweep_layer()
                    self._look_at_prefill()

    def stats(self) -> EngineStats:
        """The present statistics; from any thread."""
        counts = self._scheduler.counts()
        return self._gauges(
            EngineStats(
                running_count=counts.running_count,
                waiting_count=counts.waiting_count,
                kv_pages_used_count=counts.pages_used_count,
                kv_pages_total_count=counts.pages_total_count,
                steps_count=counts.steps_count,
                prefill_tokens_count=counts.prefill_tokens_count,
                decode_tokens_count=counts.decode_tokens_count,
                step_s=self._step_s,
                preemptions_count=counts.preemptions_count,
                sweeps_count=counts.sweeps_count,
                prefill_pending_tokens_count=counts.pending_prompt_tokens,
                prefill_tokens_per_s=self._prefill.tokens_per_s,
                servable_context_tokens=self._scheduler.servable_context_tokens,
                longest_context_tokens=counts.longest_context_tokens,
                waiting_prompt_tokens=counts.waiting_prompt_tokens,
                asleep=self._cache_commands.is_asleep,
                generation=self._cache_commands.newest_generation,
            )
        )

    def _look_at_prefill(self) -> None:
        counts = self._scheduler.counts()
        self._prefill.look(
            time.monotonic(), counts.prefill_tokens_count, counts.pending_prompt_tokens
        )

    def _take_messages(self) -> None:
        """All that has arrived; waits for one when there is nothing else to do."""
        asleep = self._cache_commands.is_asleep
        wait = self._ending is None and (asleep or not self._scheduler.has_work)
        self._has_more_beside = self._has_more_beside and (asleep or self._beside())
        while True:
            at_rest = asleep or not (self._has_more_beside or self._bandwidth.is_busy)
            message = self._inbox.take(wait=wait and at_rest)
            if message is not None:
                self._take(message)
                # What the message led to (a refusal, a step) must not wait for the next message.
                wait = False
            elif wait:
                self._has_more_beside = self._has_more_beside and self._beside()
                self._bandwidth.slice()
            else:
                break
        self._cache_commands.run()

    def _take(self, message: Incoming) -> None:
        match message:
            case GenerateRequest():
                self._bandwidth.interrupt("a request came")
                self._scheduler.submit(message)
            case Cancel():
                self._scheduler.cancel(message.request_id)
            case Shutdown():
                self._bandwidth.interrupt("the service is stopping")
                self._scheduler.drain()
                self._ending = message
            case Disconnected():
                self._ending = message
            case SetLogLevel():
                self._set_log_level(message.level)
            case ResizeCache() | SleepEngine() | WakeEngine() | VerifyCache():
                self._bandwidth.interrupt("the cache is resized or compared")
                self._cache_commands.take(message)
            case MeasureBandwidth():
                idle = not (self._scheduler.has_work or self._cache_commands.is_asleep)
                self._bandwidth.take(message, idle=idle and self._ending is None)
            case StartTrace() | StopTrace():
                self._traces.take(message)
            case EngineSettings():
                self._log.warning("settings-ignored", model=message.model)
            case _:
                assert_never(message)

    def _set_log_level(self, level: str) -> None:
        try:
            set_log_level(level)
        except InvalidInputError as error:
            self._log.warning("log-level-refused", cause=error.message)

    def _step(self) -> None:
        started_s = time.monotonic()
        work = self._scheduler.plan()
        if work is None:
            if self._lane.is_busy and not self._scheduler.has_updates:
                return  # nobody decodes, and there is nothing to tell
            if self._scheduler.has_work and not self._lane.is_busy:
                raise InternalError("the scheduler has work but plans no step")
        else:
            self._compute(work)
            self._step_s = time.monotonic() - started_s
            self._link.progress()
        self._link.set_busy(self._scheduler.has_work)
        self._report()

    def _sweep_layer(self) -> None:
        ended = self._lane.advance()
        self._link.progress()
        if ended:
            self._link.set_busy(self._scheduler.has_work)
            self._report()

    def _compute(self, work: StepWork) -> None:
        self._traces.step_begins()
        self._split.step_begins()
        try:
            outcome = self._engine.run(work)
        except Exception as error:  # one request's fault must not end the others
            self._log.exception(
                "step-failed", sequences_count=len(work.sequences), tokens_count=work.tokens_count
            )
            if self._scheduler.step_failed(step_fault(error)):
                self._check_health(error)
            return
        finally:
            self._split.step_ended()
        self._scheduler.commit(outcome)
        self._traces.step_ended(work)
        self._failures_in_a_row_count = 0

    def _check_health(self, cause: Exception) -> None:
        """After a request failed alone: is it the request, or the engine?"""
        self._failures_in_a_row_count += 1
        count = self._failures_in_a_row_count
        if count >= MOST_FAILURES_IN_A_ROW:
            raise InternalError(
                f"{count} requests in a row failed, the last with: {cause}"
            ) from cause
        try:
            self._probe()
        except Exception as error:
            raise InternalError(
                f"a request failed ({cause}) and so does a single known token ({error})"
            ) from error

    def _report(self) -> None:
        """One report per step, and one for answers that needed no step."""
        self._reports_count += 1
        self._link.send(
            StepReport(
                step_index=self._reports_count,
                outputs=self._scheduler.take_updates(),
                stats=self.stats(),
            )
        )
