"""Lives of the Triton planner beside the oracle; run with TRITON_INTERPRET=1.

    python -m tests.experts.plan.interpreted FIRST_SEED LIVES STEPS

The interpreter replaces kernels when their module is imported: hence a process of its own.
"""

from __future__ import annotations

import random
import sys

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.plan.contract import (
    NONE,
    KernelOrder,
    PlanInputs,
    PlanOutputs,
    PlanShape,
    Stat,
)
from freetokend.experts.plan.triton_kernel import TritonPlanner
from freetokend.experts.residency import ResidencyState
from freetokend.policy.eviction import Lru, default_order
from tests.experts.plan.traces import live, random_plan
from tests.experts.plan.twins import Plan, Release, Reserve, Twins

SHAPE = PlanShape(
    moe_layers_count=3, experts_per_layer_count=5, top_k=2, tokens_capacity=2, cpu_kernel=True
)


def few_at_a_time(state: ResidencyState, shape: PlanShape, order: KernelOrder) -> TritonPlanner:
    """Slots in several blocks, the last of them not full."""
    return TritonPlanner(state, shape, order, slots_block=16)


def many_experts_and_slots() -> None:
    """512 misses of one call; slots of blocks as on a GPU; clocks that have run for long."""
    shape = PlanShape(
        moe_layers_count=3,
        experts_per_layer_count=512,
        top_k=8,
        tokens_capacity=80,
        cpu_kernel=False,
    )
    twins = Twins(TritonPlanner, shape, default_order(3), slots_capacity=1300)
    twins.state.clock = (1 << 39) + 12345
    twins.tensors.clock.fill_(twins.state.clock)
    everything = [[(8 * token + at) % 512 for at in range(8)] for token in range(80)]
    for layer, fills_count in ((0, 512), (1, 512), (2, 512), (1, 3 * 512 - 1300)):
        result = twins.run(Plan(layer=layer, routed=everything, valid_tokens=64))
        assert result is not None
        assert result.stats[Stat.FILLS] == fills_count
    twins.run(Reserve(layer=1))
    uses = [(7 * expert) % 90 for expert in range(512)]
    twins.run(Release(layer=1, uses=uses, tokens_count=90, kept_count=200))
    draw = random.Random(1)
    for _ in range(3):
        twins.run(random_plan(twins, draw))


def what_a_gpu_cannot_refuse() -> None:
    """Experts that do not exist are none, and counted; too many tokens are as many as fit."""
    state = ResidencyState.empty(experts_count=15, slots_capacity=4)
    state.slots_count.fill_(4)
    outputs = PlanOutputs.empty(SHAPE)
    inputs = PlanInputs(
        routed=torch.tensor([[5, 1], [-1, 1 << 30]], dtype=torch.int32),
        valid_tokens=torch.tensor([7], dtype=torch.int32),
        fillable=torch.ones(3, dtype=torch.int32),
        fill_count=torch.ones((1, 2), dtype=torch.int32),
    )
    TritonPlanner(state, SHAPE, Lru()).plan(2, inputs, outputs)
    assert outputs.physical.tolist() == [[NONE, 0], [NONE, NONE]]
    assert outputs.stats[Stat.REFUSED] == 2
    assert outputs.stats[Stat.PAIRS] == 1


def what_the_host_can_refuse() -> None:
    """Layers, sizes and tensors that do not fit."""
    state = ResidencyState.empty(experts_count=15, slots_capacity=4)
    planner = TritonPlanner(state, SHAPE, Lru())
    uses = torch.zeros(5, dtype=torch.int32)
    for call in (
        lambda: planner.release(3, uses, tokens_count=1, kept_count=1),
        lambda: planner.release(0, uses[:4], tokens_count=1, kept_count=1),
        lambda: planner.release(0, uses, tokens_count=1 << 24, kept_count=1),
        lambda: TritonPlanner(
            ResidencyState.empty(experts_count=14, slots_capacity=4), SHAPE, Lru()
        ),
    ):
        try:
            call()
        except InternalError:
            continue
        raise AssertionError("accepted")


def main(first_seed: int, lives_count: int, steps_count: int) -> None:
    for seed in range(first_seed, first_seed + lives_count):
        try:
            live(few_at_a_time, seed, steps_count)
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
    what_a_gpu_cannot_refuse()
    what_the_host_can_refuse()
    many_experts_and_slots()
    print(f"{lives_count} lives agree")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
