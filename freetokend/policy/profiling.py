"""When bandwidths are measured unasked: after the start where nothing is known, later now and then.

Only while nobody is served, and for a bounded time. What a request interrupted goes on when it is
quiet again; under load nothing is measured, for the steps themselves tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from freetokend.policy.bandwidth_profile import ProfileSource

# Quiet for so long before something is measured: between two turns of a conversation it is not.
BOOT_QUIET_S: Final = 0.5
IDLE_QUIET_S: Final = 5.0
# Of work, of one run; what is left goes on in the next.
LIMIT_S: Final = 10.0
# After a run that failed or was interrupted, before the next.
PAUSE_S: Final = 2.0
_FAILED_PAUSE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """Begin with `Profiling()` at every start of an engine.

    known: there is an entry for what it serves; None: nobody has looked yet. parts_left: of the
    run that was interrupted.
    """

    known: bool | None = None
    quiet_since_s: float | None = None
    ended_at_s: float | None = None
    not_before_s: float = 0.0
    parts_left: tuple[str, ...] = ()
    source: ProfileSource = ProfileSource.IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingRun:
    """Measure these parts (empty: all) on this account."""

    source: ProfileSource
    parts: tuple[str, ...] = ()


def looked(state: Profiling, *, quiet: bool, now_s: float) -> Profiling:
    """After a look at the engine. quiet: it is ready and serves nobody."""
    if not quiet:
        return replace(state, quiet_since_s=None)
    if state.quiet_since_s is None:
        return replace(state, quiet_since_s=now_s)
    return state


def due_run(state: Profiling, *, now_s: float, interval_s: float) -> ProfilingRun | None:
    """What to measure now. interval_s: between two runs, 0 for never but at the start."""
    if state.known is None or state.quiet_since_s is None or now_s < state.not_before_s:
        return None
    quiet_s = now_s - state.quiet_since_s
    if state.parts_left:
        quiet_enough = quiet_s >= (
            BOOT_QUIET_S if state.source is ProfileSource.BOOT else IDLE_QUIET_S
        )
        return ProfilingRun(source=state.source, parts=state.parts_left) if quiet_enough else None
    if not state.known:
        return ProfilingRun(source=ProfileSource.BOOT) if quiet_s >= BOOT_QUIET_S else None
    waited = state.ended_at_s is not None and now_s - state.ended_at_s >= interval_s > 0
    return ProfilingRun(source=ProfileSource.IDLE) if waited and quiet_s >= IDLE_QUIET_S else None


def ran(
    state: Profiling, run: ProfilingRun, *, parts_left: tuple[str, ...], failed: bool, now_s: float
) -> Profiling:
    """After a run. One that failed is not tried again soon."""
    return replace(
        state,
        known=True,
        ended_at_s=now_s,
        not_before_s=now_s + (_FAILED_PAUSE_S if failed else PAUSE_S if parts_left else 0.0),
        parts_left=() if failed else parts_left,
        source=run.source,
    )
