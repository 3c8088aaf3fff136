"""The plan call in Triton, for a cache whose state lies on a GPU: one launch a call.

Nothing waits for the host: token counts, tables, flags and slots are read on the device, so calls
can be captured in a graph and a resize needs no new one. One program (block of threads) does a
call, because its steps need each other; it reads the slots about four times, from the second
level of cache.
"""

from __future__ import annotations

from typing import Final

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
from freetokend.experts.plan.triton_launch import launch_plan, launch_release, launch_reserve
from freetokend.experts.plan.triton_steps import Sizes
from freetokend.experts.residency import ResidencyState

# Four slots to a thread are enough loads in flight; more only need more registers.
SLOTS_BLOCK: Final = 1024
# Blocks smaller than half of the threads are no faster.
_LEAST_BLOCK: Final = 128
_MOST_PAIRS_BLOCK: Final = 1024
_MAX_PROMPT_TOKENS: Final = (1 << 24) - 1


class TritonPlanner:
    """`contract.CachePlanner` on a GPU, on its current stream.

    Kernels are compiled at the first call of each kind.
    """

    def __init__(
        self,
        state: ResidencyState,
        shape: PlanShape,
        order: KernelOrder,
        *,
        slots_block: int = SLOTS_BLOCK,
    ) -> None:
        """slots_block: slots read at a time, a power of two. InternalError for wrong sizes."""
        if state.experts_count != shape.moe_layers_count * shape.experts_per_layer_count:
            raise InternalError(
                f"a state of {state.experts_count} experts is not that of "
                f"{shape.moe_layers_count} layers of {shape.experts_per_layer_count}"
            )
        self._shape = shape
        self._sizes = [int(one) for one in kernel_sizes(shape, order, slots_block=slots_block)]
        self._state = [
            state.slot_of_expert,
            state.expert_of_slot,
            state.slot_key,
            state.demanded_at,
            state.score,
            state.clock,
            state.slots_count,
        ]

    def plan(self, moe_layer_index: int, inputs: PlanInputs, outputs: PlanOutputs) -> None:
        """One MoE layer of a decode step."""
        launch_plan(
            self._checked(moe_layer_index),
            self._inputs(inputs),
            self._state,
            self._outputs(outputs),
            self._sizes,
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
        if wanted is not None:
            require_int32("wanted", wanted, (self._shape.experts_per_layer_count,))
        launch_reserve(
            self._checked(moe_layer_index),
            wanted,
            self._inputs(inputs),
            self._state,
            self._outputs(outputs),
            self._sizes,
        )

    def release(
        self, moe_layer_index: int, uses: torch.Tensor, *, tokens_count: int, kept_count: int
    ) -> None:
        """The layer's slots are free again."""
        require_int32("uses", uses, (self._shape.experts_per_layer_count,))
        if not 0 <= tokens_count <= _MAX_PROMPT_TOKENS or not 0 <= kept_count < 1 << 31:
            raise InternalError(
                f"a prompt of {tokens_count} tokens, or {kept_count} experts to keep: too many"
            )
        launch_release(
            self._checked(moe_layer_index),
            uses,
            [tokens_count, kept_count],
            self._state,
            self._sizes,
        )

    def _checked(self, moe_layer_index: int) -> int:
        if not 0 <= moe_layer_index < self._shape.moe_layers_count:
            raise InternalError(
                f"MoE layer {moe_layer_index} of {self._shape.moe_layers_count} does not exist"
            )
        return moe_layer_index

    def _inputs(self, inputs: PlanInputs) -> list[torch.Tensor]:
        inputs.check(self._shape)
        return [inputs.routed, inputs.valid_tokens, inputs.fillable, inputs.fill_count]

    def _outputs(self, outputs: PlanOutputs) -> list[torch.Tensor]:
        outputs.check(self._shape)
        return [
            outputs.physical,
            outputs.fills,
            outputs.fills_count,
            outputs.cpu,
            outputs.cpu_count,
            outputs.stats,
        ]


def kernel_sizes(shape: PlanShape, order: KernelOrder, *, slots_block: int = SLOTS_BLOCK) -> Sizes:
    """What the kernels are compiled for."""
    half_life_ticks, ticks_per_layer = order_ticks(order)
    return Sizes(
        layers=shape.moe_layers_count,
        experts=shape.experts_per_layer_count,
        tokens=shape.tokens_capacity,
        top_k=shape.top_k,
        cpu_kernel=shape.cpu_kernel,
        half_life=half_life_ticks,
        layer_ticks=ticks_per_layer,
        experts_block=max(_LEAST_BLOCK, _power_of_two(shape.experts_per_layer_count)),
        pairs_block=min(
            _MOST_PAIRS_BLOCK,
            max(_LEAST_BLOCK, _power_of_two(shape.tokens_capacity * shape.top_k)),
        ),
        slots_block=slots_block,
    )


def _power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << (count - 1).bit_length()
