"""The engine as the controller sees it: what it said of itself, made into `EngineFacts`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from freetokend.core.cache_stats import CacheCounters
from freetokend.link.messages import (
    CacheResized,
    EngineSnapshot,
    EngineState,
    EngineStats,
    ResizeOutcome,
)
from freetokend.policy.controller import (
    Answer,
    EngineCommand,
    EngineFacts,
    Outcome,
    Phase,
    SessionNeeds,
    Sleep,
    Wake,
)
from freetokend.policy.controller.budget import fixed_bytes
from freetokend.policy.controller.division import sizes_of
from freetokend.policy.readings import GpuReading
from freetokend.policy.vram_budget import VramFacts

HOST_DEVICE: Final = "host"
_SERVING: Final = frozenset({EngineState.READY, EngineState.DRAINING})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What the engine holds of the card."""

    slots_count: int
    slots_bytes: int
    kv_pages_count: int
    kv_bytes: int
    asleep: bool


class EngineView:
    """Owns what was heard of the present engine's memory since its last heartbeat.

    A heartbeat that was on its way when a command was answered tells of the time before it, so the
    answer outlives one heartbeat. Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._answered: _Held | None = None
        self._last: Answer | None = None
        self._held: _Held | None = None
        self._pid: int | None = None
        self._counters: CacheCounters | None = None
        self._heartbeats_count = 0
        self._sent_generation = 0
        self._idle_since_s: float | None = None

    def sent(self, generation: int) -> None:
        """A command was given to the engine."""
        self._sent_generation = max(self._sent_generation, generation)

    def heard(self, command: EngineCommand, answer: CacheResized) -> None:
        """The engine has answered a command."""
        self._last = Answer(
            generation=answer.generation,
            outcome=Outcome(answer.outcome.value),
            text=answer.sentence,
        )
        if answer.outcome is ResizeOutcome.SUPERSEDED:
            return
        asleep = self._held is not None and self._held.asleep
        if answer.outcome in (ResizeOutcome.DONE, ResizeOutcome.UNCHANGED):
            asleep = isinstance(command, Sleep) or (asleep and not isinstance(command, Wake))
        self._answered = _Held(
            slots_count=answer.slots_count,
            slots_bytes=answer.committed_bytes,
            kv_pages_count=answer.kv_pages_count,
            kv_bytes=answer.kv_bytes,
            asleep=asleep,
        )
        self._heartbeats_count = 0

    def facts(self, snapshot: EngineSnapshot, now_s: float) -> EngineFacts | None:
        """None without an engine that is ready and has a cache, or before it told its sizes."""
        if snapshot.pid != self._pid:
            self._pid = snapshot.pid
            self._answered = self._last = self._held = self._counters = None
            self._idle_since_s = None
            self._sent_generation = 0
        engine, stats, counters = snapshot.description, snapshot.stats, snapshot.cache
        if engine is None or engine.memory is None or snapshot.state not in _SERVING:
            return None
        if counters is None:
            return None
        held = self._held = self._now(counters, stats)
        shape = engine.memory
        # An engine that cannot resize its KV keeps all pages, as if they were in use.
        most_pages = stats.kv_pages_capacity_count or held.kv_pages_count
        fixed_pages = not stats.kv_pages_capacity_count
        running_count, waiting_count = _at_work(snapshot)
        return EngineFacts(
            boot_count=snapshot.restarts_count + 1,
            phase=Phase.ASLEEP if held.asleep else Phase.AWAKE,
            shape=shape,
            slots_count=held.slots_count,
            slots_bytes=held.slots_bytes,
            slots_capacity_count=counters.slots_capacity,
            kv_pages_count=held.kv_pages_count,
            kv_pages_used_count=most_pages if fixed_pages else stats.kv_pages_used_count,
            kv_pages_capacity_count=most_pages,
            kv_bytes=held.kv_bytes,
            fixed_held_bytes=_fixed_held_bytes(held, stats, shape),
            newest_generation=max(self._sent_generation, stats.generation),
            answer=self._last,
            running_count=running_count,
            waiting_count=waiting_count,
            idle_s=self._idle_s(running_count + waiting_count, now_s),
            needs=SessionNeeds(
                longest_context_tokens=stats.longest_context_tokens,
                waiting_prompt_tokens=stats.waiting_prompt_tokens,
            ),
        )

    def _now(self, counters: CacheCounters, stats: EngineStats) -> _Held:
        if counters is not self._counters:
            self._counters = counters
            self._heartbeats_count += 1
        if self._answered is not None and self._heartbeats_count <= 1:
            return self._answered
        return _Held(
            slots_count=counters.slots_count,
            slots_bytes=counters.committed_bytes,
            kv_pages_count=stats.kv_pages_total_count,
            kv_bytes=stats.kv_bytes,
            asleep=stats.asleep,
        )

    def _idle_s(self, at_work_count: int, now_s: float) -> float:
        if at_work_count:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return max(0.0, now_s - self._idle_since_s)


def _fixed_held_bytes(held: _Held, stats: EngineStats, shape: VramFacts) -> int:
    """Beside slots and KV. On a GPU an engine that sleeps keeps its dense weights and graphs."""
    if not held.asleep:
        return fixed_bytes(shape)
    # Figures of the time before it fell asleep say nothing of now.
    return stats.fixed_held_bytes if stats.asleep else 0


def _at_work(snapshot: EngineSnapshot) -> tuple[int, int]:
    """Requests that run and that wait; one on its way to the engine waits."""
    stats = snapshot.stats
    if snapshot.busy and not stats.running_count and not stats.waiting_count:
        return 0, 1
    return stats.running_count, stats.waiting_count


def as_card(
    reading: GpuReading | None, engine: EngineFacts | None, *, gpu_is_absent: bool, now_s: float
) -> GpuReading | None:
    """The card of an engine whose slots are ordinary memory, which no driver sees.

    With a driver, what it says is free is free beside what the engine holds. Without one nobody
    else takes of that memory: it has room for all that the engine can hold.
    """
    if engine is None or not engine.shape.on_host:
        return reading
    if reading is not None:
        if reading.free_bytes is None:
            return reading
        return replace(reading, free_bytes=max(reading.free_bytes - engine.elastic_bytes, 0))
    if not gpu_is_absent:
        return None
    shape = engine.shape
    total_bytes = sizes_of(
        shape, engine.slots_capacity_count, engine.kv_pages_capacity_count
    ).size_bytes
    return GpuReading(
        uuid=HOST_DEVICE,
        name="ordinary memory",
        taken_s=now_s,
        total_bytes=total_bytes,
        free_bytes=max(total_bytes - engine.elastic_bytes, 0),
        processes=(),
    )
