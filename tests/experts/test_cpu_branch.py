"""The CPU branch as a driver calls it: by address, from a thread that knows no Python."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.experts.cpu import CpuExpertDispatch, bank_experts
from freetokend.ftw.layout import bf16_record_bytes
from freetokend.ftw.packing import f32_to_bf16
from freetokend.native.cpu_branch import CpuBranch, CpuBranchBuffers
from freetokend.native.executor import Executor
from tests.experts.slot_support import RandomBank, random_bank

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 4, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A branch over buffers that stand for pinned memory."""

    branch: CpuBranch
    executor: Executor
    bank: RandomBank
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    y: torch.Tensor
    ring: torch.Tensor
    done: torch.Tensor

    def call(self, layer: int) -> None:
        """As the driver does."""
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.branch.host_function)
        function(self.branch.task(layer))


@pytest.fixture
def setup() -> Iterator[Setup]:
    bank = random_bank(
        layers_count=LAYERS, experts_count=EXPERTS, record_bytes=bf16_record_bytes(64, 64)
    )
    numbers = np.random.default_rng(3).standard_normal(bank.bytes.size // 2, dtype=np.float32)
    bank.bytes.view(np.uint16)[:] = f32_to_bf16(numbers)  # random bytes are not all numbers
    hidden = bank.mapped.bank.hidden_size
    x = torch.randn(TOKENS, hidden).to(torch.bfloat16)
    ids = torch.full((TOKENS, TOP_K), -1, dtype=torch.int32)
    weights = torch.rand(TOKENS, TOP_K)
    tokens = torch.zeros(1, dtype=torch.int32)
    y = torch.zeros(TOKENS, TOP_K, hidden)
    ring, done = (torch.zeros(words, dtype=torch.uint32) for words in (2, 1))
    executor = Executor(sorted(os.sched_getaffinity(0))[:2])
    branch = CpuBranch(
        executor,
        bank_experts(bank.mapped.bank, bank.mapped.region_address),
        CpuBranchBuffers(
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            tokens=tokens.data_ptr(),
            y=y.data_ptr(),
            tokens_capacity=TOKENS,
            top_k=TOP_K,
            ring=ring.data_ptr(),
            done=done.data_ptr(),
        ),
    )
    yield Setup(
        branch=branch,
        executor=executor,
        bank=bank,
        x=x,
        ids=ids,
        weights=weights,
        tokens=tokens,
        y=y,
        ring=ring,
        done=done,
    )
    branch.close()
    executor.close()


def test_a_layer_gives_what_the_executor_gives(setup: Setup) -> None:
    setup.tokens.fill_(TOKENS)
    setup.ids.copy_(torch.tensor([[0, 1], [-1, 3], [-1, -1]]))
    setup.call(1)
    setup.branch.check()
    expected = CpuExpertDispatch(setup.executor, setup.bank.mapped).dispatch(
        1, setup.x, setup.ids, setup.weights
    )
    assert torch.equal(setup.y.sum(1), expected)
    assert setup.branch.executions_count == 3
    assert setup.branch.busy_s > 0


def test_a_fault_is_told_once_and_ends_nothing(setup: Setup) -> None:
    setup.tokens.fill_(1)
    setup.ids[0, 0] = EXPERTS
    setup.call(0)
    with pytest.raises(InternalError, match=r"MoE layer 0: .*expert id"):
        setup.branch.check()
    setup.ids[0, 0] = 2
    setup.call(0)
    setup.branch.check()


def test_a_doorbell_is_answered_while_a_step_is_under_way(setup: Setup) -> None:
    setup.tokens.fill_(TOKENS)
    setup.ids.copy_(torch.tensor([[0, 1], [-1, 3], [-1, -1]]))
    for number in (1, 2):
        setup.y.zero_()
        setup.branch.begin_step()
        setup.branch.begin_step()
        setup.ring[1] = 1
        setup.ring[0] = number
        while setup.done[0].item() != number:
            time.sleep(0)
        setup.branch.end_step()
        setup.branch.check()
        expected = CpuExpertDispatch(setup.executor, setup.bank.mapped).dispatch(
            1, setup.x, setup.ids, setup.weights
        )
        assert torch.equal(setup.y.sum(1), expected)
    setup.branch.end_step()


def test_what_does_not_exist_is_refused(setup: Setup) -> None:
    with pytest.raises(InternalError, match="no such MoE layer"):
        setup.branch.task(LAYERS)
    setup.branch.close()
    with pytest.raises(InternalError, match="closed"):
        setup.branch.begin_step()
