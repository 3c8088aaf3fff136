"""What the controller remembers from one tick to the next. Values only; `tick` makes the next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from freetokend.policy.controller.commands import EngineCommand, Reason, ReasonCode
from freetokend.policy.vram_budget import VramFacts, VramWishes

_NOT_STARTED: Final = Reason(code=ReasonCode.NO_ENGINE, text="The engine has not started yet.")


class Trigger(StrEnum):
    """What a command to the engine is for; it decides how often it may be given."""

    BUDGET = "budget"  # others have, or shall have, the memory
    GROWTH = "growth"
    SESSIONS = "sessions"
    OPERATOR = "operator"
    SLEEP = "sleep"
    WAKE = "wake"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Slots and KV pages, and the memory that both take."""

    slots_count: int
    kv_pages_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The command that the engine has not answered.

    sent_s: the last time. target_bytes: of slots and KV after it; grows: it takes memory;
    is_deferred: the engine said that KV pages in use are in its way.
    """

    command: EngineCommand
    trigger: Trigger
    sent_s: float
    sends_count: int = 1
    target_bytes: int = 0
    grows: bool = False
    is_deferred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A resize of the last minute; freed_bytes: what others were given."""

    at_s: float
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Room for a growth, since when, and the least of it since then."""

    since_s: float
    least_room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The last division of the room, kept because most ticks find what the last one found."""

    shape: VramFacts
    wishes: VramWishes
    room_bytes: int
    least_pages_count: int
    wanted_pages_count: int
    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What earlier growths taught.

    hold_s: how long there has to be room, 0 for the default. grown_s: when the last one was done.
    reversed_s: when hold_s was last changed. failures_count in a row, the next try not before
    retry_s, and share_ratio of what there would be room for.
    """

    pending: Pending | None = None
    hold_s: float = 0.0
    grown_s: float | None = None
    changed_s: float = 0.0
    failures_count: int = 0
    retry_s: float | None = None
    share_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """How far the host memory ladder is climbed (0: not at all), and since when memory has been
    short, or plenty. sent_s: when each rung last sent its command."""

    rung: int = 0
    short_since_s: float | None = None
    calm_since_s: float | None = None
    looked_s: float | None = None
    sent_s: tuple[float | None, ...] = (None, None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Begin with `State()`; after a restart of control the engine's facts say the rest.

    standing: why things are as they are. budget_bytes: what slots and KV may take now, and
    required_free_bytes what others are left; None while it is not known.
    """

    now_s: float | None = None
    generation: int = 0
    boot_count: int | None = None
    in_flight: InFlight | None = None
    elastic_bytes: int = 0
    changed_s: float | None = None
    reading_s: float | None = None
    known_s: float | None = None
    recent: tuple[Resized, ...] = ()
    growth: Growth = Growth()
    revision: int | None = None
    sleep_ticket: int = 0
    wake_ticket: int = 0
    active_rules: frozenset[str] = frozenset()
    ladder: Ladder = Ladder()
    division: Division | None = None
    standing: Reason = _NOT_STARTED
    budget_bytes: int | None = None
    required_free_bytes: int | None = None
