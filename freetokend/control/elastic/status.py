"""What the controller shows of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.control.elastic.events import CacheSizes
from freetokend.policy.controller import Hold, Reason, ReasonCode

_NOT_LOOKED: Final = Reason(code=ReasonCode.NO_ENGINE, text="The controller has not looked yet.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticStatus:
    """At the last tick, which was `ticked_s` of the monotonic clock; None before the first.

    `enabled`: the cache follows the card by itself. `standing`: why things are as they are.
    `actual` and `target` are None without an engine that has a cache; `target` is what is on its
    way, else what there is. `budget_bytes`: what slots and KV may take, `required_free_bytes`: what
    others are left; None while that is not known. `generation`: of the newest command.
    `events_counts`: by kind, since the start.
    """

    ticked_s: float | None = None
    enabled: bool = True
    standing: Reason = _NOT_LOOKED
    actual: CacheSizes | None = None
    target: CacheSizes | None = None
    budget_bytes: int | None = None
    required_free_bytes: int | None = None
    generation: int = 0
    in_flight: bool = False
    asleep: bool = False
    recent_resizes_count: int = 0
    holds: tuple[Hold, ...] = ()
    events_counts: tuple[tuple[str, int], ...] = ()
