"""Expert dispatch over records in memory: values, order, counts, and what is refused."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import CpuExpertDispatch, bank_experts
from freetokend.experts.reference import TorchExpertDispatch
from freetokend.ftw.layout import ExpertBank, bf16_record_bytes
from freetokend.native.executor import Executor
from freetokend.native.program import BufferSpec, KvPages, Program, StepInputs
from freetokend.tensor.memory import tensor_at
from tests.experts.records import Expert, exact, packed, random_expert

LAYERS, EXPERTS, HIDDEN, INNER = 3, 5, 72, 40


@dataclass
class Bank:
    mapped: MappedBank
    experts: dict[tuple[int, int], Expert]
    memory: mmap.mmap


@pytest.fixture(scope="module")
def bank() -> Bank:
    record_bytes = bf16_record_bytes(HIDDEN, INNER)
    bank = ExpertBank(
        format="bf16",
        offset_bytes=8192,
        record_bytes=record_bytes,
        moe_layers_count=LAYERS,
        experts_per_layer_count=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_layer_indices=(0, 2, 3),
        activation="silu",
    )
    memory = mmap.mmap(-1, bank.offset_bytes + bank.length_bytes)
    experts = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            values = random_expert(HIDDEN, INNER, seed=10 * layer + expert)
            experts[layer, expert] = values
            offset = bank.record_offset_bytes(bank.expert_id(layer, expert))
            memory[offset : offset + record_bytes] = packed(values, record_bytes)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    return Bank(MappedBank(bank=bank, region_address=address), experts, memory)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:2]) as executor:
        yield executor


def step(tokens: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)]
    ).int()
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return x, ids, weights


def expected(
    bank: Bank, layer: int, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor
) -> np.ndarray:
    return np.stack(
        [
            sum(
                float(w[token, slot])
                * exact(bank.experts[layer, int(ids[token, slot])], x[token].double().numpy())
                for slot in range(ids.shape[1])
            )
            for token in range(x.shape[0])
        ]
    )


def worst(got: torch.Tensor, wanted: np.ndarray) -> float:
    difference = got.double().numpy() - wanted
    return float((np.linalg.norm(difference, axis=1) / np.linalg.norm(wanted, axis=1)).max())


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 5), (3, 2), (33, 2)])
def test_values_are_those_of_float64(
    bank: Bank, executor: Executor, layer: int, tokens: int, top_k: int
) -> None:
    x, ids, weights = step(tokens, top_k, seed=layer)
    wanted = expected(bank, layer, x, ids, weights)
    got = CpuExpertDispatch(executor, bank.mapped).dispatch(layer, x, ids, weights)
    # the inner activations are rounded to bf16, nothing else is
    assert worst(got, wanted) < 4e-3
    oracle = TorchExpertDispatch(bank.mapped, torch.float64).dispatch(layer, x, ids, weights)
    assert worst(oracle, wanted) < 1e-12
    rounded = TorchExpertDispatch(bank.mapped, torch.float32).dispatch(layer, x, ids, weights)
    assert worst(got, rounded.double().numpy()) < 2e-3


def test_a_token_gets_the_same_bits_alone_and_in_a_batch(bank: Bank, executor: Executor) -> None:
    dispatch = CpuExpertDispatch(executor, bank.mapped)
    x, ids, weights = step(40, 3, seed=7)
    together = dispatch.dispatch(1, x, ids, weights)
    for token in range(40):
        rows = slice(token, token + 1)
        alone = dispatch.dispatch(
            1, x[rows].contiguous(), ids[rows].contiguous(), weights[rows].contiguous()
        )
        assert torch.equal(alone[0], together[token])


def test_a_program_dispatches_to_the_same_bits_and_counts(bank: Bank, executor: Executor) -> None:
    x, ids, weights = step(4, 2, seed=1)
    mapped = bank.mapped.bank
    experts = bank_experts(mapped, bank.mapped.region_address)
    hidden = mapped.hidden_size
    sizes = (2 * hidden, 4 * 2, 4 * 2, 4 * hidden)
    program = Program([BufferSpec(row_bytes=size, per_output=False) for size in sizes], experts)
    with program.adding() as native:
        native.add_experts(
            moe_layer_index=1, x=0, ids=1, weights=2, top_k=2, hidden_size=hidden, out=3
        )
    numbers = torch.zeros(4, dtype=torch.int32)
    tokens = torch.zeros(4, dtype=torch.int64)
    inputs = StepInputs(
        token_ids=tokens.data_ptr(),
        tokens_count=4,
        outputs=0,
        outputs_count=0,
        page_table=numbers.data_ptr(),
        sequence_index=numbers.data_ptr(),
        positions=numbers.data_ptr(),
        sequences_count=1,
        max_pages=1,
        rotations=(),
    )
    pages = KvPages([], pages_count=1, kv_heads_count=1, page_tokens=16, head_size=2)
    prepared = program.prepare(inputs, pages)
    for number, values in enumerate((x, ids, weights)):
        tensor_at(program.buffer(number), tuple(values.shape), values.dtype).copy_(values)
    program.run(executor, prepared)
    program.run(executor, prepared)
    out = tensor_at(program.buffer(3), (4, hidden), torch.float32)
    assert torch.equal(out, CpuExpertDispatch(executor, bank.mapped).dispatch(1, x, ids, weights))
    assert experts.executions_count == 2 * 4 * 2


def test_what_lies_outside_the_bank_is_refused(bank: Bank, executor: Executor) -> None:
    for layer, expert in ((LAYERS, 0), (-1, 0), (0, EXPERTS), (0, -1)):
        with pytest.raises(InternalError, match="outside"):
            bank.mapped.record_address(layer, expert)
    dispatch = CpuExpertDispatch(executor, bank.mapped)
    x, ids, weights = step(2, 2, seed=3)
    with pytest.raises(InternalError):
        dispatch.dispatch(0, x, torch.full_like(ids, EXPERTS), weights)
    with pytest.raises(InternalError, match="hidden size is 72"):
        dispatch.dispatch(0, x[:, :-1].contiguous(), ids, weights)
    with pytest.raises(InternalError, match="contiguous"):
        dispatch.dispatch(0, x.float(), ids, weights)
