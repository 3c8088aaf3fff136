"""Step programs at the native seam: ops that do not fit, steps that are not there, and memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from freetokend.core.errors import InternalError
from freetokend.native import _exec
from freetokend.native.executor import Executor
from freetokend.native.program import BufferSpec, KvPages, Program, StepInputs

SIZE = 24
# Buffers: fp32 x and delta, bf16 out, fp32 rows of outputs.
SPECS = [
    BufferSpec(row_bytes=4 * SIZE, per_output=False),
    BufferSpec(row_bytes=4 * SIZE, per_output=False),
    BufferSpec(row_bytes=2 * SIZE, per_output=False),
    BufferSpec(row_bytes=4 * SIZE, per_output=True),
]
NUMBERS = np.zeros(64, np.int32)
TOKENS = np.zeros(64, np.int64)
WEIGHT = np.ones(SIZE, np.float32)
PAGES = KvPages([], pages_count=1, kv_heads_count=1, page_tokens=16, head_size=8)


def inputs(tokens_count: int, outputs: np.ndarray[tuple[int], np.dtype[np.int64]]) -> StepInputs:
    return StepInputs(
        token_ids=TOKENS.ctypes.data,
        tokens_count=tokens_count,
        outputs=outputs.ctypes.data if outputs.size else 0,
        outputs_count=outputs.size,
        page_table=NUMBERS.ctypes.data,
        sequence_index=NUMBERS.ctypes.data,
        positions=NUMBERS.ctypes.data,
        sequences_count=1,
        max_pages=1,
        rotations=(),
    )


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor([0, 1]) as one:
        yield one


@pytest.fixture
def program() -> Program:
    return Program(SPECS, None)


def rows(
    program: Program, number: int, count: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    address = program.buffer(number)
    pointer = (ctypes.c_float * (count * SIZE)).from_address(address)
    return np.frombuffer(pointer, np.float32).reshape(count, SIZE)


@pytest.mark.parametrize(
    ("add", "complaint"),
    [
        (lambda op: op.add_add(residual=0, delta=2, size=SIZE), "rows of 48 bytes"),
        (lambda op: op.add_add(residual=0, delta=9, size=SIZE), "does not exist"),
        (
            lambda op: op.add_add_rms_norm(
                residual=0, delta=None, weight=0, eps=1e-6, size=SIZE, out=2
            ),
            "no weight",
        ),
        (
            lambda op: op.add_rotate(x=0, heads=8, head_size=3, table=0),
            "odd size",
        ),
        (
            lambda op: op.add_experts(
                moe_layer_index=0, x=2, ids=1, weights=1, top_k=SIZE, hidden_size=SIZE, out=0
            ),
            "nobody runs them",
        ),
        (
            lambda op: op.add_route(
                logits=0, experts_count=SIZE, top_k=SIZE + 1, renormalise=True, ids=1, weights=1
            ),
            "top_k",
        ),
        (
            lambda op: op.add_linear(
                x=2, in_features=SIZE, products=[(64, "int3", 0, SIZE, 0)], fast=False
            ),
            "int3",
        ),
    ],
)
def test_an_op_that_does_not_fit_is_refused(
    program: Program, add: Callable[[_exec.Program], None], complaint: str
) -> None:
    with pytest.raises(InternalError, match=complaint), program.adding() as native:
        add(native)
    assert program.ops_count == 0


def test_residuals_are_added_and_rows_selected(program: Program, executor: Executor) -> None:
    with program.adding() as native:
        native.add_add(residual=0, delta=1, size=SIZE)
        native.add_select_rows(x=0, size=SIZE, out=3)
    draw = np.random.default_rng(0)
    for tokens_count in (1, 5, 64, 3):
        outputs = np.arange(tokens_count - 1, -1, -2).astype(np.int64)
        step = program.prepare(inputs(tokens_count, outputs), PAGES)
        x, delta = rows(program, 0, tokens_count), rows(program, 1, tokens_count)
        x[:] = draw.normal(size=x.shape)
        delta[:] = draw.normal(size=x.shape)
        expected = (x + delta)[outputs]
        program.run(executor, step)
        assert np.array_equal(rows(program, 3, outputs.size), expected)


def test_memory_stays_where_it_is_once_sizes_have_settled(program: Program) -> None:
    def place(tokens_count: int) -> int:
        program.prepare(inputs(tokens_count, np.zeros(1, np.int64)), PAGES)
        return program.buffer(0)

    largest = place(64)
    assert [place(count) for count in (1, 64, 7)] == [largest] * 3


def test_steps_that_are_not_there_are_refused(program: Program, executor: Executor) -> None:
    with pytest.raises(InternalError, match="no step yet"):
        program.buffer(0)
    with pytest.raises(InternalError, match="needs tokens"):
        program.prepare(inputs(0, np.zeros(0, np.int64)), PAGES)
    with pytest.raises(InternalError, match="output"):
        program.prepare(inputs(2, np.array([2], np.int64)), PAGES)
    step = program.prepare(inputs(2, np.zeros(1, np.int64)), PAGES)
    with pytest.raises(InternalError, match="no such ops"):
        program.run(executor, step, 0, 1)
    with pytest.raises(InternalError, match="no such buffer"):
        program.buffer(4)


def test_ops_count_as_they_finish(program: Program, executor: Executor) -> None:
    with program.adding() as native:
        native.add_add_rms_norm(
            residual=0, delta=1, weight=WEIGHT.ctypes.data, eps=1e-6, size=SIZE, out=2
        )
        native.add_rotate(x=0, heads=3, head_size=8, table=0)
    step = program.prepare(inputs(2, np.zeros(1, np.int64)), PAGES)
    rows(program, 0, 2)[:] = 1
    rows(program, 1, 2)[:] = 1
    with pytest.raises(InternalError, match="no such table"):
        program.run(executor, step)
    assert program.finished_ops_count == 1, "what a failed step has done counts"
