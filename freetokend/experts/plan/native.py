"""The plan call in C++, for a cache whose state lies in host memory."""

from __future__ import annotations

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.plan.contract import (
    KernelOrder,
    PlanInputs,
    PlanOutputs,
    PlanShape,
    order_ticks,
    require_int32,
)
from freetokend.experts.residency import ResidencyState
from freetokend.native.cache_plan import CacheArrays, CachePlanner, CacheShape, PlanAddresses
from freetokend.tensor.memory import address_of


class NativePlanner:
    """`contract.CachePlanner` on the CPU; a call is done when it returns.

    InternalError for whatever contradicts the contract; nothing has changed then.
    """

    def __init__(self, state: ResidencyState, shape: PlanShape, order: KernelOrder) -> None:
        if state.experts_count != shape.moe_layers_count * shape.experts_per_layer_count:
            raise InternalError(
                f"a state of {state.experts_count} experts is not that of "
                f"{shape.moe_layers_count} layers of {shape.experts_per_layer_count}"
            )
        self._state = state  # keeps the memory
        self._shape = shape
        half_life_ticks, ticks_per_layer = order_ticks(order)
        self._planner = CachePlanner(
            cache_arrays(state),
            CacheShape(
                layers_count=shape.moe_layers_count,
                experts_per_layer_count=shape.experts_per_layer_count,
                cpu_kernel=shape.cpu_kernel,
                half_life_ticks=half_life_ticks,
                ticks_per_layer=ticks_per_layer,
            ),
        )

    def plan(self, moe_layer_index: int, inputs: PlanInputs, outputs: PlanOutputs) -> None:
        """One MoE layer of a decode step."""
        inputs.check(self._shape)
        outputs.check(self._shape)
        buckets_count, columns_count = inputs.fill_count.shape
        self._planner.plan(
            moe_layer_index,
            PlanAddresses(
                routed=address_of(inputs.routed, torch.int32),
                tokens_capacity=self._shape.tokens_capacity,
                top_k=self._shape.top_k,
                valid_tokens=address_of(inputs.valid_tokens, torch.int32),
                fillable=address_of(inputs.fillable, torch.int32),
                fill_count=address_of(inputs.fill_count, torch.int32),
                buckets_count=buckets_count,
                misses_capacity=columns_count - 1,
                physical=address_of(outputs.physical, torch.int32),
                fills=address_of(outputs.fills, torch.int32),
                fills_count=address_of(outputs.fills_count, torch.int32),
                cpu=address_of(outputs.cpu, torch.int32),
                cpu_count=address_of(outputs.cpu_count, torch.int32),
                stats=address_of(outputs.stats, torch.int64),
            ),
        )

    def reserve(
        self,
        moe_layer_index: int,
        inputs: PlanInputs,
        outputs: PlanOutputs,
        *,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """Slots for a layer, held until `release`."""
        inputs.check(self._shape)
        outputs.check(self._shape)
        if wanted is not None:
            require_int32("wanted", wanted, (self._shape.experts_per_layer_count,))
        self._planner.reserve(
            moe_layer_index,
            fillable=address_of(inputs.fillable, torch.int32),
            wanted=0 if wanted is None else address_of(wanted, torch.int32),
            fills=address_of(outputs.fills, torch.int32),
            fills_count=address_of(outputs.fills_count, torch.int32),
            stats=address_of(outputs.stats, torch.int64),
        )

    def release(
        self, moe_layer_index: int, uses: torch.Tensor, *, tokens_count: int, kept_count: int
    ) -> None:
        """The layer's slots are free again."""
        require_int32("uses", uses, (self._shape.experts_per_layer_count,))
        self._planner.release(
            moe_layer_index,
            uses=address_of(uses, torch.int32),
            tokens_count=tokens_count,
            kept_count=kept_count,
        )


def cache_arrays(state: ResidencyState) -> CacheArrays:
    """The state as native code takes it; the state must outlive whoever gets it."""
    return CacheArrays(
        slot_of_expert=address_of(state.slot_of_expert, torch.int32),
        expert_of_slot=address_of(state.expert_of_slot, torch.int32),
        slot_key=address_of(state.slot_key, torch.int64),
        demanded_at=address_of(state.demanded_at, torch.int64),
        score=address_of(state.score, torch.int64),
        clock=address_of(state.clock, torch.int64),
        slots_count=address_of(state.slots_count, torch.int32),
        slots_capacity=state.slots_capacity,
    )
