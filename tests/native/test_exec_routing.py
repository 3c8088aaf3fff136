"""Routing in native programs: nothing is rounded below fp32, and any logits give weights."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest

from freetokend.native.executor import Executor, available_isas
from freetokend.native.program import BufferSpec, KvPages, Program, StepInputs
from tests.native.exec_support import Doubles, Floats, Ints, from_bf16, to_bf16

EXPERTS, TOP_K, TOKENS = 238, 6, 40


def route(logits: Floats, isa: str) -> tuple[Ints, Floats]:
    """Ids and renormalised weights [T, TOP_K] of logits [T, E], by one native op."""
    tokens, experts = logits.shape
    specs = [BufferSpec(row_bytes=4 * size, per_output=False) for size in (experts, TOP_K, TOP_K)]
    program = Program(specs, None)
    with program.adding() as native:
        native.add_route(
            logits=0, experts_count=experts, top_k=TOP_K, renormalise=True, ids=1, weights=2
        )
    zeros = np.zeros(tokens, np.int64)
    inputs = StepInputs(
        token_ids=zeros.ctypes.data,
        tokens_count=tokens,
        outputs=zeros.ctypes.data,
        outputs_count=1,
        page_table=zeros.ctypes.data,
        sequence_index=zeros.ctypes.data,
        positions=zeros.ctypes.data,
        sequences_count=1,
        max_pages=1,
        rotations=(),
    )
    pages = KvPages([], pages_count=1, kv_heads_count=1, page_tokens=16, head_size=8)
    step = program.prepare(inputs, pages)

    def rows(number: int, width: int, kind: type[Any]) -> np.ndarray:
        length = tokens * width
        memory = (ctypes.c_uint32 * length).from_address(program.buffer(number))
        return np.asarray(np.frombuffer(memory, np.uint32).view(kind).reshape(tokens, width))

    rows(0, experts, np.float32)[:] = logits
    with Executor(sorted(os.sched_getaffinity(0))[:2], isa=isa) as executor:
        program.run(executor, step)
    return rows(1, TOP_K, np.int32).copy(), rows(2, TOP_K, np.float32).copy()


def chosen(logits: Doubles) -> Ints:
    return np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K].astype(np.int32)


@pytest.mark.parametrize("isa", available_isas())
def test_scores_that_bf16_cannot_tell_apart_choose_their_experts(isa: str) -> None:
    """As the biases of one model's routers: 238 values, of which bf16 keeps a handful."""
    rng = np.random.default_rng(1)
    spread = np.linspace(8.0, 8.4, EXPERTS)
    logits = np.stack([rng.permutation(spread) for _ in range(TOKENS)]).astype(np.float32)
    rounded = from_bf16(to_bf16(logits))
    assert len(np.unique(logits)) == EXPERTS
    assert len(np.unique(rounded)) <= 8
    wanted = chosen(logits.astype(np.float64))
    assert (chosen(rounded) != wanted).any(axis=1).mean() > 0.9, "bf16 would route otherwise"
    ids, weights = route(logits, isa)
    assert np.array_equal(ids, wanted)
    best = np.exp(np.take_along_axis(logits, wanted, axis=1).astype(np.float64))
    exact = best / best.sum(axis=1, keepdims=True)
    assert np.abs(weights / exact - 1).max() < 3e-6
    assert (np.diff(weights, axis=1) < 0).all()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("mean", [-3e38, -1e4, -200.0])
def test_logits_that_are_all_negative(mean: float, isa: str) -> None:
    rng = np.random.default_rng(2)
    logits = (mean + rng.normal(size=(TOKENS, EXPERTS))).astype(np.float32)
    ids, weights = route(logits, isa)
    assert np.array_equal(ids, chosen(logits.astype(np.float64)))
    assert np.abs(weights.sum(axis=1) - 1).max() < 1e-6
    assert (weights > 0).all()
