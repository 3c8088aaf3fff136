"""Whole steps by the kernels of a GPU, on one that is only pretended."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
from freetokend.experts.gpu.sweeps import SlotSweeps, SwitchedExperts
from freetokend.experts.plan.triton_kernel import TritonPlanner
from freetokend.experts.residency import ResidencyState
from freetokend.kvcache.batch import KvBatch
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.kvcache.gpu.triton_store import TritonKvStore
from freetokend.policy.eviction import default_order
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.protocols import StepInput
from freetokend.tensor.state_dict_weights import StateDictWeights
from tests.experts.gpu.bf16_banks import bf16_bank
from tests.fakes.cuda_guard import pretend_cuda
from tests.support.device_model import OnlyOn, SmallShape, random_weights
from tests.support.late_transfers import LateTransfers

SHAPE = SmallShape(layers=3, page_tokens=16)
TOKENS, SLOTS_ADDRESS, BANK_ADDRESS = 12, 0x7E0000000000, 0x7F0000000000


class Elsewhere:
    """A CpuFork that counts."""

    begun_count = joined_count = 0

    def begin_step(self) -> None:
        pass

    def begin(self, moe_layer_index: int, work: CpuWork, y: torch.Tensor) -> None:
        self.begun_count += 1

    def join(self) -> None:
        self.joined_count += 1

    def check(self) -> None:
        raise AssertionError("not inside of a step")


def new_dispatch(
    device: torch.device, fork: Elsewhere | None
) -> tuple[CudaExpertDispatch, SlotSweeps]:
    bank = bf16_bank(
        layers=SHAPE.layers, experts=SHAPE.experts, hidden=SHAPE.hidden, inter=SHAPE.inter
    ).mapped.bank
    state = ResidencyState.empty(
        experts_count=bank.experts_count, slots_capacity=bank.experts_count, device=device
    )
    slots = SlotExperts(
        bank,
        base_address=SLOTS_ADDRESS,
        slot_bytes=bank.record_bytes,
        slots_count=state.slots_count,
        tokens_capacity=padded_rows(TOKENS),
        top_k=SHAPE.top_k,
    )
    fill = partial(
        fill_records,
        bank_address=BANK_ADDRESS,
        slots_address=SLOTS_ADDRESS,
        record_bytes=bank.record_bytes,
    )
    dispatch = CudaExpertDispatch(
        DispatchSpec(
            moe_layers_count=SHAPE.layers,
            experts_per_layer_count=SHAPE.experts,
            hidden_size=SHAPE.hidden,
            top_k=SHAPE.top_k,
            tokens_capacity=TOKENS,
            buckets_count=2,
            least_slots=SHAPE.top_k,
        ),
        BranchOps(
            fill=fill,
            slots=partial(slots.decode, keep_others=True),
            merge=merge_branches,
            fork=fork,
        ),
        lambda shape: TritonPlanner(state, shape, default_order(SHAPE.layers)),
        device,
    )
    sweeps = SlotSweeps(
        dispatch,
        state,
        fill,
        LateTransfers(),
        lambda shape: TritonPlanner(state, shape, default_order(SHAPE.layers)),
    )
    sweeps.set_slots(bank.experts_count)
    return dispatch, sweeps


@pytest.mark.parametrize("hybrid", [True, False])
def test_prompts_and_single_tokens_never_wait_for_the_device(
    tmp_path: Path, *, hybrid: bool
) -> None:
    device, fork = pretend_cuda(tmp_path), Elsewhere()
    kv_shape = KvShape(
        layers_count=SHAPE.layers,
        kv_heads_count=SHAPE.kv_heads,
        head_size=SHAPE.head_size,
        element_bytes=2,
        page_tokens=SHAPE.page_tokens,
    )
    with FakeTensorMode():
        dispatch, sweeps = new_dispatch(device, fork if hybrid else None)
        experts = SwitchedExperts(dispatch, sweeps)
        program = CudaProgram(
            SHAPE.program(),
            StateDictWeights(random_weights(SHAPE.program(), device=device), torch.bfloat16),
            experts,
            positions_count=64,
            device=device,
        )
        store = TritonKvStore(DevicePages.take(kv_shape, 8, device), context_tokens=64)
        for tokens, kind in ((TOKENS, "tiles"), (3, "parts")):
            for rows in (tokens, 3):
                dispatch.prepare(rows)
            batch = KvBatch(
                page_table=torch.zeros(3, 4, dtype=torch.int32, device=device),
                sequence_index=torch.zeros(tokens, dtype=torch.int32, device=device),
                positions=torch.zeros(tokens, dtype=torch.int32, device=device),
            )
            step = StepInput(
                token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
                positions=batch.positions.long(),
                logits_index=torch.zeros(3, dtype=torch.int64, device=device),
            )
            with OnlyOn("cuda") as mode:
                dispatch.begin_step(tokens)
                logits = program.forward(step, store.view(batch))
            assert (tuple(logits.shape), logits.device) == ((3, SHAPE.vocab), device)
            names = ("cache_plan", "fill_records", "slot_experts_rows", "merge_branches")
            names += ("store_kv", f"attend_pages_{kind}")
            assert {f"freetokend::{name}" for name in names} <= mode.names
            with experts.sweeping(), OnlyOn("cuda") as mode:
                sweeps.prefetch(0)
                for first, last in ((0, 9), (9, -1)):
                    program.execute(step, store.view(batch), first=first, last=last)
                logits = program.logits(step)
            assert (tuple(logits.shape), logits.device) == ((3, SHAPE.vocab), device)
            names = ("cache_reserve", "cache_release", "fill_records", "slot_experts_rows")
            assert {f"freetokend::{name}" for name in names} <= mode.names
            assert "freetokend::cache_plan" not in mode.names
    assert fork.begun_count == fork.joined_count == (2 * SHAPE.layers if hybrid else 0)
