"""A chunk of a prompt that streams the whole pool, beside what the link alone would take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch

from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.experts.gpu.dispatch import (
    BranchOps,
    CudaExpertDispatch,
    DispatchSpec,
    SlotExpertsCall,
)
from freetokend.experts.gpu.slot_experts import SlotExperts
from freetokend.experts.gpu.sweeps import SlotSweeps
from freetokend.experts.gpu.transfers import Transfers, torch_transfers
from freetokend.experts.plan.contract import Stat
from tests.experts.gpu.reference_ops import ReferenceOps
from tests.gpu.bench import Bench
from tests.gpu.rows import Row
from tests.support.late_transfers import LateTransfers

CHUNK_RATIO: Final = 1.1
# The host device copies and computes with the same core, one after the other.
HOST_RATIO: Final = 4.0
# bf16 activations rounded at different places of sums in another order.
EXPERTS_ERROR: Final = 5e-3
_TIMES: Final = 5


class Chunk:
    """A chunk's experts in all layers, streamed through the bench's slots. `close` when done."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._closing = ExitStack()
        self.tokens_count = 512 if bench.kind.driver else 8 if bench.kind.interpreted else 32
        shape, self._planner = bench.shape, partial(bench.kind.planner, bench.pool.state)
        spec = DispatchSpec(
            moe_layers_count=shape.layers,
            experts_per_layer_count=shape.experts,
            hidden_size=shape.hidden,
            top_k=shape.top_k,
            tokens_capacity=self.tokens_count,
            buckets_count=1,
            least_slots=shape.top_k,
        )
        ops = BranchOps(fill=bench.fill, slots=self._slots(), merge=bench.merge, fork=bench.fork)
        steps = CudaExpertDispatch(spec, ops, self._planner, bench.kind.device)
        self.sweeps = SlotSweeps(
            steps, bench.pool.state, bench.fill, self._transfers(), self._planner
        )
        draw = torch.Generator().manual_seed(5)
        pairs = (self.tokens_count, shape.top_k)
        self.x = torch.randn(self.tokens_count, shape.hidden, generator=draw).bfloat16()
        self.ids = torch.rand(self.tokens_count, shape.experts, generator=draw).topk(shape.top_k)[1]
        self.weights = torch.rand(pairs, generator=draw)
        self._given = [one.to(bench.kind.device) for one in (self.x, self.ids.int(), self.weights)]

    def close(self) -> None:
        """Nothing is held any more."""
        self.sweeps.let_go()
        self.bench.kind.synchronize()
        self._closing.close()

    def hold(self, resident_count: int) -> None:
        """Have so many experts resident and every slot there."""
        self.sweeps.let_go()
        self.bench.kind.synchronize()
        for slots_count in (resident_count, self.bench.facts.experts_count):
            self.bench.pool.resize(slots_count)
            self.sweeps.set_slots(slots_count)

    def run(self) -> list[torch.Tensor]:
        """What every layer gives."""
        self.sweeps.prefetch(0)
        x, ids, weights = self._given
        return [
            self.sweeps.dispatch(layer, x, ids, weights) for layer in range(self.bench.shape.layers)
        ]

    def seconds(self, run: Callable[[], object]) -> float:
        """From idle to idle."""
        self.bench.kind.synchronize()
        began_s = time.perf_counter()
        run()
        self.bench.kind.synchronize()
        return time.perf_counter() - began_s

    def link_s(self) -> float:
        """Of fills of the whole pool, and nothing else."""
        bench, best_s = self.bench, float("inf")
        count, experts = bench.facts.experts_count, bench.shape.experts
        numbers = torch.arange(count, dtype=torch.int32, device=bench.kind.device)
        pairs = torch.stack((numbers, numbers), dim=1)
        each = torch.full((1,), experts, dtype=torch.int32, device=bench.kind.device)
        lists = [pairs.narrow(0, at, experts) for at in range(0, count, experts)]

        def fills() -> None:
            for one in lists:
                bench.fill(one, each)

        for _ in range(_TIMES):
            best_s = min(best_s, self.seconds(fills))
        return best_s

    def error(self, found: list[torch.Tensor]) -> float:
        """The worst layer beside the CPU's, relative to its norm."""
        cpu, worst = CpuExpertDispatch(self.bench.executor, self.bench.bank.mapped), 0.0
        for layer, ours in enumerate(found):
            theirs = cpu.dispatch(layer, self.x, self.ids.int(), self.weights)
            difference = torch.linalg.vector_norm(ours.cpu() - theirs)
            worst = max(worst, float(difference / torch.linalg.vector_norm(theirs)))
        return worst

    def _transfers(self) -> Transfers:
        if self.bench.kind.driver is None:
            return LateTransfers()
        transfers = torch_transfers(self.bench.kind.driver)
        self._closing.callback(transfers.close)
        return transfers

    def _slots(self) -> SlotExpertsCall:
        bench = self.bench
        if not bench.kind.kernels:
            host = ReferenceOps(mapped=bench.bank.mapped, pool=bench.pool, executor=bench.executor)
            return host.slots
        slots = SlotExperts(
            bench.facts,
            base_address=bench.pool.base_address,
            slot_bytes=bench.facts.record_bytes,
            slots_count=bench.pool.state.slots_count,
            tokens_capacity=self.tokens_count,
            top_k=bench.shape.top_k,
            interpreted=bench.kind.interpreted,
        )
        return partial(slots.prefill, keep_others=True)


def streamed(bench: Bench) -> list[Row]:
    """What the experts of a chunk give, beside the CPU's."""
    chunk, errors = Chunk(bench), []
    for resident_count in (0, bench.facts.experts_count // 2):
        chunk.hold(resident_count)
        errors.append(chunk.error(chunk.run()))
    chunk.close()
    report = bench.pool.verify(bench.bank.mapped)
    bench.pool.resize(0)
    return [
        Row(
            check="experts that are streamed beside the CPU's",
            measured=f"{max(errors):.1e}, {len(report.differences)} of {report.compared_count} "
            "slots differ from the pool",
            gate=f"<= {EXPERTS_ERROR:.0e}, 0 of more than 0",
            passed=max(errors) <= EXPERTS_ERROR
            and not report.differences
            and report.compared_count > 0,
        )
    ]


def chunks(bench: Bench) -> list[Row]:
    """The time of one, with nothing and with half of the experts resident."""
    chunk = Chunk(bench)
    pool_count = bench.facts.experts_count
    chunk.hold(0)
    chunk.run()
    link_s, rows = chunk.link_s(), []
    # What is resident now is all that the chunk needs: what is left is what it computes.
    computed_s = min(chunk.seconds(chunk.run) for _ in range(_TIMES))
    for resident_count in (0, pool_count // 2):
        best_s, counts = float("inf"), []
        for _ in range(_TIMES):
            chunk.hold(resident_count)
            before = int(chunk.sweeps.totals.select(1, Stat.FILLS).sum())
            best_s = min(best_s, chunk.seconds(chunk.run))
            counts.append(int(chunk.sweeps.totals.select(1, Stat.FILLS).sum()) - before)
        missing = pool_count - resident_count
        bound_s, ratio = link_s * missing / pool_count, CHUNK_RATIO
        if bench.kind.driver is None:
            bound_s, ratio = bound_s + computed_s, HOST_RATIO
        rows.append(
            Row(
                check=f"a chunk of {chunk.tokens_count} tokens, {resident_count} of {pool_count} "
                "experts resident",
                measured=f"{best_s * 1e3:.2f} ms, {max(counts)} streamed; the link alone "
                f"{link_s * missing / pool_count * 1e3:.2f} ms, the experts "
                f"{computed_s * 1e3:.2f} ms",
                gate=f"<= {ratio} times {bound_s * 1e3:.2f} ms, {missing} streamed",
                passed=best_s <= ratio * bound_s and set(counts) == {missing},
            )
        )
    chunk.close()
    bench.pool.resize(0)
    return rows
