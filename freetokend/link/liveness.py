"""Is the attached engine alive and does it advance? Pure bookkeeping over a monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """How long an engine may be silent before it is killed and replaced.

    `stuck_s`: busy without progress, or no heartbeat. `connect_s`: from the spawn to Hello (the
    engine imports its tensor library first, which takes long on a cold disk).
    """

    stuck_s: float = 60.0
    connect_s: float = 120.0


class Liveness:
    """Marks of one engine; `fault` says what is wrong at an instant."""

    def __init__(self, limits: LivenessLimits, now_s: float) -> None:
        self._limits = limits
        self._spawned_s = now_s
        self._heard_s: float | None = None  # None: not attached yet
        self._progress_count = -1
        self.busy = False
        self.progress_s = now_s

    def attached(self, now_s: float) -> None:
        """Hello arrived; from here on the engine is busy (loading) until it says otherwise."""
        self._heard_s = now_s
        self.busy = True
        self.progress_s = now_s

    def heartbeat(self, now_s: float, *, progress_count: int, busy: bool) -> None:
        """A heartbeat arrived. An idle engine is up to date by definition."""
        self._heard_s = now_s
        if progress_count != self._progress_count or not busy or not self.busy:
            self.progress_s = now_s
        self._progress_count = progress_count
        self.busy = busy

    def worked(self, now_s: float) -> None:
        """Something that is progress in itself arrived: tokens, a loading step."""
        self._heard_s = now_s
        self.progress_s = now_s

    def forgive(self, late_s: float) -> None:
        """Our own loop slept for `late_s` (a stopped process): that is nobody's silence."""
        self._spawned_s += late_s
        self.progress_s += late_s
        if self._heard_s is not None:
            self._heard_s += late_s

    def fault(self, now_s: float) -> str:
        """Why the engine must be replaced; empty while it is well."""
        limits = self._limits
        if self._heard_s is None:
            if now_s - self._spawned_s > limits.connect_s:
                return f"it did not connect within {limits.connect_s:g} s of its start"
            return ""
        if now_s - self._heard_s > limits.stuck_s:
            return f"no heartbeat for {limits.stuck_s:g} s"
        if self.busy and now_s - self.progress_s > limits.stuck_s:
            return f"no progress for {limits.stuck_s:g} s while it had work"
        return ""
