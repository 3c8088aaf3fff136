"""What people want now: the configuration, what the operator said since, and the holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

from freetokend.core.config.resolved import ElasticConfig, ResolvedConfig
from freetokend.core.units import TIB
from freetokend.policy.controller import Floor, Hold, Limits, Spec, limits_for
from freetokend.policy.elastic_rules import parse_process_rules, parse_windows
from freetokend.policy.vram_budget import Preset, VramWishes

# A look at the machine is late when a few of its ticks have passed.
_STALE_TICKS: Final = 4
_FRESH_TICKS: Final = 2
_GAP_TICKS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a resize by hand asks for; None: as it is. vram_limit_bytes 0: no limit any more."""

    wishes: VramWishes | None = None
    vram_limit_bytes: int | None = None


class Wants:
    """Owns the operator's wishes and the holds; `spec` is what the controller is told of them.

    Belongs to the event loop. Wishes last until the daemon ends, holds until they are released.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        """Raises ConfigError for rules and windows that cannot be read."""
        engine, elastic = config.engine, config.elastic
        self._elastic = elastic
        self._tick_s = config.control.tick_s
        self._rules = parse_process_rules(elastic.process_rules)
        self._windows = parse_windows(elastic.windows)
        self._wishes = VramWishes(
            preset=Preset(engine.preset),
            slots_count=engine.slots_count or None,
            kv_bytes=engine.kv_bytes or None,
            max_context_tokens=engine.max_context_tokens or None,
        )
        self._vram_limit_bytes = elastic.vram_limit_bytes or None
        self._revision = 0
        self._sleep_ticket = 0
        self._wake_ticket = 0
        self._holds: dict[str, Hold] = {}
        self._hold_numbers = itertools.count(1)

    @property
    def enabled(self) -> bool:
        """Whether the cache follows the card by itself."""
        return self._elastic.enabled

    @property
    def wishes(self) -> VramWishes:
        """The present ones."""
        return self._wishes

    @property
    def holds(self) -> tuple[Hold, ...]:
        """In the order in which they were taken."""
        return tuple(self._holds.values())

    def ask(self, wish: Wish) -> int:
        """Take the operator's word; returns its revision."""
        if wish.wishes is not None:
            self._wishes = wish.wishes
        if wish.vram_limit_bytes is not None:
            self._vram_limit_bytes = wish.vram_limit_bytes or None
        self._revision += 1
        return self._revision

    def ask_to_sleep(self) -> None:
        """Until a request comes."""
        self._sleep_ticket += 1

    def ask_to_wake(self) -> int:
        """Without a request; returns the number of the wish."""
        self._wake_ticket += 1
        return self._wake_ticket

    def hold(self, size_bytes: int, reason: str, pids: frozenset[int]) -> Hold:
        """Keep so much free until it is released."""
        held = Hold(
            hold_id=f"hold-{next(self._hold_numbers)}",
            size_bytes=size_bytes,
            reason=reason,
            pids=pids,
        )
        self._holds[held.hold_id] = held
        return held

    def release(self, hold_id: str) -> Hold | None:
        """The hold that has ended; None when it had before."""
        return self._holds.pop(hold_id, None)

    def spec(self, card_bytes: int | None, *, follows: bool) -> Spec:
        """For a card of so many bytes; `follows` False: changed at the operator's word only."""
        elastic = self._elastic
        follows = follows and elastic.enabled
        limits = self._with_ticks(_limits(elastic, card_bytes) if follows else _by_hand(elastic))
        return Spec(
            revision=self._revision,
            wishes=self._wishes,
            vram_limit_bytes=self._vram_limit_bytes,
            floor=Floor(elastic.floor),
            holds=self.holds,
            rules=self._rules if follows else (),
            windows=self._windows if follows else (),
            sleep_ticket=self._sleep_ticket,
            wake_ticket=self._wake_ticket,
            sleep_idle_s=elastic.sleep_idle_s or None if follows else None,
            sleep_over_budget=elastic.sleep_over_budget and follows,
            limits=limits,
        )

    def _with_ticks(self, limits: Limits) -> Limits:
        """A slower look at the machine makes no reading stale by itself."""
        return replace(
            limits,
            stale_s=max(limits.stale_s, _STALE_TICKS * self._tick_s),
            fresh_s=max(limits.fresh_s, _FRESH_TICKS * self._tick_s),
            gap_s=max(limits.gap_s, _GAP_TICKS * self._tick_s),
        )


def _limits(elastic: ElasticConfig, card_bytes: int | None) -> Limits:
    limits = limits_for(TIB if card_bytes is None else card_bytes)
    hold_most_s = limits.hold_most_s / limits.hold_s * elastic.hold_s
    return replace(
        limits,
        cushion_bytes=elastic.cushion_bytes or limits.cushion_bytes,
        margin_bytes=elastic.margin_bytes or limits.margin_bytes,
        growth_step_bytes=elastic.growth_step_bytes or limits.growth_step_bytes,
        hold_s=elastic.hold_s,
        window_s=elastic.window_s,
        hold_most_s=hold_most_s,
    )


def _by_hand(elastic: ElasticConfig) -> Limits:
    """Nothing is kept free, nothing grows by itself, and nothing is too small to be asked for."""
    return Limits(
        cushion_bytes=0,
        margin_bytes=0,
        growth_step_bytes=TIB,
        hold_s=math.inf,
        hold_most_s=math.inf,
        sessions_count=0,
        window_s=elastic.window_s,
    )
