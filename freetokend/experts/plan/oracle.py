"""The plan call in plain Python: what the other implementations must agree with.

Lists and sets, nothing clever and nothing fast; the steps are those of `contract`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from freetokend.core.errors import InternalError
from freetokend.experts.plan.contract import CPU, DEFERRED, EMPTY_RANK, NONE, Stat
from freetokend.experts.residency import (
    EMPTY,
    HELD,
    HELD_FROM,
    NEVER_DEMANDED,
    NOT_RESIDENT,
)
from freetokend.policy.eviction import COLDEST, NEVER, EvictionOrder


@dataclass(slots=True, kw_only=True)
class OracleState:
    """The arrays of `ResidencyState` as lists."""

    slot_of_expert: list[int]
    expert_of_slot: list[int]
    slot_key: list[int]
    demanded_at: list[int]
    score: list[int]
    clock: int = 0
    slots_count: int = 0

    @classmethod
    def empty(cls, *, experts_count: int, slots_capacity: int) -> OracleState:
        """Nothing resident and no slots yet."""
        return cls(
            slot_of_expert=[NOT_RESIDENT] * experts_count,
            expert_of_slot=[EMPTY] * slots_capacity,
            slot_key=[0] * slots_capacity,
            demanded_at=[NEVER_DEMANDED] * experts_count,
            score=[NEVER] * experts_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleResult:
    """The outputs of `PlanOutputs`, lists up to their counts."""

    physical: list[list[int]] = field(default_factory=list)
    fills: list[tuple[int, int]]
    cpu: list[int] = field(default_factory=list)
    stats: dict[Stat, int]


@dataclass(slots=True, kw_only=True)
class OraclePlanner:
    """`CachePlanner` over lists. `state` may be changed by others between calls."""

    layers_count: int
    experts_per_layer_count: int
    cpu_kernel: bool
    order: EvictionOrder
    state: OracleState

    def plan(
        self,
        layer: int,
        routed: Sequence[Sequence[int]],
        *,
        valid_tokens: int,
        fillable: bool,
        fill_count: Sequence[Sequence[int]],
    ) -> OracleResult:
        """One MoE layer of a decode step."""
        state = self.state
        first = layer * self.experts_per_layer_count
        uses = Counter(e for row in routed[:valid_tokens] for e in row if e >= 0)
        for expert in uses:
            if expert >= self.experts_per_layer_count:
                raise InternalError(f"expert {expert} of {self.experts_per_layer_count}")
        state.clock += 1
        needed = sorted(first + expert for expert in uses)
        hits = [one for one in needed if state.slot_of_expert[one] != NOT_RESIDENT]
        misses = [one for one in needed if state.slot_of_expert[one] == NOT_RESIDENT]

        evictable = self._evictable({state.slot_of_expert[one] for one in hits})
        wanted = self._wanted_fills(len(misses), uses, fillable, fill_count)
        latest = sorted(misses, key=lambda one: (-state.demanded_at[one], one))
        filled = sorted(latest[: min(wanted, len(evictable))])
        left = [one for one in misses if one not in filled]

        fills, evictions = self._place(layer, filled, evictable)
        for one in needed if self.cpu_kernel else hits + filled:
            state.score[one] = self.order.score_on_use(state.score[one], state.clock)
            state.demanded_at[one] = state.clock
        for one in hits + filled:
            slot = state.slot_of_expert[one]
            held = HELD if self._is_held(slot) else 0
            state.slot_key[slot] = self.order.key(state.score[one], state.clock) + held

        def physical(token: int, expert: int) -> int:
            if token >= valid_tokens or expert < 0:
                return NONE
            slot = state.slot_of_expert[first + expert]
            if slot != NOT_RESIDENT:
                return slot
            return CPU if self.cpu_kernel else DEFERRED

        return OracleResult(
            physical=[[physical(t, e) for e in row] for t, row in enumerate(routed)],
            fills=fills,
            cpu=[one - first for one in left] if self.cpu_kernel else [],
            stats={
                Stat.HITS: len(hits),
                Stat.MISSES: len(misses),
                Stat.FILLS: len(fills),
                Stat.CPU: len(left) if self.cpu_kernel else 0,
                Stat.EVICTIONS: evictions,
                Stat.DEFERRED: 0 if self.cpu_kernel else len(left),
                Stat.HIT_PAIRS: sum(uses[one - first] for one in hits),
                Stat.PAIRS: uses.total(),
                Stat.REFUSED: 0,
            },
        )

    def reserve(
        self, layer: int, *, fillable: bool, wanted: Sequence[int] | None = None
    ) -> OracleResult:
        """Slots for a layer, held until `release`."""
        state = self.state
        experts = self._experts(layer)
        if wanted is not None:
            experts = [one for one in experts if wanted[one % self.experts_per_layer_count] != 0]
        missing = [one for one in experts if state.slot_of_expert[one] == NOT_RESIDENT]
        evictable = self._evictable({state.slot_of_expert[one] for one in self._experts(layer)})
        filled = missing[: len(evictable)] if fillable else []
        fills, evictions = self._place(layer, filled, evictable)
        for one in experts:
            slot = state.slot_of_expert[one]
            if slot != NOT_RESIDENT and not self._is_held(slot):
                state.slot_key[slot] += HELD
        stats = dict.fromkeys(Stat, 0) | {
            Stat.HITS: len(experts) - len(missing),
            Stat.MISSES: len(missing),
            Stat.FILLS: len(fills),
            Stat.EVICTIONS: evictions,
            Stat.DEFERRED: len(missing) - len(fills),
        }
        return OracleResult(fills=fills, stats=stats)

    def release(
        self, layer: int, uses: Sequence[int], *, tokens_count: int, kept_count: int
    ) -> None:
        """The layer's slots are free again."""
        state = self.state
        state.clock += 1
        first = layer * self.experts_per_layer_count
        for one in self._experts(layer):
            if uses[one - first] > 0:
                state.score[one] = self.order.score_on_prompt(
                    state.score[one], state.clock, uses[one - first], tokens_count
                )
        held = [
            one
            for one in self._experts(layer)
            if state.slot_of_expert[one] != NOT_RESIDENT
            and self._is_held(state.slot_of_expert[one])
        ]
        most_used = sorted(held, key=lambda one: (-uses[one - first], one))
        kept = [one for one in most_used[:kept_count] if uses[one - first] > 0]
        for one in held:
            state.slot_key[state.slot_of_expert[one]] -= HELD
        for one in kept:
            state.slot_key[state.slot_of_expert[one]] = self.order.key(
                state.score[one], state.clock
            )
            state.demanded_at[one] = state.clock

    def _wanted_fills(
        self,
        misses_count: int,
        uses: Counter[int],
        fillable: bool,
        fill_count: Sequence[Sequence[int]],
    ) -> int:
        """q before slots are considered."""
        if not fillable or misses_count == 0:
            return 0
        if not self.cpu_kernel:
            return misses_count
        tokens_per_expert = -(-uses.total() // len(uses))
        bucket = min(len(fill_count) - 1, (tokens_per_expert - 1).bit_length())
        row = fill_count[bucket]
        return min(max(row[min(misses_count, len(row) - 1)], 1), misses_count)

    def _evictable(self, in_use: set[int]) -> list[int]:
        """Slots that may be evicted, ascending."""
        return [
            slot
            for slot in range(self.state.slots_count)
            if slot not in in_use and not self._is_held(slot)
        ]

    def _place(
        self, layer: int, filled: list[int], evictable: list[int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Put the experts into the first slots in victim order; fills and number of evictions."""
        state = self.state
        victims = sorted(evictable, key=lambda slot: (self._rank(layer, slot), slot))
        fills = list(zip(filled, sorted(victims[: len(filled)]), strict=True))
        evictions = 0
        for one, slot in fills:
            if state.expert_of_slot[slot] != EMPTY:
                state.slot_of_expert[state.expert_of_slot[slot]] = NOT_RESIDENT
                evictions += 1
            state.slot_of_expert[one] = slot
            state.expert_of_slot[slot] = one
            state.slot_key[slot] = COLDEST
        return fills, evictions

    def _rank(self, layer: int, slot: int) -> int:
        """Place of a slot in victim order: least first."""
        expert = self.state.expert_of_slot[slot]
        if expert == EMPTY:
            return EMPTY_RANK
        slot_layer = expert // self.experts_per_layer_count
        layers_ahead = (slot_layer - layer - 1) % self.layers_count + 1
        return self.state.slot_key[slot] - self.order.ticks_per_layer * layers_ahead

    def _is_held(self, slot: int) -> bool:
        return self.state.slot_key[slot] >= HELD_FROM

    def _experts(self, layer: int) -> list[int]:
        first = layer * self.experts_per_layer_count
        return list(range(first, first + self.experts_per_layer_count))
