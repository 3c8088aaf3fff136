"""A bank of random records, and what a plan call does to a cache, for tests of the slot pool."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from freetokend.device.arena import Arena
from freetokend.device.copier import CopyRange, HostCopier
from freetokend.experts.bank import MappedBank
from freetokend.experts.residency import EMPTY, HELD, NOT_RESIDENT
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.layout import ExpertBank


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBank:
    """Records of random bytes; `bytes` keeps the memory that `mapped` points to."""

    mapped: MappedBank
    bytes: npt.NDArray[np.uint8] = field(repr=False)


def random_bank(*, layers_count: int, experts_count: int, record_bytes: int) -> RandomBank:
    """A bank of `layers_count` * `experts_count` records that differ everywhere."""
    total = layers_count * experts_count
    data = np.frombuffer(mmap.mmap(-1, total * record_bytes), dtype=np.uint8)  # at a page
    data[:] = np.random.default_rng(7).integers(0, 256, total * record_bytes, dtype=np.uint8)
    bank = ExpertBank(
        format="bf16",
        offset_bytes=0,
        record_bytes=record_bytes,
        moe_layers_count=layers_count,
        experts_per_layer_count=experts_count,
        hidden_size=64,
        intermediate_size=64,
        moe_layer_indices=tuple(range(layers_count)),
        activation="silu",
    )
    return RandomBank(mapped=MappedBank(bank=bank, region_address=data.ctypes.data), bytes=data)


@dataclass(slots=True, kw_only=True)
class Slot:
    """One slot of the model: what it holds and how hot that is."""

    expert: int = EMPTY
    key: int = 0

    @property
    def order(self) -> tuple[bool, int]:
        """Victims first: empty slots, then the least key."""
        return (self.expert != EMPTY, self.key)


class NaiveCache:
    """The cache as a list of slots, and a pool that is kept in the same state step by step."""

    def __init__(self, pool: SlotPool, bank: RandomBank, arena: Arena) -> None:
        self.pool, self.bank, self.arena = pool, bank, arena
        self.slots: list[Slot] = []
        self.clock = 0
        self.base_address = arena.base_address

    def demand(self, experts: list[int]) -> None:
        """What a plan call does: stamp hits, fill misses into the coldest slots not needed now."""
        self.clock += 1
        self.pool.state.clock.fill_(self.clock)
        for expert in experts:
            self.pool.state.demanded_at[expert] = self.clock
            slot = self.slot_of(expert)
            if slot is None:
                slot = self._victim(experts)
                if slot is None:
                    continue
                self._fill(slot, expert)
            if self.slots[slot].key != HELD:
                self._set_key(slot, self.clock)

    def hold(self, expert: int, held: bool) -> None:
        """What prefill does with a layer's slots while it uses them."""
        slot = self.slot_of(expert)
        if slot is not None:
            self._set_key(slot, HELD if held else self.clock)

    def slot_of(self, expert: int) -> int | None:
        """Where an expert lies."""
        found = [index for index, slot in enumerate(self.slots) if slot.expert == expert]
        return found[0] if found else None

    def resident(self) -> dict[int, int]:
        """expert -> key."""
        return {slot.expert: slot.key for slot in self.slots if slot.expert != EMPTY}

    def hottest(self, count: int) -> dict[int, int]:
        """What a cache of `count` slots keeps, by brute force: evict one after the other."""
        slots = [Slot(expert=slot.expert, key=slot.key) for slot in self.slots]
        left = [slot for slot in slots if slot.expert != EMPTY]
        while len(left) > count:
            left.remove(min(left, key=lambda slot: slot.order))
        return {slot.expert: slot.key for slot in left}

    def read_back(self) -> None:
        """Take over the pool's state."""
        state = self.pool.state
        count = int(state.slots_count.item())
        self.slots = [
            Slot(expert=int(state.expert_of_slot[slot]), key=int(state.slot_key[slot]))
            for slot in range(count)
        ]

    def check(self) -> None:
        """The pool is consistent, holds what the model holds, byte for byte, and has not moved."""
        self.pool.check_integrity()
        assert self.arena.base_address == self.pool.base_address == self.base_address
        state = self.pool.state
        for index, slot in enumerate(self.slots):
            assert int(state.expert_of_slot[index]) == slot.expert
            assert slot.expert == EMPTY or int(state.slot_key[index]) == slot.key
        report = self.pool.verify(self.bank.mapped)
        assert report.differences == ()
        assert report.compared_count == len(self.resident())

    def _victim(self, needed: list[int]) -> int | None:
        free = [
            index
            for index, slot in enumerate(self.slots)
            if slot.expert not in needed and slot.key != HELD
        ]
        return min(free, key=lambda index: self.slots[index].order, default=None)

    def _fill(self, slot: int, expert: int) -> None:
        # Slots of the fake GPU are ordinary memory too.
        state = self.pool.state
        old = self.slots[slot].expert
        if old != EMPTY:
            state.slot_of_expert[old] = NOT_RESIDENT
        self.slots[slot].expert = expert
        state.expert_of_slot[slot] = expert
        state.slot_of_expert[expert] = slot
        bank = self.bank.mapped
        source = bank.region_address + bank.bank.record_offset_bytes(expert)
        HostCopier().copy(
            [
                CopyRange(
                    from_address=source,
                    to_address=self.pool.slot_address(slot),
                    length_bytes=self.pool.record_bytes,
                )
            ]
        )

    def _set_key(self, slot: int, key: int) -> None:
        self.slots[slot].key = key
        self.pool.state.slot_key[slot] = key
