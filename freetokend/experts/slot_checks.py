"""Whether a cache is what it says: the invariants of its arrays, its memory and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from freetokend.core.errors import InternalError
from freetokend.device.arena import Arena, rounded_up
from freetokend.device.copier import SlotCopier
from freetokend.experts.bank import MappedBank
from freetokend.experts.residency import EMPTY, HELD_FROM, NEVER_DEMANDED, NOT_RESIDENT

# Records that are copied to a device and compared before anything is served.
SAMPLE_COUNT: Final = 8

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Copies of a `ResidencyState`'s arrays on the host."""

    slot_of_expert: Ints
    expert_of_slot: Ints
    slot_key: Ints
    demanded_at: Ints
    clock: int
    slots_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDifference:
    """A slot that does not hold its expert's record: the first byte that differs."""

    slot: int
    expert_id: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a comparison of slots with the pool found."""

    compared_count: int
    compared_bytes: int
    differences: tuple[SlotDifference, ...]


def check_residency(now: Residency, slots_count: int) -> None:
    """The arrays agree with each other and with the number of slots; else InternalError."""
    if now.slots_count != slots_count:
        raise InternalError(
            f"the device has {now.slots_count} slots and the slot pool {slots_count}"
        )
    _check_slots(now)
    _check_experts(now)
    for expert in np.flatnonzero(
        (now.demanded_at > now.clock) | (now.demanded_at < NEVER_DEMANDED)
    ):
        raise InternalError(
            f"expert {expert} was last demanded at {now.demanded_at[expert]} and the clock says "
            f"{now.clock}"
        )


def _check_slots(now: Residency) -> None:
    experts_count = now.slot_of_expert.size
    for slot in np.flatnonzero(
        (now.expert_of_slot < EMPTY) | (now.expert_of_slot >= experts_count)
    ):
        raise InternalError(
            f"slot {slot} holds expert {now.expert_of_slot[slot]} of {experts_count} experts"
        )
    occupied = np.flatnonzero(now.expert_of_slot != EMPTY)
    for slot in occupied[occupied >= now.slots_count]:
        raise InternalError(
            f"slot {slot} holds expert {now.expert_of_slot[slot]} although there are only "
            f"{now.slots_count} slots"
        )
    for slot in occupied[now.slot_of_expert[now.expert_of_slot[occupied]] != occupied]:
        expert = now.expert_of_slot[slot]
        raise InternalError(
            f"slot {slot} holds expert {expert}, which is said to be in slot "
            f"{now.slot_of_expert[expert]}"
        )
    for slot in np.flatnonzero((now.expert_of_slot == EMPTY) & (now.slot_key >= HELD_FROM)):
        raise InternalError(f"slot {slot} is held although it is empty")


def _check_experts(now: Residency) -> None:
    for expert in np.flatnonzero(
        (now.slot_of_expert < NOT_RESIDENT) | (now.slot_of_expert >= now.slots_count)
    ):
        raise InternalError(
            f"expert {expert} is said to be in slot {now.slot_of_expert[expert]} of "
            f"{now.slots_count} slots"
        )
    resident = np.flatnonzero(now.slot_of_expert != NOT_RESIDENT)
    for expert in resident[now.expert_of_slot[now.slot_of_expert[resident]] != resident]:
        slot = now.slot_of_expert[expert]
        raise InternalError(
            f"expert {expert} is said to be in slot {slot}, which holds expert "
            f"{now.expert_of_slot[slot]}"
        )


def check_memory(arena: Arena, needed_bytes: int) -> None:
    """The arena holds what the slots need and no more, and the driver shows the same."""
    wanted_bytes = rounded_up(needed_bytes, arena.granularity_bytes)
    if arena.committed_bytes != wanted_bytes:
        raise InternalError(
            f"the slots need {wanted_bytes} bytes and the arena has committed "
            f"{arena.committed_bytes}"
        )
    claimed_bytes = arena.claimed_bytes()
    if claimed_bytes != wanted_bytes:
        raise InternalError(
            f"the arena has committed {wanted_bytes} bytes and the driver shows {claimed_bytes}"
        )


def spread(total: int, count: int) -> list[int]:
    """So many numbers from all over [0, total), the first and the last among them from two on."""
    return [(total - 1) * index // max(count - 1, 1) for index in range(count)]


def compare_slots(
    expert_of_slot: Ints,
    mapped: MappedBank,
    base_address: int,
    copier: SlotCopier,
    progress: Callable[[], None] = lambda: None,
) -> VerifyReport:
    """Every occupied slot against the pool's record of its expert. progress: after each."""
    bank = mapped.bank
    differences = []
    occupied = np.flatnonzero(expert_of_slot != EMPTY)
    for slot in map(int, occupied):
        expert_id = int(expert_of_slot[slot])
        offset_bytes = copier.first_difference(
            base_address + slot * bank.record_bytes,
            mapped.region_address + bank.record_offset_bytes(expert_id),
            bank.record_bytes,
        )
        if offset_bytes is not None:
            differences.append(
                SlotDifference(slot=slot, expert_id=expert_id, offset_bytes=offset_bytes)
            )
        progress()
    return VerifyReport(
        compared_count=int(occupied.size),
        compared_bytes=int(occupied.size) * bank.record_bytes,
        differences=tuple(differences),
    )
