"""What a trace would have cost: the misses of caches and placements in its decode steps.

A miss is an expert that a layer of a decode step needs and that is not on the device when that
layer is planned; several tokens that need it count once. Prefill steps stream every layer whatever
the policy, so their transfers are not counted, only what they leave behind:

- a cache takes the missing experts of a layer into its coldest slots, never those of this layer
  or, with room for two layers, of the one before. Per layer, the `kept_per_layer` experts that most
  tokens used stay with a normal key; what else was streamed may go first;
- the placement updated at prefill then holds, per layer, the experts that most tokens used;
- the optimum may keep any of the experts that pass by.

A layer that skipped every token of a step does not count as having had its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from freetokend.policy.eviction import COLDEST, NEVER, EvictionOrder
from freetokend.traces.trace import SKIPPED, Phase, RoutingTrace, TraceShape

# Keys lie between COLDEST and 2 ^ 41, and key * slots + slot must stay an int64.
MAX_SLOTS: Final = 1 << 20
_NO_NEXT_USE: Final = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Distinct experts per layer and decode step, summed; fills of the decode steps."""

    needed_count: int
    missed_count: int
    fills_count: int = 0

    @property
    def ratio(self) -> float:
        """Misses per needed expert; 0 for a trace without decode steps."""
        return self.missed_count / self.needed_count if self.needed_count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One layer of one step, and the tokens it computed.

    needed: distinct experts of the layer, ascending; uses: by token.
    """

    phase: Phase
    layer: int
    tokens_count: int
    needed: tuple[int, ...]
    uses: tuple[int, ...]


def layer_calls(trace: RoutingTrace) -> tuple[LayerCall, ...]:
    """The trace as replays want it: made once, replayed many times."""
    return tuple(_calls(trace))


def _calls(trace: RoutingTrace) -> Iterator[LayerCall]:
    for step in trace.steps:
        for layer, rows in enumerate(step.ids):
            ids = rows[rows[:, 0] != SKIPPED]
            if not len(ids):
                continue
            needed, uses = np.unique(ids, return_counts=True)
            yield LayerCall(
                phase=step.phase,
                layer=layer,
                tokens_count=len(ids),
                needed=tuple(needed.tolist()),
                uses=tuple(uses.tolist()),
            )


def _most_used(call: LayerCall, count: int) -> list[int]:
    """The `count` experts of the layer that most tokens used; equal ones by lower number."""
    ranked = sorted(zip(call.uses, call.needed, strict=True), key=lambda one: (-one[0], one[1]))
    return [expert for _, expert in ranked[:count]]


class CacheReplay:
    """One cache over all layers, with the arrays and the choices of a plan kernel."""

    def __init__(
        self,
        shape: TraceShape,
        order: EvictionOrder,
        slots_count: int,
        *,
        kept_per_layer: int = 0,
        fill_ratio: float = 1.0,
    ) -> None:
        """fill_ratio: share of a call's misses that is filled (at least one); others stay out."""
        if not 1 <= slots_count <= MAX_SLOTS:
            raise ValueError(f"{slots_count} slots, not 1 to {MAX_SLOTS}")
        self._shape = shape
        self._order = order
        self._kept_per_layer = kept_per_layer
        self._fill_ratio = fill_ratio
        self._clock = 0
        self._slot_of_expert = [-1] * shape.experts_count
        self._score = [NEVER] * shape.experts_count
        self._demanded_at = [-1] * shape.experts_count
        self._expert_of_slot = np.full(slots_count, -1, dtype=np.int64)
        self._layer_of_slot = np.zeros(slots_count, dtype=np.int64)
        # Empty slots go first: they are colder than COLDEST.
        self._slot_key = np.full(slots_count, 2 * COLDEST, dtype=np.int64)
        self._slot_index = np.arange(slots_count, dtype=np.int64)
        self._empty_count = slots_count
        layers = np.arange(shape.layers_count, dtype=np.int64)
        # [layer of the call, layer of the slot]: what the slot's key loses.
        ahead = (layers[None, :] - layers[:, None] - 1) % shape.layers_count + 1
        self._lost_ticks = ahead * order.ticks_per_layer

    @property
    def resident(self) -> frozenset[int]:
        """The expert_ids on the device."""
        return frozenset(self._expert_of_slot[self._expert_of_slot >= 0].tolist())

    def run(self, calls: tuple[LayerCall, ...]) -> Misses:
        """Replay the calls in order; counts decode only."""
        needed = missed = fills = 0
        for call in calls:
            self._clock += 1
            if call.phase is Phase.PREFILL:
                self._prefill(call)
                continue
            needed += len(call.needed)
            misses = self._decode_hits(call)
            missed += len(misses)
            if misses:
                fills += self._fill_misses(call, misses)
            first = call.layer * self._shape.experts_per_layer
            for expert in call.needed:
                self._demanded_at[first + expert] = self._clock
        return Misses(needed_count=needed, missed_count=missed, fills_count=fills)

    def _decode_hits(self, call: LayerCall) -> list[int]:
        """Stamp what is there; returns the missing expert_ids."""
        order, clock, first = self._order, self._clock, call.layer * self._shape.experts_per_layer
        misses = []
        for expert in call.needed:
            expert_id = first + expert
            score = self._score[expert_id] = order.score_on_use(self._score[expert_id], clock)
            slot = self._slot_of_expert[expert_id]
            if slot < 0:
                misses.append(expert_id)
            else:
                self._slot_key[slot] = order.key(score, clock)
        return misses

    def _fill_misses(self, call: LayerCall, misses: list[int]) -> int:
        """Fill the share that is to be filled, the most recently demanded first."""
        first = call.layer * self._shape.experts_per_layer
        held = [self._slot_of_expert[first + expert] for expert in call.needed]
        wanted = max(1, round(self._fill_ratio * len(misses)))
        misses.sort(key=lambda expert_id: (-self._demanded_at[expert_id], expert_id))
        victims = self._victims(call.layer, wanted, held=[slot for slot in held if slot >= 0])
        for expert_id, slot in zip(misses, victims, strict=False):
            self._put(expert_id, slot, self._order.key(self._score[expert_id], self._clock))
        return len(victims)

    def _prefill(self, call: LayerCall) -> None:
        shape, order, clock = self._shape, self._order, self._clock
        first = call.layer * shape.experts_per_layer
        for expert, uses in zip(call.needed, call.uses, strict=True):
            before = self._score[first + expert]
            self._score[first + expert] = order.score_on_prompt(
                before, clock, uses, call.tokens_count
            )
        kept = [first + expert for expert in _most_used(call, self._kept_per_layer)]
        for expert_id in kept:
            slot = self._slot_of_expert[expert_id]
            if slot >= 0:
                self._slot_key[slot] = order.key(self._score[expert_id], clock)
        layer_ids = range(first, first + shape.experts_per_layer)
        missing = [one for one in kept if self._slot_of_expert[one] < 0]
        kept_set = set(kept)
        missing += [
            one for one in layer_ids if self._slot_of_expert[one] < 0 and one not in kept_set
        ]
        occupied = self._expert_of_slot >= 0
        held = occupied & (self._layer_of_slot == call.layer)
        if len(self._slot_key) > 2 * shape.experts_per_layer:
            held |= occupied & (self._layer_of_slot == call.layer - 1)
        victims = self._victims(call.layer, len(missing), held=np.flatnonzero(held))
        for expert_id, slot in zip(missing, victims, strict=False):
            hot = expert_id in kept_set
            key = order.key(self._score[expert_id], clock) if hot else COLDEST
            self._put(expert_id, slot, key)

    def _victims(self, layer: int, count: int, *, held: list[int] | NDArray[np.int64]) -> list[int]:
        """The first `count` slots in victim order but the held; fewer if there are no more."""
        if 0 < count <= self._empty_count:
            start = len(self._slot_key) - self._empty_count
            return list(range(start, start + count))
        ranks = self._slot_key - self._lost_ticks[layer][self._layer_of_slot]
        ranks *= len(ranks)
        ranks += self._slot_index
        ranks[held] = np.iinfo(np.int64).max
        count = min(count, len(ranks) - len(held))
        if count == 0:
            return []
        nearest = np.argpartition(ranks, count - 1)[:count]
        found: list[int] = nearest[np.argsort(ranks[nearest])].tolist()
        return found

    def _put(self, expert_id: int, slot: int, key: int) -> None:
        before = int(self._expert_of_slot[slot])
        if before >= 0:
            self._slot_of_expert[before] = -1
        else:
            self._empty_count -= 1
        self._slot_of_expert[expert_id] = slot
        self._expert_of_slot[slot] = expert_id
        self._layer_of_slot[slot] = expert_id // self._shape.experts_per_layer
        self._slot_key[slot] = key


def replay_cache(
    shape: TraceShape,
    calls: tuple[LayerCall, ...],
    order: EvictionOrder,
    slots_count: int,
    *,
    keep_prompts: bool = True,
    fill_ratio: float = 1.0,
) -> Misses:
    """One cache for all layers, empty at first.

    keep_prompts: a prompt may leave behind, per layer, an even share of the slots; else nothing.
    """
    kept = slots_count // shape.layers_count if keep_prompts else 0
    cache = CacheReplay(shape, order, slots_count, kept_per_layer=kept, fill_ratio=fill_ratio)
    return cache.run(calls)


def replay_static(shape: TraceShape, calls: tuple[LayerCall, ...], slots_count: int) -> Misses:
    """The first experts of every layer, chosen without a look at the routing."""
    return _replay_placement(shape, calls, slots_count, updated=False)


def replay_placement(shape: TraceShape, calls: tuple[LayerCall, ...], slots_count: int) -> Misses:
    """Per layer the experts that most tokens of the last prompt used; at first as `static`."""
    return _replay_placement(shape, calls, slots_count, updated=True)


def _replay_placement(
    shape: TraceShape, calls: tuple[LayerCall, ...], slots_count: int, *, updated: bool
) -> Misses:
    share, more = divmod(slots_count, shape.layers_count)
    sizes = [share + (layer < more) for layer in range(shape.layers_count)]
    placed = [set(range(size)) for size in sizes]
    needed = missed = 0
    for call in calls:
        if call.phase is Phase.DECODE:
            needed += len(call.needed)
            missed += sum(expert not in placed[call.layer] for expert in call.needed)
        elif updated:
            hottest = _most_used(call, sizes[call.layer])
            hottest += [one for one in range(shape.experts_per_layer) if one not in call.needed]
            placed[call.layer] = set(hottest[: sizes[call.layer]])
    return Misses(needed_count=needed, missed_count=missed)


def replay_optimum(shape: TraceShape, calls: tuple[LayerCall, ...], slots_count: int) -> Misses:
    """The fewest misses that any cache on demand can have, knowing the future (Belady's MIN).

    A missing expert may be computed elsewhere and stay out, and a prompt offers every expert of
    its layers for nothing, so no order of eviction and no share of fills does better.
    """
    size, per_layer = slots_count, shape.experts_per_layer
    next_uses = _next_uses(shape, calls)
    next_use = [times[0] if times else _NO_NEXT_USE for times in next_uses]
    position = [0] * shape.experts_count
    resident: set[int] = set()
    farthest: list[tuple[int, int]] = []  # (-next use, expert_id); stale entries are skipped
    needed = missed = fills = 0
    for call in calls:
        first = call.layer * per_layer
        if call.phase is Phase.DECODE:
            offered = [first + expert for expert in call.needed]
            absent = [one for one in offered if one not in resident]
            needed += len(offered)
            missed += len(absent)
            for one in offered:
                position[one] += 1
                times = next_uses[one]
                next_use[one] = times[position[one]] if position[one] < len(times) else _NO_NEXT_USE
        else:
            offered = [one for one in range(first, first + per_layer) if one not in resident]
            absent = offered
        resident.update(absent)
        for one in offered:
            heappush(farthest, (-next_use[one], one))
        while len(resident) > size:
            negative, one = heappop(farthest)
            if one in resident and -negative == next_use[one]:
                resident.remove(one)
        if call.phase is Phase.DECODE:
            fills += sum(one in resident for one in absent)
    return Misses(needed_count=needed, missed_count=missed, fills_count=fills)


def _next_uses(shape: TraceShape, calls: tuple[LayerCall, ...]) -> list[list[int]]:
    """By expert_id: the indices of the decode calls that need it, ascending."""
    uses: list[list[int]] = [[] for _ in range(shape.experts_count)]
    for index, call in enumerate(calls):
        if call.phase is Phase.DECODE:
            for expert in call.needed:
                uses[call.layer * shape.experts_per_layer + expert].append(index)
    return uses
