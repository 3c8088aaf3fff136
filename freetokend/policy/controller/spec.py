"""What people want of the controller: configuration, holds, rules, and what was asked by hand.

Only the operator and the configuration change it; the controller reads it at each tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from freetokend.core.units import GIB, MIB
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES
from freetokend.policy.vram_budget import DEFAULT_CUSHION_BYTES, VramWishes

TICK_S: Final = 0.25
_NO_WISHES: Final = VramWishes()


class Floor(StrEnum):
    """What the cache never shrinks below: the experts of one token, or one layer's."""

    ONE_TOKEN = "one-token"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The thresholds. Every time is in seconds of the monotonic clock.

    cushion_bytes stays free for what others take between two looks. Growth leaves margin_bytes
    more than that, and so does a shrink: what others take of the margin costs no resize. A change
    that gives less than growth_step_bytes is not worth one.

    A growth waits until there was room for it for hold_s. Whoever takes memory within reversal_s
    after one doubles the wait, up to hold_most_s; each hold_decay_s without that halves it again.

    Of the resizes in window_s, at most resizes_count in all, only so many may be growth, be made
    for sessions or at the operator's word: what others take is always given, see `sizing`.

    A reading older than stale_s is no reading, growth needs one of the last fresh_s, and room that
    was not looked at for gap_s was not held. An answer that does not come is asked for again after
    resend_s, each time twice as long, up to sends_count messages in all.
    """

    cushion_bytes: int = DEFAULT_CUSHION_BYTES
    margin_bytes: int = 512 * MIB
    growth_step_bytes: int = 256 * MIB
    hold_s: float = 30.0
    hold_most_s: float = 240.0
    reversal_s: float = 60.0
    hold_decay_s: float = 600.0
    window_s: float = 60.0
    resizes_count: int = 6
    growth_count: int = 2
    sessions_count: int = 3
    operator_count: int = 4
    stale_s: float = 1.0
    fresh_s: float = 0.5
    gap_s: float = 2.0
    resend_s: float = 0.5
    wake_resend_s: float = 10.0
    sends_count: int = 6
    retry_s: float = 5.0
    retry_most_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """When the host's memory is short, and for how long until the ladder is climbed by a rung.

    Pressure counts only where less than pressure_ratio of the memory is available: programs that
    stall in a limit of their own cannot be helped by what we give back. Down a rung it goes after
    descend_s with calm_ratio times as much available and half the pressure.
    """

    low_bytes: int = DEFAULT_HEADROOM_BYTES
    critical_bytes: int = DEFAULT_HEADROOM_BYTES // 2
    some_percent: float = 20.0
    full_percent: float = 5.0
    pressure_ratio: float = 0.1
    calm_ratio: float = 1.5
    climb_s: float = 2.0
    climb_critical_s: float = 1.0
    descend_s: float = 30.0
    resend_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A lease: so much of the card is kept free of us on top of the cushion, for a reason.

    pids: whose memory counts as what was held for; without them all of it stays free.
    """

    hold_id: str
    size_bytes: int
    reason: str
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRule:
    """While a program of this name (in any case) holds memory of the card, so much is free."""

    name: str
    keep_free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From start_minute until before end_minute, over midnight where that is the lesser, so much
    is free, or the engine sleeps whenever nobody wants it. weekdays: of the start, 0 for Monday."""

    name: str
    start_minute: int
    end_minute: int
    weekdays: frozenset[int] = frozenset(range(7))
    keep_free_bytes: int = 0
    sleep: bool = False

    def holds(self, minute: int, weekday: int) -> bool:
        """Whether it is now."""
        if self.start_minute <= self.end_minute:
            return weekday in self.weekdays and self.start_minute <= minute < self.end_minute
        if minute >= self.start_minute:
            return weekday in self.weekdays
        return minute < self.end_minute and (weekday - 1) % 7 in self.weekdays


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What is wanted now.

    revision: goes up with each change of wishes or vram_limit_bytes that the operator made by
    hand; such a change does not wait. vram_limit_bytes: the most that the engine holds of the
    card. sleep_ticket, wake_ticket: the number of times that the operator said so. sleep_idle_s:
    sleep when no request came for so long; window_idle_s: the same in a window that wants sleep.
    sleep_over_budget: sleep, once no request runs, where even the floor is more than others leave.
    """

    revision: int = 0
    wishes: VramWishes = _NO_WISHES
    vram_limit_bytes: int | None = None
    floor: Floor = Floor.ONE_TOKEN
    holds: tuple[Hold, ...] = ()
    rules: tuple[ProcessRule, ...] = ()
    windows: tuple[Window, ...] = ()
    sleep_ticket: int = 0
    wake_ticket: int = 0
    sleep_idle_s: float | None = None
    window_idle_s: float = 60.0
    sleep_over_budget: bool = False
    limits: Limits = Limits()
    host_limits: HostLimits = HostLimits()


# Below this a card is too small for the defaults of `Limits`; those of a small one are a share.
_FULL_SIZE_BYTES: Final = 8 * GIB


def limits_for(total_bytes: int) -> Limits:
    """The defaults on a card of this size: less than 8 GiB get a proportional cushion, margin and
    step, as does ordinary memory that stands for a card."""
    defaults = Limits()
    if total_bytes >= _FULL_SIZE_BYTES:
        return defaults
    return Limits(
        cushion_bytes=defaults.cushion_bytes * total_bytes // _FULL_SIZE_BYTES,
        margin_bytes=defaults.margin_bytes * total_bytes // _FULL_SIZE_BYTES,
        growth_step_bytes=defaults.growth_step_bytes * total_bytes // _FULL_SIZE_BYTES,
    )
