"""Control's commands to the expert cache, done between steps and answered one by one. Torch-free.

Whatever goes wrong in one becomes its answer: a cache that cannot be resized still serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from freetokend.core.cache_stats import CacheCounters
from freetokend.core.errors import FreetokenError, Reason
from freetokend.core.logs import EventLogger
from freetokend.link.messages import (
    CacheAnswer,
    CacheCommand,
    CacheResized,
    CacheVerified,
    ResizeCache,
    ResizeOutcome,
    SlotDifference,
    VerifyCache,
)


class ResizeReport(Protocol):
    """The truth after a resize. `outcome` is "done", "unchanged" or "deferred"."""

    @property
    def outcome(self) -> str: ...

    @property
    def slots_count(self) -> int: ...

    @property
    def committed_bytes(self) -> int: ...

    @property
    def moved_count(self) -> int: ...

    @property
    def dropped_count(self) -> int: ...

    @property
    def note(self) -> str: ...


class Difference(Protocol):
    """A slot that does not hold the record of `expert_id` = layer * experts per layer + expert."""

    @property
    def slot(self) -> int: ...

    @property
    def expert_id(self) -> int: ...

    @property
    def offset_bytes(self) -> int: ...


class ComparisonReport(Protocol):
    """What a comparison of the resident slots with the pool found."""

    @property
    def compared_count(self) -> int: ...

    @property
    def compared_bytes(self) -> int: ...

    @property
    def differences(self) -> Sequence[Difference]: ...


class CacheControl(Protocol):
    """The expert cache as control steers it. All but `counters` are called between steps."""

    def resize(self, slots_count: int) -> ResizeReport:
        """Have exactly so many slots. Raises FreetokenError: refused, or no memory."""
        ...

    def verify(self, progress: Callable[[], None]) -> ComparisonReport:
        """Compare every resident slot with the pool's record; progress: called after each."""
        ...

    def counters(self) -> CacheCounters:
        """State and statistics; from any thread."""
        ...

    def close(self) -> None:
        """End what runs in the background and give the memory back; no step may run any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    reason: Reason
    message: str


class CacheCommands:
    """The commands that wait for the next safe point, and what was done so far.

    Of several resizes that wait only the newest is done. A generation that was done is answered
    again without doing it again; one that was deferred or failed may be tried again.
    """

    def __init__(
        self,
        cache: CacheControl | None,
        *,
        send: Callable[[CacheAnswer], None],
        log: EventLogger,
        progress: Callable[[], None] = lambda: None,
        experts_per_layer_count: int = 1,
        backend: str = "cpu",
    ) -> None:
        """`cache` None: every command is refused, because `backend` has none. progress: what a
        command that takes long calls again and again, so that nobody takes it for a hang."""
        self._cache = cache
        self._experts_per_layer_count = experts_per_layer_count
        self._backend = backend
        self._send = send
        self._log = log
        self._progress = progress
        self._waiting: list[CacheCommand] = []
        self._newest_generation = 0
        self._done: CacheResized | None = None

    def take(self, command: CacheCommand) -> None:
        """Keep it for the next safe point."""
        if isinstance(command, ResizeCache):
            self._newest_generation = max(self._newest_generation, command.generation)
        self._waiting.append(command)

    def run(self) -> None:
        """Do and answer what waits; called where no step is under way."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            answer = (
                self._resized(command)
                if isinstance(command, ResizeCache)
                else self._verified(command)
            )
            self._send(answer)

    def _resized(self, command: ResizeCache) -> CacheResized:
        done = self._done
        if done is not None and done.generation == command.generation:
            return done
        if command.generation < self._newest_generation:
            return self._unfinished(command, ResizeOutcome.SUPERSEDED)
        started_s = time.monotonic()
        try:
            report = self._present().resize(command.slots_count)
        except Exception as error:  # a cache that keeps its size still serves
            fault = self._fault(error, "resize")
            return self._unfinished(command, ResizeOutcome.FAILED, fault=fault)
        answer = CacheResized(
            generation=command.generation,
            outcome=ResizeOutcome(str(report.outcome)),
            slots_count=report.slots_count,
            committed_bytes=report.committed_bytes,
            moved_count=report.moved_count,
            dropped_count=report.dropped_count,
            duration_s=time.monotonic() - started_s,
            note=report.note,
        )
        if answer.outcome is not ResizeOutcome.DEFERRED:
            self._done = answer
        self._log.info(
            "cache-resized",
            outcome=answer.outcome.value,
            slots_count=answer.slots_count,
            duration_s=round(answer.duration_s, 6),
        )
        return answer

    def _unfinished(
        self, command: ResizeCache, outcome: ResizeOutcome, fault: _Fault | None = None
    ) -> CacheResized:
        """Nothing was done: what holds all the same."""
        now = None if self._cache is None else self._cache.counters()
        return CacheResized(
            generation=command.generation,
            outcome=outcome,
            slots_count=0 if now is None else now.slots_count,
            committed_bytes=0 if now is None else now.committed_bytes,
            error_reason=None if fault is None else fault.reason,
            error_message="" if fault is None else fault.message,
        )

    def _verified(self, command: VerifyCache) -> CacheVerified:
        started_s = time.monotonic()
        try:
            report = self._present().verify(self._progress)
        except Exception as error:  # what cannot be compared is told, and serves on
            fault = self._fault(error, "verify")
            return CacheVerified(
                request_id=command.request_id,
                error_reason=fault.reason,
                error_message=fault.message,
            )
        answer = CacheVerified(
            request_id=command.request_id,
            compared_count=report.compared_count,
            compared_bytes=report.compared_bytes,
            differences=tuple(
                SlotDifference(
                    layer_index=one.expert_id // self._experts_per_layer_count,
                    expert_index=one.expert_id % self._experts_per_layer_count,
                    slot_index=one.slot,
                    offset_bytes=one.offset_bytes,
                )
                for one in report.differences
            ),
            duration_s=time.monotonic() - started_s,
        )
        log = self._log.error if answer.differences else self._log.info
        log(
            "cache-verified",
            compared_count=answer.compared_count,
            different_count=len(answer.differences),
            duration_s=round(answer.duration_s, 6),
        )
        return answer

    def _present(self) -> CacheControl:
        if self._cache is None:
            raise FreetokenError(
                f"this engine has no expert cache: backend {self._backend}",
                reason=Reason.DEVICE_UNUSABLE,
            )
        return self._cache

    def _fault(self, error: Exception, what: str) -> _Fault:
        if isinstance(error, FreetokenError):
            self._log.warning("cache-command-refused", command=what, cause=error.message)
            return _Fault(reason=error.reason, message=error.message)
        self._log.exception("cache-command-failed", command=what)
        return _Fault(
            reason=Reason.HOST_MEMORY if isinstance(error, MemoryError) else Reason.INTERNAL,
            message=f"{type(error).__name__}: {error}",
        )
