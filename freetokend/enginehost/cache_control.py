"""Control's commands to the expert cache, done between steps and answered one by one. Torch-free.

Whatever goes wrong in one becomes its answer: a cache that cannot be resized still serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Protocol, assert_never

from freetokend.core.errors import FreetokenError, Reason
from freetokend.core.logs import EventLogger
from freetokend.enginehost.resizing import Kv, Sizes, Slots, resize, sizes_of
from freetokend.enginehost.resizing import answer as answered
from freetokend.link.messages import (
    CacheAnswer,
    CacheCommand,
    CacheResized,
    CacheVerified,
    ResizeCache,
    ResizeOutcome,
    SizeCommand,
    SleepEngine,
    SlotDifference,
    VerifyCache,
    WakeEngine,
)

_NAMES: Final[Mapping[type, str]] = MappingProxyType(
    {ResizeCache: "resize", SleepEngine: "sleep", WakeEngine: "wake"}
)


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


class CacheControl(Slots, Protocol):
    """The expert cache as control steers it. All but `counters` are called between steps."""

    def empty(self) -> None:
        """Give all slots back; no step may run until `resize`."""
        ...

    def verify(self, progress: Callable[[], None]) -> ComparisonReport:
        """Compare every resident slot with the pool's record; progress: called after each."""
        ...

    def close(self) -> None:
        """End what runs in the background and give the memory back; no step may run any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    reason: Reason
    message: str


class Sleeper(Protocol):
    """Gives all memory of the device back and takes it again; called between steps."""

    def why_not(self) -> str:
        """Why the engine cannot sleep now, as a sentence; empty when it can."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...

    def acquire(self, slots_count: int, kv_pages_count: int) -> None:
        """Take it, and compute a token. Raises FreetokenError when one of it fails; then nothing
        is held."""
        ...


class CacheCommands:
    """The commands that wait for the next safe point, and what was done so far.

    Of several with a generation that wait only the newest is done. A generation that was done is
    answered again without doing it again; one that was deferred or failed may be tried again.
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
        kv: Kv | None = None,
        sleeper: Sleeper | None = None,
    ) -> None:
        """`cache` None: every command is refused, because `backend` has none. progress: what a
        command that takes long calls again and again, so that nobody takes it for a hang. kv,
        sleeper: None where KV pages are not resized, and where nothing can be given back."""
        self._cache = cache
        self._kv = kv
        self._sleeper = sleeper
        self._experts_per_layer_count = experts_per_layer_count
        self._backend = backend
        self._send = send
        self._log = log
        self._progress = progress
        self._waiting: list[tuple[CacheCommand, float]] = []
        self._newest_generation = 0
        self._done: CacheResized | None = None
        self._asleep = False

    @property
    def newest_generation(self) -> int:
        """Of all commands that came; from any thread."""
        return self._newest_generation

    @property
    def is_asleep(self) -> bool:
        """While it is, no step can be computed; from any thread."""
        return self._asleep

    def take(self, command: CacheCommand) -> None:
        """Keep it for the next safe point."""
        if not isinstance(command, VerifyCache):
            self._newest_generation = max(self._newest_generation, command.generation)
        self._waiting.append((command, time.monotonic()))

    def run(self) -> None:
        """Do and answer what waits; called where no step is under way."""
        waiting, self._waiting = self._waiting, []
        for command, came_s in waiting:
            answer: CacheAnswer
            if isinstance(command, VerifyCache):
                answer = self._verified(command)
            else:
                answer = self._sized(command, time.monotonic() - came_s)
            self._send(answer)

    def _sized(self, command: SizeCommand, waited_s: float) -> CacheResized:
        done = self._done
        if done is not None and done.generation == command.generation:
            return done
        before = sizes_of(self._cache, self._kv)
        if command.generation < self._newest_generation:
            return answered(command.generation, ResizeOutcome.SUPERSEDED, before, before)
        started_s = time.monotonic()
        try:
            answer = self._carried_out(command, before)
        except Exception as error:  # an engine that keeps its memory still serves
            fault = self._fault(error, _NAMES[type(command)])
            answer = answered(
                command.generation,
                ResizeOutcome.FAILED,
                before,
                sizes_of(self._cache, self._kv),
                error_reason=fault.reason,
                error_message=fault.message,
            )
        answer = replace(answer, stall_s=time.monotonic() - started_s, safe_point_wait_s=waited_s)
        if answer.outcome in (ResizeOutcome.DONE, ResizeOutcome.UNCHANGED):
            self._done = answer
        if answer.outcome is not ResizeOutcome.FAILED:
            self._tell(command, answer)
        return answer

    def _carried_out(self, command: SizeCommand, before: Sizes) -> CacheResized:
        cache = self._present()
        match command:
            case ResizeCache():
                if self._asleep:
                    raise FreetokenError(
                        "the engine is asleep and has nothing to resize; wake it first",
                        reason=Reason.DEVICE_UNUSABLE,
                    )
                return resize(
                    cache,
                    self._kv,
                    generation=command.generation,
                    slots_count=command.slots_count,
                    kv_pages_count=command.kv_pages_count,
                )
            case SleepEngine():
                outcome, note = self._fall_asleep()
            case WakeEngine():
                outcome, note = self._wake(command)
            case _:
                assert_never(command)
        after = sizes_of(self._cache, self._kv)
        return answered(command.generation, outcome, before, after, note=note)

    def _fall_asleep(self) -> tuple[ResizeOutcome, str]:
        if self._asleep:
            return ResizeOutcome.UNCHANGED, ""
        sleeper = self._sleepy()
        note = sleeper.why_not()
        if note:
            return ResizeOutcome.DEFERRED, note
        # Whatever goes wrong from here on: what is left of it does not serve until it was woken.
        self._asleep = True
        sleeper.release()
        return ResizeOutcome.DONE, ""

    def _wake(self, command: WakeEngine) -> tuple[ResizeOutcome, str]:
        if not self._asleep:
            return ResizeOutcome.UNCHANGED, ""
        self._sleepy().acquire(command.slots_count, command.kv_pages_count)
        self._asleep = False
        return ResizeOutcome.DONE, ""

    def _sleepy(self) -> Sleeper:
        if self._sleeper is None:
            raise FreetokenError(
                f"this engine cannot sleep: backend {self._backend}", reason=Reason.DEVICE_UNUSABLE
            )
        return self._sleeper

    def _tell(self, command: SizeCommand, answer: CacheResized) -> None:
        self._log.info(
            "cache-resized",
            command=_NAMES[type(command)],
            outcome=answer.outcome.value,
            slots_count=answer.slots_count,
            kv_pages_count=answer.kv_pages_count,
            stall_s=round(answer.stall_s, 6),
            cause=answer.note,
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
