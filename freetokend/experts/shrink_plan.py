"""What a smaller cache keeps: a pure function of which slot holds what and how hot it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from freetokend.core.errors import InternalError
from freetokend.experts.residency import EMPTY, HELD_FROM

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMove:
    """An expert that changes its slot: its bytes, its key and its entry go along."""

    from_slot: int
    to_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkPlan:
    """moves: none overlaps another, every source lies at or behind the new end and every target
    below it; dropped_slots: those whose experts go, ascending. A target of a move that held an
    expert is one of them.
    """

    moves: tuple[SlotMove, ...]
    dropped_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerm:
    """What the plan kernel's order takes off a key for each layer that is still to come."""

    experts_per_layer_count: int
    ticks_per_layer: int

    def keys(self, expert_of_slot: Ints, slot_key: Ints) -> Ints:
        """The order of eviction between two steps, when layer 0 is next and the last is the
        farthest: int64 [slots], meaningless for empty ones."""
        layers = expert_of_slot.astype(np.int64) // self.experts_per_layer_count
        return slot_key - self.ticks_per_layer * layers


PLAIN_KEYS: Final = LayerTerm(experts_per_layer_count=1, ticks_per_layer=0)


def held_slots(expert_of_slot: Ints, slot_key: Ints) -> npt.NDArray[np.intp]:
    """Slots whose experts must not be evicted, ascending."""
    return np.flatnonzero((expert_of_slot != EMPTY) & (slot_key >= HELD_FROM))


def plan_shrink(
    expert_of_slot: Ints, slot_key: Ints, slots_count: int, term: LayerTerm = PLAIN_KEYS
) -> ShrinkPlan:
    """Keep the hottest experts in the first `slots_count` of the slots that exist now.

    expert_of_slot [slots now], slot_key [slots now]. What goes first is what the plan kernel would
    evict first, asked between two steps: the least key less the layer's term, ties by lower slot.
    With that the moves are the fewest possible:
    exactly the kept experts at or behind the new end, into empty slots first and then into those
    of the coldest experts that go. InternalError when more are held than slots remain.
    """
    occupied = np.flatnonzero(expert_of_slot != EMPTY)
    keys = term.keys(expert_of_slot, slot_key)
    coldest_first = occupied[np.argsort(keys[occupied], kind="stable")]
    dropped_count = max(0, occupied.size - slots_count)
    dropped, kept = coldest_first[:dropped_count], coldest_first[dropped_count:]
    if dropped.size and slot_key[dropped[-1]] >= HELD_FROM:
        raise InternalError(
            f"{held_slots(expert_of_slot, slot_key).size} slots are held and only {slots_count} "
            "would remain"
        )
    sources = np.sort(kept[kept >= slots_count])
    empty = np.flatnonzero(expert_of_slot[:slots_count] == EMPTY)
    targets = np.concatenate((empty, dropped[dropped < slots_count]))
    return ShrinkPlan(
        moves=tuple(
            SlotMove(from_slot=int(source), to_slot=int(target))
            for source, target in zip(sources, targets, strict=False)
        ),
        dropped_slots=tuple(int(slot) for slot in np.sort(dropped)),
    )
