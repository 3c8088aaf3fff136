"""The host's memory: what is given back, rung by rung, so that the household's programs live.

Rung 1 drops spilled KV, 2 the pools of models that nobody uses, 3 refuses new long prompts, 4
unloads the model. Each takes a time of shortage to climb and a longer one of plenty to leave; what
is not known leaves the ladder as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from freetokend.policy.controller.commands import (
    DropIdlePools,
    DropSpill,
    HostCommand,
    LoadModel,
    Reason,
    ReasonCode,
    RefuseLongPrompts,
    UnloadModel,
)
from freetokend.policy.controller.facts import HostFacts, Snapshot
from freetokend.policy.controller.spec import HostLimits
from freetokend.policy.controller.state import Ladder
from freetokend.policy.memory import gib
from freetokend.policy.readings import HostReading

SPILL_RUNG: Final = 1
IDLE_POOLS_RUNG: Final = 2
LONG_PROMPTS_RUNG: Final = 3
UNLOAD_RUNG: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weather:
    """Of the memory. neither short nor calm: the ladder stays."""

    short: bool
    severe: bool
    calm: bool
    available_bytes: int
    text: str


def climb(ladder: Ladder, snapshot: Snapshot) -> tuple[Ladder, tuple[HostCommand, ...]]:
    """The rung, and what it and those below it still have to give."""
    limits, now_s = snapshot.spec.host_limits, snapshot.now_s
    weather = _weather(snapshot.host, limits, now_s, snapshot.spec.limits.stale_s)
    if weather is None:
        return ladder, ()
    gap_s = snapshot.spec.limits.gap_s
    if ladder.looked_s is None or now_s - ladder.looked_s > gap_s:
        ladder = replace(ladder, short_since_s=None, calm_since_s=None)
    ladder = replace(
        ladder,
        looked_s=now_s,
        short_since_s=_since(ladder.short_since_s, now_s, weather.short),
        calm_since_s=_since(ladder.calm_since_s, now_s, weather.calm),
    )
    ladder = _stepped(ladder, snapshot, weather)
    return _commands(ladder, snapshot, weather)


def _weather(
    host: HostReading | None, limits: HostLimits, now_s: float, stale_s: float
) -> _Weather | None:
    if host is None or not 0 <= now_s - host.taken_s <= stale_s:
        return None
    available_bytes = host.mem_available_bytes
    if available_bytes is None or available_bytes < 0:
        return None
    name = "MemAvailable"
    if host.cgroup_limit_bytes is not None:
        if host.cgroup_used_bytes is None:
            return None
        left_bytes = max(host.cgroup_limit_bytes - host.cgroup_used_bytes, 0)
        if left_bytes < available_bytes:
            available_bytes, name = left_bytes, "the cgroup's limit"
    pressed, relaxed = _pressure(host, limits, available_bytes)
    text = f"{name} leaves {gib(available_bytes)}, {gib(limits.low_bytes)} is the least"
    if pressed and host.memory_pressure is not None:
        text += f"; programs stall {host.memory_pressure.some_avg10:.0f} % of the time"
    low = available_bytes < limits.low_bytes
    return _Weather(
        short=low or pressed,
        severe=available_bytes < limits.critical_bytes or (low and pressed),
        calm=available_bytes >= limits.low_bytes * limits.calm_ratio and relaxed,
        available_bytes=available_bytes,
        text=text,
    )


def _pressure(host: HostReading, limits: HostLimits, available_bytes: int) -> tuple[bool, bool]:
    """Whether programs stall for memory, and whether they do so little that all is well."""
    pressure = host.memory_pressure
    if pressure is None:
        return False, True
    total_bytes = host.mem_total_bytes
    if total_bytes is not None and available_bytes >= total_bytes * limits.pressure_ratio:
        return False, True
    full = pressure.full_avg10 or 0.0
    pressed = pressure.some_avg10 > limits.some_percent or full > limits.full_percent
    relaxed = pressure.some_avg10 <= limits.some_percent / 2 and full <= limits.full_percent / 2
    return pressed, relaxed


def _since(since_s: float | None, now_s: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _stepped(ladder: Ladder, snapshot: Snapshot, weather: _Weather) -> Ladder:
    limits, now_s = snapshot.spec.host_limits, snapshot.now_s
    if ladder.short_since_s is not None:
        wait_s = limits.climb_critical_s if weather.severe else limits.climb_s
        # Where memory is scarce but stable the model is worth more than what it would free.
        may_climb = weather.severe if ladder.rung + 1 == UNLOAD_RUNG else True
        if ladder.rung < UNLOAD_RUNG and may_climb and now_s - ladder.short_since_s >= wait_s:
            return replace(ladder, rung=ladder.rung + 1, short_since_s=now_s)
    if ladder.calm_since_s is not None and ladder.rung > 0:
        fits = ladder.rung < UNLOAD_RUNG or _model_fits(snapshot, weather)
        if fits and now_s - ladder.calm_since_s >= limits.descend_s:
            return replace(ladder, rung=ladder.rung - 1, calm_since_s=now_s)
    return ladder


def _model_fits(snapshot: Snapshot, weather: _Weather) -> bool:
    """Whether memory would still be plenty with the model in it."""
    if snapshot.host_facts.model_loaded:
        return True
    limits = snapshot.spec.host_limits
    least_bytes = snapshot.host_facts.model_bytes + limits.low_bytes * limits.calm_ratio
    return weather.available_bytes >= least_bytes


def _commands(
    ladder: Ladder, snapshot: Snapshot, weather: _Weather
) -> tuple[Ladder, tuple[HostCommand, ...]]:
    """What is not yet as the rung wants it, said again only after a while."""
    sent_s = list(ladder.sent_s)
    commands = []
    for index, command in _due(ladder.rung, snapshot.host_facts, weather):
        last_s = sent_s[index]
        if last_s is None or snapshot.now_s - last_s >= snapshot.spec.host_limits.resend_s:
            sent_s[index] = snapshot.now_s
            commands.append(command)
    return replace(ladder, sent_s=tuple(sent_s)) if commands else ladder, tuple(commands)


def _due(rung: int, facts: HostFacts, weather: _Weather) -> Iterator[tuple[int, HostCommand]]:
    short = Reason(code=ReasonCode.HOST_MEMORY, text=f"Memory is short: {weather.text}.")
    calm = Reason(
        code=ReasonCode.HOST_MEMORY_CALM,
        text=f"Memory is plenty again: {gib(weather.available_bytes)} available.",
    )
    if rung >= SPILL_RUNG and facts.spill_bytes > 0:
        yield 0, DropSpill(reason=short)
    if rung >= IDLE_POOLS_RUNG and facts.idle_pools_bytes > 0:
        yield 1, DropIdlePools(reason=short)
    refuse = rung >= LONG_PROMPTS_RUNG
    if refuse is not facts.long_prompts_refused:
        yield 2, RefuseLongPrompts(refuse=refuse, reason=short if refuse else calm)
    if rung >= UNLOAD_RUNG and facts.model_loaded:
        yield 3, UnloadModel(reason=short)
    if rung < UNLOAD_RUNG and not facts.model_loaded:
        yield 3, LoadModel(reason=calm)
