"""The scripted engine's expert cache: numbers that move as a script says, and no memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Final, assert_never

from freetokend.core.cache_stats import CacheCounters, LayerCounters
from freetokend.core.errors import Reason
from freetokend.link.messages import (
    CacheDescription,
    CacheResized,
    CacheVerified,
    EngineStats,
    LayerRun,
    ResizeCache,
    ResizeOutcome,
    SizeCommand,
    SleepEngine,
    SlotDifference,
    VerifyCache,
    WakeEngine,
)
from freetokend.policy.backend_choice import LayerBranch
from freetokend.scripted.script import ScriptedCacheSetup

_ABSENT: Final = "this engine has no expert cache: backend scripted"


class ScriptedCache:
    """Owner of the counters; `counters` is called by the heartbeat's thread, the rest is not."""

    def __init__(self, setup: ScriptedCacheSetup) -> None:
        self._setup = setup
        self._newest_generation = 0
        self._done: CacheResized | None = None
        self._asleep = False
        self._kv_pages_count = setup.kv_pages_count
        self._lock = threading.Lock()
        self._counters = CacheCounters(
            slots_count=setup.slots_count,
            slots_capacity=setup.slots_capacity,
            resident_count=0,
            slot_bytes=setup.slot_bytes,
            committed_bytes=setup.slots_count * setup.slot_bytes,
            generation=1,
            layers=(LayerCounters(),) * setup.layers_count,
            fill_counts=((0, 1, 1, 1, 2), (0, 1, 1, 2, 2)),
        )

    def description(self) -> CacheDescription:
        """As `Ready` tells it."""
        return CacheDescription(
            slots_count=self._setup.slots_count,
            slots_capacity=self._setup.slots_capacity,
            layer_runs=(
                LayerRun(
                    layers_count=self._setup.layers_count,
                    branch=LayerBranch.SPLIT,
                    reason="a script was given",
                ),
            ),
            fill_rate_source="a script was given",
        )

    def counters(self) -> CacheCounters:
        """The present numbers."""
        with self._lock:
            return self._counters

    def step(self) -> None:
        """What one step does."""
        setup = self._setup
        with self._lock:
            old = self._counters
            filled = setup.fills_count * setup.layers_count
            resident = min(old.slots_count, old.resident_count + filled)
            self._counters = replace(
                old,
                resident_count=resident,
                layers=tuple(self._stepped(layer) for layer in old.layers),
                fills_count=old.fills_count + filled,
                fill_bytes=old.fill_bytes + filled * setup.slot_bytes,
                fill_busy_s=old.fill_busy_s + 0.001 * filled,
            )

    def _stepped(self, layer: LayerCounters) -> LayerCounters:
        setup = self._setup
        return replace(
            layer,
            hits_count=layer.hits_count + setup.hits_count,
            misses_count=layer.misses_count + setup.fills_count + setup.cpu_count,
            fills_count=layer.fills_count + setup.fills_count,
            cpu_count=layer.cpu_count + setup.cpu_count,
        )

    @property
    def is_asleep(self) -> bool:
        """Nothing is computed while it is."""
        return self._asleep

    def stats(self, stats: EngineStats) -> EngineStats:
        """With what is known here."""
        return replace(
            stats,
            kv_pages_total_count=self._kv_pages_count,
            kv_pages_used_count=min(self._setup.kv_used_count, self._kv_pages_count),
            kv_pages_capacity_count=self._setup.kv_pages_capacity,
            kv_bytes=self._kv_pages_count * self._setup.kv_page_bytes,
            asleep=self._asleep,
            generation=self._newest_generation,
        )

    def carry_out(self, command: SizeCommand) -> CacheResized:
        """As an engine answers it: a generation is done once, an older one not at all."""
        if self._done is not None and self._done.generation == command.generation:
            return self._done
        stale = command.generation < self._newest_generation
        self._newest_generation = max(self._newest_generation, command.generation)
        before = self._now(command.generation)
        if stale:
            return replace(before, outcome=ResizeOutcome.SUPERSEDED)
        problem = self._problem(command)
        if problem:
            return replace(
                before,
                outcome=ResizeOutcome.FAILED,
                error_reason=Reason.INVALID_REQUEST,
                error_message=problem,
            )
        was_asleep = self._asleep
        dropped_count, note = self._change(command)
        after = self._now(command.generation)
        changed = after != before or self._asleep != was_asleep
        outcome = ResizeOutcome.DONE if changed else ResizeOutcome.UNCHANGED
        answer = replace(
            after,
            outcome=ResizeOutcome.DEFERRED if note else outcome,
            slots_before_count=before.slots_count,
            committed_before_bytes=before.committed_bytes,
            kv_pages_before_count=before.kv_pages_count,
            kv_before_bytes=before.kv_bytes,
            dropped_count=dropped_count,
            note=note,
        )
        if not note:
            self._done = answer
        return answer

    def _now(self, generation: int) -> CacheResized:
        """The sizes, as an answer that says nothing else yet."""
        now = self.counters()
        kv_bytes = self._kv_pages_count * self._setup.kv_page_bytes
        return CacheResized(
            generation=generation,
            outcome=ResizeOutcome.DONE,
            slots_count=now.slots_count,
            slots_before_count=now.slots_count,
            committed_bytes=now.committed_bytes,
            committed_before_bytes=now.committed_bytes,
            kv_pages_count=self._kv_pages_count,
            kv_pages_before_count=self._kv_pages_count,
            kv_bytes=kv_bytes,
            kv_before_bytes=kv_bytes,
        )

    def _problem(self, command: SizeCommand) -> str:
        if isinstance(command, SleepEngine):
            return ""
        if self._setup.resize_refusal:
            return self._setup.resize_refusal
        if isinstance(command, ResizeCache) and self._asleep:
            return "the engine is asleep and has nothing to resize; wake it first"
        capacity = self._setup.slots_capacity
        if command.slots_count > capacity:
            return f"the cache can have 0 to {capacity} slots, not {command.slots_count}"
        pages, pages_capacity = command.kv_pages_count, self._setup.kv_pages_capacity
        if pages is not None and not 1 <= pages <= pages_capacity:
            return f"there can be 1 to {pages_capacity} KV pages, not {pages}"
        return ""

    def _change(self, command: SizeCommand) -> tuple[int, str]:
        """Experts that lose their slot, and why it is not all done."""
        match command:
            case SleepEngine():
                self._asleep, self._kv_pages_count = True, 0
                return self._set_slots(0), ""
            case WakeEngine() if not self._asleep:
                return 0, ""
            case WakeEngine():
                self._asleep, self._kv_pages_count = False, command.kv_pages_count
                return self._set_slots(command.slots_count), ""
            case ResizeCache():
                before = self.counters().slots_count
                pages = self._kv_pages_count
                wanted = pages if command.kv_pages_count is None else command.kv_pages_count
                used = min(self._setup.kv_used_count, pages)
                if wanted < used:
                    self._kv_pages_count = used
                    dropped = self._set_slots(min(command.slots_count, before))
                    return dropped, f"{used} KV pages are in use, and {wanted} are wanted"
                self._kv_pages_count = wanted
                return self._set_slots(command.slots_count), ""
            case _:
                assert_never(command)

    def _set_slots(self, slots_count: int) -> int:
        with self._lock:
            old = self._counters
            resident = min(old.resident_count, slots_count)
            self._counters = replace(
                old,
                slots_count=slots_count,
                resident_count=resident,
                committed_bytes=slots_count * old.slot_bytes,
                generation=old.generation + (slots_count != old.slots_count),
            )
            return old.resident_count - resident

    def verify(self, command: VerifyCache) -> CacheVerified:
        """The damage of the script."""
        now = self.counters()
        return CacheVerified(
            request_id=command.request_id,
            compared_count=now.resident_count,
            compared_bytes=now.resident_count * now.slot_bytes,
            differences=tuple(
                SlotDifference(
                    layer_index=layer, expert_index=expert, slot_index=slot, offset_bytes=offset
                )
                for layer, expert, slot, offset in self._setup.damaged
            ),
        )


def carried_out(cache: ScriptedCache | None, command: SizeCommand) -> CacheResized:
    """The answer, also of an engine without a cache."""
    if cache is not None:
        return cache.carry_out(command)
    return CacheResized(
        generation=command.generation,
        outcome=ResizeOutcome.FAILED,
        error_reason=Reason.DEVICE_UNUSABLE,
        error_message=_ABSENT,
    )


def verified(cache: ScriptedCache | None, command: VerifyCache) -> CacheVerified:
    """The answer, also of an engine without a cache."""
    if cache is not None:
        return cache.verify(command)
    return CacheVerified(
        request_id=command.request_id,
        error_reason=Reason.DEVICE_UNUSABLE,
        error_message=_ABSENT,
    )
