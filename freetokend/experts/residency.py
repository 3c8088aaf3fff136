"""Which expert lies in which slot: arrays at stable addresses on the device.

The plan kernel reads and writes them in every MoE layer, the slot pool at a resize; both hold the
addresses for good, so the tensors are sized for the largest pool and never replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from freetokend.core.errors import InternalError
from freetokend.policy.eviction import NEVER

NOT_RESIDENT: Final = -1
EMPTY: Final = -1
NEVER_DEMANDED: Final = -1
# Added to the key of a slot that must not be evicted (a layer that prefill is using); taken off
# again it leaves the key that the slot would have without.
HELD: Final = 1 << 62
# Keys from here on are held; those of eviction orders keep within 2 ^ 42 of 0.
HELD_FROM: Final = 1 << 61


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyState:
    """The arrays, all on one device and contiguous.

    slot_of_expert: int32 [experts], NOT_RESIDENT where an expert has no slot
    expert_of_slot: int32 [capacity], EMPTY where a slot holds nothing
    slot_key: int64 [capacity], order of eviction, least first; from HELD_FROM on never
    evicted: key + HELD
    demanded_at: int64 [experts], clock of the last call that asked, NEVER_DEMANDED before
    score: int64 [experts], the eviction order's, NEVER before the first use
    clock: int64 [1], one up with each plan call
    slots_count: int32 [1], slots [0, slots_count) exist
    """

    slot_of_expert: torch.Tensor
    expert_of_slot: torch.Tensor
    slot_key: torch.Tensor
    demanded_at: torch.Tensor
    score: torch.Tensor
    clock: torch.Tensor
    slots_count: torch.Tensor

    def __post_init__(self) -> None:
        for name, tensor, dtype in (
            ("slot_of_expert", self.slot_of_expert, torch.int32),
            ("expert_of_slot", self.expert_of_slot, torch.int32),
            ("slot_key", self.slot_key, torch.int64),
            ("demanded_at", self.demanded_at, torch.int64),
            ("score", self.score, torch.int64),
            ("clock", self.clock, torch.int64),
            ("slots_count", self.slots_count, torch.int32),
        ):
            if tensor.dtype is not dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise InternalError(
                    f"{name} of the residency state is {tensor.dtype} {list(tensor.shape)}; it "
                    f"must be a contiguous vector of {dtype}"
                )
        if (
            self.demanded_at.shape != self.slot_of_expert.shape
            or self.score.shape != self.slot_of_expert.shape
            or self.slot_key.shape != self.expert_of_slot.shape
            or self.clock.numel() != 1
            or self.slots_count.numel() != 1
        ):
            raise InternalError("the arrays of the residency state do not fit each other")

    @classmethod
    def empty(
        cls, *, experts_count: int, slots_capacity: int, device: torch.device | str = "cpu"
    ) -> ResidencyState:
        """Nothing resident, no slots yet, clock 0. InternalError for counts that int32 lacks."""
        if not (0 < experts_count < 1 << 31 and 0 <= slots_capacity < 1 << 31):
            raise InternalError(
                f"{experts_count} experts and {slots_capacity} slots cannot be numbered in int32"
            )
        return cls(
            slot_of_expert=_filled(experts_count, NOT_RESIDENT, torch.int32, device),
            expert_of_slot=_filled(slots_capacity, EMPTY, torch.int32, device),
            slot_key=_filled(slots_capacity, 0, torch.int64, device),
            demanded_at=_filled(experts_count, NEVER_DEMANDED, torch.int64, device),
            score=_filled(experts_count, NEVER, torch.int64, device),
            clock=_filled(1, 0, torch.int64, device),
            slots_count=_filled(1, 0, torch.int32, device),
        )

    @property
    def experts_count(self) -> int:
        """Experts of the whole model."""
        return self.slot_of_expert.numel()

    @property
    def slots_capacity(self) -> int:
        """The most slots there can ever be."""
        return self.expert_of_slot.numel()


def _filled(count: int, value: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return torch.full((count,), value, dtype=dtype, device=device)
