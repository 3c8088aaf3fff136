"""The scripted engine's expert cache: numbers that move as a script says, and no memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Final

from freetokend.core.cache_stats import CacheCounters, LayerCounters
from freetokend.core.errors import Reason
from freetokend.link.messages import (
    CacheDescription,
    CacheResized,
    CacheVerified,
    LayerRun,
    ResizeCache,
    ResizeOutcome,
    SlotDifference,
    VerifyCache,
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

    def resize(self, command: ResizeCache) -> CacheResized:
        """As an engine answers it: a generation is done once, an older one not at all."""
        if self._done is not None and self._done.generation == command.generation:
            return self._done
        stale = command.generation < self._newest_generation
        self._newest_generation = max(self._newest_generation, command.generation)
        problem = "" if stale else self._problem(command.slots_count)
        if stale or problem:
            now = self.counters()
            return CacheResized(
                generation=command.generation,
                outcome=ResizeOutcome.SUPERSEDED if stale else ResizeOutcome.FAILED,
                slots_count=now.slots_count,
                committed_bytes=now.committed_bytes,
                error_reason=Reason.INVALID_REQUEST if problem else None,
                error_message=problem,
            )
        self._done = self._resized(command)
        return self._done

    def _problem(self, slots_count: int) -> str:
        if self._setup.resize_refusal:
            return self._setup.resize_refusal
        capacity = self._setup.slots_capacity
        if slots_count > capacity:
            return f"the cache can have 0 to {capacity} slots, not {slots_count}"
        return ""

    def _resized(self, command: ResizeCache) -> CacheResized:
        with self._lock:
            old = self._counters
            unchanged = command.slots_count == old.slots_count
            resident = min(old.resident_count, command.slots_count)
            self._counters = replace(
                old,
                slots_count=command.slots_count,
                resident_count=resident,
                committed_bytes=command.slots_count * old.slot_bytes,
                generation=old.generation + (not unchanged),
            )
            return CacheResized(
                generation=command.generation,
                outcome=ResizeOutcome.UNCHANGED if unchanged else ResizeOutcome.DONE,
                slots_count=command.slots_count,
                committed_bytes=command.slots_count * old.slot_bytes,
                dropped_count=old.resident_count - resident,
            )

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


def resized(cache: ScriptedCache | None, command: ResizeCache) -> CacheResized:
    """The answer, also of an engine without a cache."""
    if cache is not None:
        return cache.resize(command)
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
