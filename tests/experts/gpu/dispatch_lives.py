"""Lives of a dispatch beside the CPU's own: random routings, evictions, resizes, tables.

    TRITON_INTERPRET=1 python -m tests.experts.gpu.dispatch_lives SEED STEPS

runs them with the plan in Triton.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from freetokend.device.copier import HostCopier
from freetokend.device.host_arena import HostArena
from freetokend.experts.cpu import CpuExpertDispatch, bank_experts
from freetokend.experts.gpu.cpu_fork import HostBuffers, InlineFork
from freetokend.experts.gpu.dispatch import BranchOps, CudaExpertDispatch, DispatchSpec
from freetokend.experts.plan.contract import CachePlanner, KernelOrder, PlanShape, Stat
from freetokend.experts.residency import ResidencyState
from freetokend.experts.slot_pool import SlotPool
from freetokend.native.cpu_branch import CpuBranch
from freetokend.native.executor import Executor
from freetokend.policy.eviction import default_order
from tests.experts.gpu.bf16_banks import bf16_bank
from tests.experts.gpu.reference_ops import ReferenceOps
from tests.experts.slot_support import RandomBank

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 6, 2, 5
HIDDEN, INTER = 64, 32
BUCKETS = 3
MakePlanner = Callable[[ResidencyState, PlanShape, KernelOrder], CachePlanner]


@dataclass(frozen=True, slots=True)
class Life:
    """A dispatch, and the CPU's beside it over the same bank. memory: what addresses point to."""

    dispatch: CudaExpertDispatch
    cpu: CpuExpertDispatch
    pool: SlotPool
    branch: CpuBranch
    executor: Executor
    ops: ReferenceOps
    memory: tuple[RandomBank, HostBuffers]

    @classmethod
    def begin(cls, make_planner: MakePlanner, *, offloads: bool, least_slots: int = 2) -> Life:
        bank = bf16_bank(layers=LAYERS, experts=EXPERTS, hidden=HIDDEN, inter=INTER)
        facts, order = bank.mapped.bank, default_order(LAYERS)
        pool = SlotPool(
            HostArena(LAYERS * EXPERTS * facts.record_bytes),
            HostCopier(),
            record_bytes=facts.record_bytes,
            experts_count=facts.experts_count,
            slots_capacity=facts.experts_count,
        )
        executor = Executor(sorted(os.sched_getaffinity(0))[:1])
        buffers = HostBuffers.make(tokens_capacity=8, top_k=TOP_K, hidden_size=HIDDEN, pinned=False)
        branch = CpuBranch(
            executor, bank_experts(facts, bank.mapped.region_address), buffers.addresses()
        )
        ops = ReferenceOps(mapped=bank.mapped, pool=pool, executor=executor)
        dispatch = CudaExpertDispatch(
            DispatchSpec(
                moe_layers_count=LAYERS,
                experts_per_layer_count=EXPERTS,
                hidden_size=HIDDEN,
                top_k=TOP_K,
                tokens_capacity=TOKENS,
                buckets_count=BUCKETS,
                least_slots=least_slots,
            ),
            BranchOps(
                fill=ops.fill,
                slots=ops.slots,
                merge=ops.merge,
                fork=None if offloads else InlineFork(branch, buffers),
            ),
            lambda shape: make_planner(pool.state, shape, order),
            torch.device("cpu"),
        )
        cpu = CpuExpertDispatch(executor, bank.mapped)
        return cls(dispatch, cpu, pool, branch, executor, ops, (bank, buffers))

    def end(self) -> None:
        self.branch.close()
        self.executor.close()
        self.pool.close()

    def step(self, draw: random.Random, *, rows: int, valid: int) -> None:
        """Every layer of a step, of which `valid` rows count; bit for bit what the CPU says."""
        self.dispatch.begin_step(valid)
        for layer in range(LAYERS):
            generator = torch.Generator().manual_seed(draw.getrandbits(30))
            x = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
            ids = torch.stack(
                [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)]
            ).int()
            weights = torch.rand(rows, TOP_K, generator=generator)
            ours = self.dispatch.dispatch(layer, x, ids, weights)
            theirs = self.cpu.dispatch(layer, x, ids, weights)
            assert torch.equal(ours[:valid], theirs[:valid])
            assert not ours[valid:].any()
        self.dispatch.check()
        self.pool.check_integrity()
        assert self.pool.verify(self.ops.mapped).differences == ()


def live(make_planner: MakePlanner, seed: int, steps_count: int, *, offloads: bool) -> list[int]:
    """Steps between resizes and new tables; what they added up to, by `Stat`."""
    draw = random.Random(seed)
    least = 2
    life = Life.begin(make_planner, offloads=offloads, least_slots=least)
    life.pool.resize(least if offloads else 0)
    for _ in range(steps_count):
        match draw.randrange(5):
            case 0:
                life.pool.resize(draw.randint(least if offloads else 0, LAYERS * EXPERTS))
            case 1:
                table = [
                    [draw.randint(0, misses) for misses in range(EXPERTS + 1)]
                    for _ in range(BUCKETS)
                ]
                life.dispatch.set_fill_counts(draw.randrange(LAYERS), table)
            case 2 if not offloads:
                life.dispatch.set_fillable([draw.random() < 0.8 for _ in range(LAYERS)])
            case _:
                pass
        rows = draw.randint(1, TOKENS)
        life.step(draw, rows=rows, valid=draw.choice([rows, draw.randint(0, rows)]))
    totals: list[int] = life.dispatch.totals.sum(0).tolist()
    life.end()
    return totals


def check_totals(totals: list[int], *, offloads: bool) -> None:
    """The life was one in which everything happened, and what was counted adds up."""
    for stat in (Stat.HITS, Stat.MISSES, Stat.FILLS, Stat.EVICTIONS, Stat.HIT_PAIRS):
        assert totals[stat] > 0, stat
    assert (totals[Stat.CPU] > 0) is not offloads
    assert totals[Stat.FILLS] + totals[Stat.CPU] == totals[Stat.MISSES]
    assert totals[Stat.DEFERRED] == totals[Stat.REFUSED] == 0


def main(seed: int, steps_count: int) -> None:
    from freetokend.experts.plan.triton_kernel import TritonPlanner

    for offloads in (False, True):
        check_totals(live(TritonPlanner, seed, steps_count, offloads=offloads), offloads=offloads)
    print("alive")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
