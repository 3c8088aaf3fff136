"""When to start a dead engine again: a budget of deaths in a window, with exponential back-off.

Pure: values in, values out; the caller has the clock and does the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """`restarts_count` restarts within `window_s` are granted, each after a longer delay."""

    restarts_count: int = 5
    window_s: float = 300.0
    first_delay_s: float = 0.1
    delay_factor: float = 3.0
    max_delay_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """When engines died, oldest first (seconds of one monotonic clock)."""

    deaths_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartAfter:
    """Start the next engine after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not start another engine; `text` says why, for people."""

    text: str


def after_death(
    budget: RestartBudget, history: RestartHistory, *, now_s: float, restart_can_help: bool
) -> tuple[RestartHistory, RestartAfter | GiveUp]:
    """Decide after an engine died at `now_s`; returns the history to keep and the decision.

    The delay grows with the deaths inside the window, so an engine that dies once a day comes back
    at once every time, and one that dies at every start is tried `restarts_count` times.
    """
    recent = tuple(death_s for death_s in history.deaths_s if now_s - death_s < budget.window_s)
    deaths_s = (*recent, now_s)
    kept = RestartHistory(deaths_s=deaths_s)
    if not restart_can_help:
        return kept, GiveUp(text="starting it again without a change cannot help")
    if len(deaths_s) > budget.restarts_count:
        return kept, GiveUp(
            text=f"it died {len(deaths_s)} times within {budget.window_s:g} s, which spends the "
            f"restart budget of {budget.restarts_count}"
        )
    delay_s = budget.first_delay_s
    for _ in recent:
        delay_s = min(delay_s * budget.delay_factor, budget.max_delay_s)
    return kept, RestartAfter(delay_s=delay_s)
