"""The slots of the expert cache: their memory, what lies in them, and changes of their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freetokend.core.errors import InternalError, InvalidInputError
from freetokend.device.arena import Arena
from freetokend.device.copier import CopyRange, SlotCopier
from freetokend.experts.bank import MappedBank
from freetokend.experts.residency import EMPTY, NOT_RESIDENT, ResidencyState
from freetokend.experts.shrink_plan import (
    PLAIN_KEYS,
    LayerTerm,
    ShrinkPlan,
    held_slots,
    plan_shrink,
)
from freetokend.experts.slot_checks import (
    Residency,
    VerifyReport,
    check_memory,
    check_residency,
    compare_slots,
)
from freetokend.ftw.formats import PAGE_BYTES

_NAMED_SLOTS_COUNT: Final = 3


class ResizeOutcome(StrEnum):
    """What became of a resize."""

    DONE = "done"
    UNCHANGED = "unchanged"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeResult:
    """The truth after a resize.

    slots_count: slots that exist now; generation: goes up with every change; moved_count,
    dropped_count: experts that changed their slot or lost it; committed_bytes: memory held now;
    note: why it is deferred, else empty.
    """

    outcome: ResizeOutcome
    slots_count: int
    generation: int
    committed_bytes: int
    moved_count: int = 0
    dropped_count: int = 0
    note: str = ""


class SlotPool:
    """Slots of one expert record each in an arena, and the residency state that goes with them.

    Owns the arena and the state's arrays; plan kernels change the state between two resizes.
    Everything here but the plain properties is called at a safe point: nothing that reads or
    writes slots or state is running or queued.
    """

    def __init__(
        self,
        arena: Arena,
        copier: SlotCopier,
        *,
        record_bytes: int,
        experts_count: int,
        slots_capacity: int,
        layer_term: LayerTerm = PLAIN_KEYS,
        device: torch.device | str = "cpu",
    ) -> None:
        """No slots yet. layer_term: of the order by which experts are evicted, for a shrink to
        follow; device: where the state lives, as torch calls it.

        InternalError when the arena's address space is too small for `slots_capacity` records.
        """
        if record_bytes <= 0 or record_bytes % PAGE_BYTES:
            raise InternalError(f"a record of {record_bytes} bytes is not made of whole pages")
        if slots_capacity * record_bytes > arena.reserved_bytes:
            raise InternalError(
                f"{slots_capacity} slots of {record_bytes} bytes do not fit the "
                f"{arena.reserved_bytes} bytes that the arena has reserved"
            )
        self._arena = arena
        self._copier = copier
        self._record_bytes = record_bytes
        self._layer_term = layer_term
        self._base_address = arena.base_address
        self._slots_count = 0
        self._prepared_count = 0
        self._closed = False
        self._generation = 0
        self.state: Final = ResidencyState.empty(
            experts_count=experts_count, slots_capacity=slots_capacity, device=device
        )

    @property
    def base_address(self) -> int:
        """Address of slot 0; slot s lies at base_address + s * record_bytes."""
        return self._base_address

    @property
    def record_bytes(self) -> int:
        """Bytes of a slot: those of a record, which is also the stride."""
        return self._record_bytes

    @property
    def slots_count(self) -> int:
        """Slots that exist."""
        return self._slots_count

    @property
    def slots_capacity(self) -> int:
        """The most slots there can be."""
        return self.state.slots_capacity

    @property
    def generation(self) -> int:
        """Goes up with every resize that changed something."""
        return self._generation

    @property
    def committed_bytes(self) -> int:
        """Memory of the slots, rounded up to the device's granularity."""
        return self._arena.committed_bytes

    def claimed_bytes(self) -> int:
        """The same as the driver or the kernel shows it."""
        return self._arena.claimed_bytes()

    def slot_address(self, slot: int) -> int:
        """Address of a slot; InternalError for one that does not exist."""
        if not 0 <= slot < self._slots_count:
            raise InternalError(f"slot {slot} is outside the {self._slots_count} that exist")
        return self._base_address + slot * self._record_bytes

    def prepare_growth(self, slots_count: int) -> None:
        """Commit the memory of a growth ahead of `resize`, which is then a matter of microseconds.

        The one call that may run beside steps, in a thread of its own: it touches nothing that
        they use. Not beside a resize or another of its kind. Errors as of `resize`; what was
        prepared and is not used goes back at the next resize.
        """
        self._check_count(slots_count)
        self._arena.grow_to(slots_count * self._record_bytes)
        self._prepared_count = max(self._prepared_count, slots_count)

    def resize(self, slots_count: int, *, held_may_move: bool = False) -> ResizeResult:
        """Have exactly this many slots.

        Shrinking keeps the hottest experts and moves those behind the new end below it. Held
        slots always survive: those behind the new end make the answer DEFERRED, with nothing
        changed, unless `held_may_move`, which says that no transfer into them is in flight and
        that their users look the slot up again. Raises InvalidInputError for a number outside
        [0, capacity], `ArenaError` when there is no memory to grow into (nothing has changed
        then), `ResourceError` when memory could not be given back (the slots are gone even so,
        and the next resize tries again).
        """
        self._check_count(slots_count)
        if slots_count >= self._slots_count:
            return self._grow(slots_count)
        return self._shrink(slots_count, held_may_move=held_may_move)

    def check_integrity(self) -> None:
        """Every invariant of slots, state and memory; InternalError names what breaks one."""
        check_residency(self._read(), self._slots_count)
        if self._arena.base_address != self._base_address:
            raise InternalError(
                f"slot 0 was at address {self._base_address:#x} and the arena is now at "
                f"{self._arena.base_address:#x}"
            )
        needed_count = max(self._slots_count, self._prepared_count)
        check_memory(self._arena, needed_count * self._record_bytes)

    def verify(
        self, mapped: MappedBank, progress: Callable[[], None] = lambda: None
    ) -> VerifyReport:
        """Compare the bytes of every resident slot with the pool's record of its expert.

        progress: called after each.
        """
        if (
            mapped.bank.record_bytes != self._record_bytes
            or mapped.bank.experts_count != self.state.experts_count
        ):
            raise InternalError(
                f"the bank has {mapped.bank.experts_count} records of "
                f"{mapped.bank.record_bytes} bytes; the slots are made for "
                f"{self.state.experts_count} of {self._record_bytes}"
            )
        return compare_slots(
            self._read().expert_of_slot[: self._slots_count],
            mapped,
            self._base_address,
            self._copier,
            progress,
        )

    def close(self) -> None:
        """Give the memory back; no address of it may be used any more, and no slot can be had."""
        self._closed = True
        self._slots_count = 0
        self.state.slots_count.fill_(0)
        self._arena.close()

    def _check_count(self, slots_count: int) -> None:
        if self._closed:
            raise InternalError("the cache is closed and its addresses are gone")
        if not 0 <= slots_count <= self.slots_capacity:
            raise InvalidInputError(
                f"the cache can have 0 to {self.slots_capacity} slots, not {slots_count}",
                param="slots",
            )

    def _grow(self, slots_count: int) -> ResizeResult:
        needed_bytes = slots_count * self._record_bytes
        self._arena.grow_to(needed_bytes)
        self._prepared_count = 0
        # What was prepared for more, or what an earlier shrink could not give back.
        self._arena.shrink_to(needed_bytes)
        outcome = ResizeOutcome.UNCHANGED
        if slots_count != self._slots_count:
            outcome = ResizeOutcome.DONE
            self._set_slots_count(slots_count)
        return self._result(outcome)

    def _shrink(self, slots_count: int, *, held_may_move: bool) -> ResizeResult:
        now = self._read()
        note = _why_deferred(now, self._slots_count, slots_count, held_may_move=held_may_move)
        if note:
            return self._result(ResizeOutcome.DEFERRED, note=note)
        plan = plan_shrink(
            now.expert_of_slot[: self._slots_count],
            now.slot_key[: self._slots_count],
            slots_count,
            self._layer_term,
        )
        # All copies come before the state says so: where one fails, the cache is what it was but
        # for targets, which hold experts that go or nothing. They are emptied first.
        self._drop(plan, now)
        self._copier.copy(
            [
                CopyRange(
                    from_address=self.slot_address(move.from_slot),
                    to_address=self.slot_address(move.to_slot),
                    length_bytes=self._record_bytes,
                )
                for move in plan.moves
            ]
        )
        self._move(plan, now)
        self._set_slots_count(slots_count)
        self._prepared_count = 0
        self._arena.shrink_to(slots_count * self._record_bytes)
        return self._result(
            ResizeOutcome.DONE,
            moved_count=len(plan.moves),
            dropped_count=len(plan.dropped_slots),
        )

    def _drop(self, plan: ShrinkPlan, now: Residency) -> None:
        slots = np.array(plan.dropped_slots, dtype=np.intp)
        now.slot_of_expert[now.expert_of_slot[slots]] = NOT_RESIDENT
        now.expert_of_slot[slots] = EMPTY
        now.slot_key[slots] = 0
        self._write(now)

    def _move(self, plan: ShrinkPlan, now: Residency) -> None:
        for move in plan.moves:
            expert = now.expert_of_slot[move.from_slot]
            now.slot_of_expert[expert] = move.to_slot
            now.expert_of_slot[move.to_slot] = expert
            now.slot_key[move.to_slot] = now.slot_key[move.from_slot]
            now.expert_of_slot[move.from_slot] = EMPTY
            now.slot_key[move.from_slot] = 0
        self._write(now)

    def _set_slots_count(self, slots_count: int) -> None:
        self.state.slots_count.fill_(slots_count)
        self._slots_count = slots_count
        self._generation += 1

    def _read(self) -> Residency:
        """Copies of the arrays on the host; waits for the device's current stream."""
        return Residency(
            slot_of_expert=_on_host(self.state.slot_of_expert),
            expert_of_slot=_on_host(self.state.expert_of_slot),
            slot_key=_on_host(self.state.slot_key),
            demanded_at=_on_host(self.state.demanded_at),
            clock=int(self.state.clock.item()),
            slots_count=int(self.state.slots_count.item()),
        )

    def _write(self, residency: Residency) -> None:
        """What a resize changes, in place."""
        self.state.slot_of_expert.copy_(torch.from_numpy(residency.slot_of_expert))
        self.state.expert_of_slot.copy_(torch.from_numpy(residency.expert_of_slot))
        self.state.slot_key.copy_(torch.from_numpy(residency.slot_key))

    def _result(
        self,
        outcome: ResizeOutcome,
        *,
        moved_count: int = 0,
        dropped_count: int = 0,
        note: str = "",
    ) -> ResizeResult:
        return ResizeResult(
            outcome=outcome,
            slots_count=self._slots_count,
            generation=self._generation,
            committed_bytes=self.committed_bytes,
            moved_count=moved_count,
            dropped_count=dropped_count,
            note=note,
        )


def _why_deferred(
    now: Residency, slots_count: int, wanted_count: int, *, held_may_move: bool
) -> str:
    """Why a shrink has to wait, or nothing."""
    held = held_slots(now.expert_of_slot[:slots_count], now.slot_key[:slots_count])
    behind = held[held >= wanted_count]
    if held.size <= wanted_count and (held_may_move or not behind.size):
        return ""
    named = ", ".join(
        f"slot {slot} with expert {now.expert_of_slot[slot]}"
        for slot in behind[:_NAMED_SLOTS_COUNT]
    )
    more = (
        "" if behind.size <= _NAMED_SLOTS_COUNT else f" and {behind.size - _NAMED_SLOTS_COUNT} more"
    )
    return (
        f"the cache keeps its {slots_count} slots for now: a prefill uses {held.size} slots, of "
        f"which {behind.size} lie behind the new end at {wanted_count} ({named}{more}). Repeat the "
        "resize at the end of the layer."
    )


def _on_host(tensor: torch.Tensor) -> npt.NDArray[np.integer]:
    return tensor.detach().to("cpu", copy=True).numpy()
