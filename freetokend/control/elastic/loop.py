"""The loop: watch -> decide -> resize. Every tick is one call of the pure controller."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from freetokend.control.elastic.actuator import Actuator, EnginePort
from freetokend.control.elastic.engine_view import EngineView, as_card
from freetokend.control.elastic.events import CacheSizes, EventKind, EventRing
from freetokend.control.elastic.status import ElasticStatus
from freetokend.control.elastic.wants import Wants
from freetokend.control.probes import MachineReadings
from freetokend.core import logs
from freetokend.core.units import format_seconds
from freetokend.link.messages import CacheResized, EngineSnapshot, ResizeOutcome
from freetokend.policy.controller import (
    Command,
    DropIdlePools,
    DropSpill,
    EngineCommand,
    EngineFacts,
    Hold,
    LoadModel,
    Phase,
    Reason,
    ReasonCode,
    RefuseLongPrompts,
    RefuseWaiting,
    Resize,
    Sleep,
    Snapshot,
    State,
    UnloadModel,
    Wake,
    tick,
)
from freetokend.policy.controller.division import sizes_of

# Without news the loop looks this much later than the watch over the machine does.
_LATE_RATIO: Final = 2.0
# These say what a resize event says already.
_TOLD_BY_RESIZES: Final = frozenset({ReasonCode.IN_FLIGHT})
# What stands for less is on the way from one resize to the next.
_STANDING_S: Final = 1.0
# Answers that are kept for those who asked.
_KEPT_COUNT: Final = 64

_log = logs.logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeResult:
    """An answered resize. stall_s: no step was computed for so long; wait_s: it waited so long for
    the step before it; answer_s: since it was decided."""

    command: EngineCommand
    trigger: str
    outcome: ResizeOutcome
    before: CacheSizes
    after: CacheSizes
    stall_s: float
    wait_s: float
    answer_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commanded:
    """What held when a command was decided."""

    before: CacheSizes
    trigger: str
    at_s: float


class ResizeMeter(Protocol):
    """Counts resizes for the metrics."""

    def resized(self, result: ResizeResult) -> None:
        """One was answered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the loop reads and whom it tells."""

    snapshot: Callable[[], EngineSnapshot]
    machine: Callable[[], MachineReadings]
    port: EnginePort
    meter: ResizeMeter


class ElasticLoop:
    """Owns the controller's state, and the events it makes of decisions and answers.

    Belongs to the event loop; `poke` makes it look at once.
    """

    def __init__(
        self,
        around: Surroundings,
        wants: Wants,
        *,
        tick_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        self.wants = wants
        self.events = EventRing()
        self._around = around
        self._tick_s = tick_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._view = EngineView()
        self._actuator = Actuator(around.port, self._answered)
        self._state = State(revision=0)
        self._engine: EngineFacts | None = None
        self._commanded: dict[int, _Commanded] = {}
        self._results: dict[int, ResizeResult] = {}
        self._fault = ""
        self._told_code: ReasonCode | None = None
        self._standing_code: ReasonCode | None = None
        self._standing_since_s = 0.0
        self._news = asyncio.Event()
        self._ticked = asyncio.Event()
        self._ticked_s: float | None = None

    @property
    def state(self) -> State:
        """As of the last tick."""
        return self._state

    @property
    def engine(self) -> EngineFacts | None:
        """As of the last tick; None without an engine that has a cache."""
        return self._engine

    @property
    def is_asleep(self) -> bool:
        """Whether the engine holds nothing of the card."""
        return self._engine is not None and self._engine.phase is Phase.ASLEEP

    @property
    def has_no_cache(self) -> bool:
        """Whether an engine is there that has none, as opposed to one that is still to come."""
        engine = self._around.snapshot().description
        return engine is not None and engine.cache is None

    def result(self, generation: int) -> ResizeResult | None:
        """What became of a command of the last few, once it was answered."""
        return self._results.get(generation)

    def poke(self) -> None:
        """There is news: look at once."""
        self._news.set()

    async def next_tick(self) -> None:
        """Wait until the loop has looked again."""
        await self._ticked.wait()

    async def run(self) -> None:
        """Look until cancelled: when there is news, and late without any."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._tick_s * _LATE_RATIO):
                        await self._news.wait()
                self._news.clear()
                try:
                    self.tick()
                except Exception:  # a fault in a decision must not end the service
                    _log.exception("controller-failed")
                    await asyncio.sleep(self._tick_s)
        finally:
            await self._actuator.close()

    def tick(self) -> None:
        """One look, and what follows from it."""
        now_s, readings = self._clock(), self._around.machine()
        engine = self._view.facts(self._around.snapshot(), now_s)
        is_absent = bool(readings.gpu_absent_reason)
        card = as_card(readings.gpu, engine, gpu_is_absent=is_absent, now_s=now_s)
        # Without a driver nobody else takes of the memory that stands for a card's.
        follows = card is None or readings.gpu is not None
        total_bytes = None if card is None else card.total_bytes
        local = self._wall_clock()
        snapshot = Snapshot(
            now_s=now_s,
            spec=self.wants.spec(total_bytes, follows=follows),
            engine=engine,
            gpu=card,
            local_minute=local.tm_hour * 60 + local.tm_min,
            local_weekday=local.tm_wday,
        )
        before, self._engine = self._state, engine
        self._state, commands = tick(before, snapshot)
        self._ticked_s = now_s
        self._tell_fault(readings)
        for command in commands:
            self._carry_out(command, before)
        self._tell_standing(now_s)
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    def status(self) -> ElasticStatus:
        """As of the last tick."""
        state, engine = self._state, self._engine
        actual = None if engine is None else actual_sizes(engine)
        return ElasticStatus(
            ticked_s=self._ticked_s,
            enabled=self.wants.enabled,
            standing=state.standing,
            actual=actual,
            target=self._target(actual),
            budget_bytes=state.budget_bytes,
            required_free_bytes=state.required_free_bytes,
            generation=state.generation,
            in_flight=state.in_flight is not None,
            asleep=self.is_asleep,
            recent_resizes_count=len(state.recent),
            holds=self.wants.holds,
            events_counts=tuple((kind.value, count) for kind, count in self.events.counts.items()),
        )

    def leaves_what_is_held(self) -> bool:
        """Whether what others shall have of the card is free, as of the last tick."""
        engine, budget_bytes = self._engine, self._state.budget_bytes
        return (
            engine is not None
            and budget_bytes is not None
            and (engine.elastic_bytes <= budget_bytes)
        )

    def hold(self, size_bytes: int, reason: str, pids: frozenset[int]) -> Hold:
        """Keep so much of the card free until it is released."""
        held = self.wants.hold(size_bytes, reason, pids)
        self.events.add(EventKind.HOLD, held.hold_id, f"{size_bytes} bytes are held: {reason}")
        self.poke()
        return held

    def release(self, hold_id: str) -> None:
        """End a hold; idempotent."""
        held = self.wants.release(hold_id)
        if held is not None:
            text = f"{held.size_bytes} bytes are held no more: {held.reason}"
            self.events.add(EventKind.RELEASED, hold_id, text)
            self.poke()

    def _carry_out(self, command: Command, before: State) -> None:
        match command:
            case Resize() | Sleep() | Wake():
                self._command(command, is_new=command.generation > before.generation)
            case RefuseWaiting():
                self._refuse(command.reason)
            case DropSpill() | DropIdlePools() | RefuseLongPrompts() | UnloadModel() | LoadModel():
                self.events.add(
                    EventKind.HOST_MEMORY, command.reason.code.value, command.reason.text
                )
            case _ as never:
                assert_never(never)

    def _command(self, command: EngineCommand, *, is_new: bool) -> None:
        engine, in_flight = self._engine, self._state.in_flight
        assert engine is not None  # nothing is commanded without one
        if is_new:
            actual = actual_sizes(engine)
            trigger = "" if in_flight is None else in_flight.trigger.value
            self._commanded[command.generation] = _Commanded(
                before=actual, trigger=trigger, at_s=self._clock()
            )
            self.events.add(
                _kind(command),
                command.reason.code.value,
                command.reason.text,
                generation=command.generation,
                before=actual,
                after=self._target(actual),
            )
        self._view.sent(command.generation)
        self._actuator.carry_out(command)

    def _answered(self, command: EngineCommand, answer: CacheResized) -> None:
        self._view.heard(command, answer)
        self.poke()
        kept = self._commanded.get(command.generation)
        if kept is None:
            return
        former = self._results.get(command.generation)
        if former is not None and former.outcome is answer.outcome:
            return  # the same again: it was sent twice, or is still deferred
        after = CacheSizes(
            slots_count=answer.slots_count,
            kv_pages_count=answer.kv_pages_count,
            size_bytes=answer.committed_bytes + answer.kv_bytes,
        )
        result = ResizeResult(
            command=command,
            trigger=kept.trigger,
            outcome=answer.outcome,
            before=kept.before,
            after=after,
            stall_s=answer.stall_s,
            wait_s=answer.safe_point_wait_s,
            answer_s=self._clock() - kept.at_s,
            text=answer.sentence,
        )
        self._results[command.generation] = result
        for generation in [
            old for old in self._commanded if old <= command.generation - _KEPT_COUNT
        ]:
            del self._commanded[generation]
            self._results.pop(generation, None)
        self._around.meter.resized(result)
        self.events.add(
            EventKind.RESIZED,
            answer.outcome.value,
            result_text(result),
            generation=command.generation,
            before=kept.before,
            after=after,
        )

    def _target(self, actual: CacheSizes | None) -> CacheSizes | None:
        in_flight, engine = self._state.in_flight, self._engine
        if actual is None or in_flight is None or engine is None:
            return actual
        command = in_flight.command
        if isinstance(command, Sleep):
            return CacheSizes(slots_count=0, kv_pages_count=0, size_bytes=0)
        sizes = sizes_of(engine.shape, command.slots_count, command.kv_pages_count)
        return CacheSizes(
            slots_count=sizes.slots_count,
            kv_pages_count=sizes.kv_pages_count,
            size_bytes=sizes.size_bytes,
        )

    def _tell_standing(self, now_s: float) -> None:
        """Once for each reason that stood for a while, whatever the figures in its text do."""
        standing = self._state.standing
        if standing.code is not self._standing_code:
            self._standing_code, self._standing_since_s = standing.code, now_s
        lasted_s = now_s - self._standing_since_s
        if standing.code is self._told_code or lasted_s < _STANDING_S:
            return
        self._told_code = standing.code
        if standing.code not in _TOLD_BY_RESIZES:
            self.events.add(EventKind.REASON, standing.code.value, standing.text)

    def _refuse(self, reason: Reason) -> None:
        """Requests are told at once; the event is told once as long as the reason is the same."""
        self._around.port.refuse_waiting(reason.text)
        if self._told_code is not reason.code:
            self._told_code = reason.code
            self.events.add(EventKind.REFUSED, reason.code.value, reason.text)

    def _tell_fault(self, readings: MachineReadings) -> None:
        fault = next((fault.reason for fault in readings.faults if fault.probe == "gpu"), "")
        if fault == self._fault:
            return
        self._fault = fault
        text = f"The GPU cannot be read: {fault}" if fault else "The GPU can be read again."
        self.events.add(EventKind.PROBE, "failing" if fault else "works", text)


def actual_sizes(engine: EngineFacts) -> CacheSizes:
    """What there is."""
    return CacheSizes(
        slots_count=engine.slots_count,
        kv_pages_count=engine.kv_pages_count,
        size_bytes=engine.elastic_bytes,
    )


def result_text(result: ResizeResult) -> str:
    """A sentence for people."""
    before, after = result.before, result.after
    change = (
        f"{before.slots_count} slots and {before.kv_pages_count} KV pages became "
        f"{after.slots_count} and {after.kv_pages_count}"
    )
    if result.text:
        return f"{change} ({result.outcome.value}): {result.text}"
    return f"{change}; no step was computed for {format_seconds(result.stall_s)}."


def _kind(command: EngineCommand) -> EventKind:
    match command:
        case Resize():
            return EventKind.RESIZE
        case Sleep():
            return EventKind.SLEEP
        case Wake():
            return EventKind.WAKE
        case _ as never:
            assert_never(never)
