"""The dispatch of a GPU on the CPU: bit for bit the executor's; and whole on a pretended GPU."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from freetokend.core.errors import InternalError
from freetokend.experts.gpu.cpu_fork import CpuWork
from freetokend.experts.gpu.dispatch import (
    BranchOps,
    CudaExpertDispatch,
    DispatchSpec,
    padded_rows,
)
from freetokend.experts.gpu.fill_kernel import fill_records
from freetokend.experts.gpu.merge_kernel import merge_branches
from freetokend.experts.gpu.slot_experts import SlotExperts
from freetokend.experts.plan.contract import PlanOutputs, Stat
from freetokend.experts.plan.native import NativePlanner
from freetokend.experts.plan.triton_kernel import TritonPlanner
from freetokend.experts.residency import ResidencyState
from freetokend.policy.eviction import default_order
from tests.experts.gpu.bf16_banks import bf16_bank
from tests.experts.gpu.dispatch_lives import (
    BUCKETS,
    EXPERTS,
    HIDDEN,
    INTER,
    LAYERS,
    TOKENS,
    TOP_K,
    Life,
    check_totals,
    live,
)
from tests.fakes.cuda_guard import pretend_cuda
from tests.support.device_model import OnlyOn


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_lives_are_bit_for_bit_the_executors(seed: int, *, offloads: bool) -> None:
    check_totals(live(NativePlanner, seed, 60, offloads=offloads), offloads=offloads)


@pytest.mark.slow
def test_lives_with_the_plan_in_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.experts.gpu.dispatch_lives", "0", "25"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == "alive\n", done.stderr[-4000:]


@pytest.fixture
def life() -> Iterator[Life]:
    one = Life.begin(NativePlanner, offloads=False)
    yield one
    one.end()


def test_more_misses_than_slots_go_to_the_cpu(life: Life) -> None:
    life.pool.resize(1)
    life.step(random.Random(0), rows=TOKENS, valid=TOKENS)
    totals = life.dispatch.totals
    assert (totals.select(1, Stat.FILLS) <= 1).all()
    assert (totals.select(1, Stat.CPU) >= totals.select(1, Stat.MISSES) - 1).all()
    assert life.branch.executions_count > 0


def test_too_few_rounds_make_a_step_void() -> None:
    """Fewer slots than was promised: experts stay deferred, which is told and counted off."""
    life = Life.begin(NativePlanner, offloads=True, least_slots=6)
    life.pool.resize(2)
    life.dispatch.begin_step(2)
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    life.dispatch.dispatch(0, torch.ones(2, HIDDEN).bfloat16(), ids, torch.ones(2, TOP_K))
    with pytest.raises(InternalError, match="void: 2 experts found no slot"):
        life.dispatch.check()
    life.dispatch.check()
    life.end()


def test_addresses_stay_from_step_to_step_and_over_a_resize(life: Life) -> None:
    """What a graph that was captured before would still read and write."""
    dispatch = life.dispatch

    def addresses() -> list[int]:
        lane = dispatch._lane(3)
        outputs = [getattr(lane.outputs, name) for name in PlanOutputs.__slots__]
        kept = (dispatch.valid_tokens, dispatch.fillable, dispatch.fill_counts, dispatch.totals)
        state = life.pool.state
        return [
            *(one.data_ptr() for one in (*outputs, *kept, lane.routed, lane.served)),
            *(getattr(state, name).data_ptr() for name in type(state).__slots__),
            life.pool.base_address,
        ]

    life.pool.resize(4)
    before = addresses()
    for slots_count in (4, 12, 1):
        life.pool.resize(slots_count)
        dispatch.set_fill_counts(0, [[0, 1, 1, 1, 1, 1, 1]] * BUCKETS)
        dispatch.set_fillable([False, True])
        life.step(random.Random(slots_count), rows=3, valid=3)
        assert addresses() == before


@pytest.mark.parametrize("offloads", [False, True])
def test_what_rows_chose_is_there_after_a_step_also_after_a_replay(*, offloads: bool) -> None:
    life = Life.begin(NativePlanner, offloads=offloads)
    life.pool.resize(2)
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(EXPERTS, (4, TOP_K), generator=draw).int() for _ in range(LAYERS)]
    x, weights = torch.ones(4, HIDDEN).bfloat16(), torch.ones(4, TOP_K)
    life.dispatch.begin_step(3)
    life.dispatch.dispatch(0, x, ids[0], weights)
    life.dispatch.dispatch(1, x[:2], ids[1][:2], weights[:2])  # those that want logits
    rows = life.dispatch.routed_rows()
    assert [layer for layer, _ in rows] == [0, 1]
    assert torch.equal(rows[0][1], ids[0][:3])
    assert torch.equal(rows[1][1], ids[1][:2])
    for layer in range(LAYERS):
        life.dispatch.dispatch(layer, x, ids[layer], weights)
    life.dispatch.begin_step(3)  # a graph of four rows does the same without a word
    replayed = life.dispatch.routed_rows()
    assert [layer for layer, _ in replayed] == [0, 1]
    assert all(torch.equal(found, ids[layer][:3]) for layer, found in replayed)
    life.end()


def test_what_does_not_fit_is_refused(life: Life) -> None:
    dispatch = life.dispatch
    calls: tuple[tuple[Callable[[], None], str], ...] = (
        (lambda: dispatch.begin_step(TOKENS + 1), "at most 5"),
        (lambda: dispatch.prepare(9), "at most 5"),
        (lambda: dispatch.set_fillable([True]), "1 flags for 2"),
        (lambda: dispatch.set_fill_counts(0, [[0, 1]]), "table of fills"),
    )
    for call, complaint in calls:
        with pytest.raises(InternalError, match=complaint):
            call()
    spec = DispatchSpec(
        moe_layers_count=LAYERS,
        experts_per_layer_count=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        tokens_capacity=TOKENS,
        buckets_count=BUCKETS,
        least_slots=0,
    )
    with pytest.raises(InternalError, match="no step"):
        CudaExpertDispatch(spec, dispatch._ops, lambda _: NotImplemented, torch.device("cpu"))


def test_few_kinds_of_step() -> None:
    assert [padded_rows(count) for count in (0, 1, 2, 3, 4, 5, 32, 33)] == [
        *(1, 1, 2, 4, 4, 8, 32, 64)
    ]


# ---- on a GPU that is only pretended


class Noted:
    """Kernels that note what they were given."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_step(self) -> None:
        self.calls.append("step")

    def begin(self, moe_layer_index: int, work: CpuWork, y: torch.Tensor) -> None:
        assert all(one.is_contiguous() for one in (work.x, work.ids, work.weights, y))
        self.calls.append("fork")

    def join(self) -> None:
        self.calls.append("join")

    def check(self) -> None:
        raise AssertionError("not inside of a step")

    def fill(self, fills: torch.Tensor, fills_count: torch.Tensor) -> None:
        self.calls.append("fill")

    def slots(
        self, x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        assert physical.is_contiguous()
        assert tuple(y.shape) == (3, TOP_K, HIDDEN)
        self.calls.append("slots")

    def merge(
        self, y_gpu: torch.Tensor, y_cpu: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append("merge")
        return y_gpu.sum(1) + y_cpu.sum(1)


def test_a_layer_runs_on_a_pretended_gpu_in_this_order(tmp_path: Path) -> None:
    device, noted = pretend_cuda(tmp_path), Noted()
    spec = DispatchSpec(
        moe_layers_count=LAYERS,
        experts_per_layer_count=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        tokens_capacity=TOKENS,
        buckets_count=BUCKETS,
        least_slots=2,
    )
    ops = BranchOps(fill=noted.fill, slots=noted.slots, merge=noted.merge, fork=noted)
    with FakeTensorMode():
        state = ResidencyState.empty(
            experts_count=LAYERS * EXPERTS, slots_capacity=4, device=device
        )
        dispatch = CudaExpertDispatch(
            spec, ops, lambda shape: TritonPlanner(state, shape, default_order(LAYERS)), device
        )
        dispatch.prepare(3)
        x = torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(3, TOP_K, dtype=torch.int32, device=device)
        weights = torch.zeros(3, TOP_K, device=device)
        with OnlyOn("cuda") as mode:
            dispatch.begin_step(3)
            out = dispatch.dispatch(1, x, ids, weights)
        assert "freetokend::cache_plan" in mode.names
        assert (tuple(out.shape), out.dtype, out.device) == ((3, HIDDEN), torch.float32, device)
    assert noted.calls == ["step", "fork", "fill", "slots", "join", "merge"]


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_a_layer_by_the_kernels_of_a_gpu_on_a_pretended_one(path: str, tmp_path: Path) -> None:
    """Nothing of it waits for the device, and all of it is operations that a graph can hold."""
    device, noted = pretend_cuda(tmp_path), Noted()
    bank = bf16_bank(layers=LAYERS, experts=EXPERTS, hidden=HIDDEN, inter=INTER).mapped.bank
    spec = DispatchSpec(
        moe_layers_count=LAYERS,
        experts_per_layer_count=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        tokens_capacity=TOKENS,
        buckets_count=BUCKETS,
        least_slots=2,
    )
    with FakeTensorMode():
        state = ResidencyState.empty(
            experts_count=LAYERS * EXPERTS, slots_capacity=4, device=device
        )
        slots = SlotExperts(
            bank,
            base_address=0x7E0000000000,
            slot_bytes=bank.record_bytes,
            slots_count=state.slots_count,
            tokens_capacity=padded_rows(TOKENS),
            top_k=TOP_K,
        )
        ops = BranchOps(
            fill=lambda fills, count: fill_records(
                fills, count, 0x7F0000000000, 0x7E0000000000, bank.record_bytes
            ),
            slots=partial(getattr(slots, path), keep_others=True),
            merge=merge_branches,
            fork=noted,
        )
        dispatch = CudaExpertDispatch(
            spec, ops, lambda shape: TritonPlanner(state, shape, default_order(LAYERS)), device
        )
        dispatch.prepare(3)
        x = torch.zeros(3, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(3, TOP_K, dtype=torch.int32, device=device)
        weights = torch.zeros(3, TOP_K, device=device)
        with OnlyOn("cuda") as mode:
            dispatch.begin_step(3)
            out = dispatch.dispatch(1, x, ids, weights)
    kind = "rows" if path == "decode" else "tiles"
    names = ("cache_plan", "fill_records", f"slot_experts_{kind}", "merge_branches")
    assert {f"freetokend::{name}" for name in names} <= mode.names
    assert (tuple(out.shape), out.device) == ((3, HIDDEN), device)
    assert noted.calls == ["step", "fork", "join"]
