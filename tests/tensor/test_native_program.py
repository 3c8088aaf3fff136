"""A small program over a region: products, look-ups, what is refused, and who watches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError, ModelDataError
from freetokend.native.executor import Executor
from freetokend.tensor.memory import address_of, tensor_at
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.program import (
    AddRmsNorm,
    Embed,
    Linear,
    Matrix,
    Op,
    Product,
    ProgramBuilder,
    RouterProduct,
    Rows,
    SelectRows,
    StepProgram,
    Vector,
)
from freetokend.tensor.protocols import Observer, StepInput
from freetokend.tensor.sampling import SAMPLING_ROW, SamplingRows, sample_logits
from tests.tensor.region import IdleView, Region

_IDS = torch.tensor([20, 0, 7, 7])
_OUTPUTS = torch.tensor([3, 0])


def _matrix(name: str, out_features: int) -> Matrix:
    return Matrix(name=f"{name}.weight", out_features=out_features, in_features=10)


# Buffers of the program below.
_RESIDUAL, _NORMED, _UP, _SCORES, _LAST, _LAST_NORMED, _LOGITS, _OTHER = range(8)


def _program() -> StepProgram:
    """Every tensor of the region, each used once."""
    new = ProgramBuilder()
    new.wide(10)
    new.activation(10)
    new.wide(19)
    new.wide(5)
    new.wide(10, Rows.OUTPUTS)
    new.activation(10, Rows.OUTPUTS)
    new.wide(21, Rows.OUTPUTS)
    new.wide(10)
    norm = Vector(name="norm.weight", size=10)
    up_bias = Vector(name="up.bias", size=19)
    tied = Matrix(name="tied.weight", out_features=21, in_features=10, shared=True)
    new.append(
        Embed(table=_matrix("embed", 21), out=_OTHER),
        Embed(table=_matrix("tied", 21), out=_RESIDUAL),
        AddRmsNorm(residual=_RESIDUAL, delta=_OTHER, weight=norm, eps=1e-6, out=_NORMED),
        Linear(x=_NORMED, products=(Product(weight=_matrix("up", 19), bias=up_bias, out=_UP),)),
        RouterProduct(x=_NORMED, weight=_matrix("gate", 5), out=_SCORES),
        SelectRows(x=_RESIDUAL, out=_LAST),
    )
    return _finished(new, tied)


def _finished(new: ProgramBuilder, tied: Matrix) -> StepProgram:
    weightless = Vector(name="last.weight", size=10)
    new.append(
        AddRmsNorm(residual=_LAST, delta=None, weight=weightless, eps=1e-6, out=_LAST_NORMED),
        Linear(x=_LAST_NORMED, products=(Product(weight=tied, bias=None, out=_LOGITS),)),
    )
    return new.build(_LOGITS)


@pytest.fixture
def region() -> Region:
    return Region()


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor([0]) as one:
        yield one


def _native(region: Region, executor: Executor, observer: Observer | None = None) -> NativeProgram:
    return NativeProgram(_program(), region.weights(), executor, None, observer=observer)


def _step(
    ids: torch.Tensor = _IDS,
    outputs: torch.Tensor = _OUTPUTS,
    sampling: SamplingRows | None = None,
) -> StepInput:
    return StepInput(
        token_ids=ids,
        positions=torch.arange(len(ids)),
        logits_index=outputs,
        sampling=sampling,
    )


def _close(found: torch.Tensor, exact: torch.Tensor, limit: float = 1e-6) -> bool:
    norm = torch.linalg.vector_norm
    return bool(norm(found.double() - exact) <= limit * norm(exact))


def test_products_and_look_ups_use_the_region(region: Region, executor: Executor) -> None:
    native, step, values = _native(region, executor), _step(), region.values
    logits = native.forward(step, IdleView(tokens_count=4))
    residual = values["embed.weight"][_IDS] + values["tied.weight"][_IDS]
    assert torch.equal(native.rows(_RESIDUAL, step), residual)
    normed = native.rows(_NORMED, step).double()
    exact = torch.nn.functional.rms_norm(
        residual.double(), (10,), values["norm.weight"].double(), eps=1e-6
    )
    assert ((normed - exact).abs() <= 2**-8 * exact.abs()).all()
    up = torch.addmm(values["up.bias"].double(), normed, values["up.weight"].double().T)
    assert _close(native.rows(_UP, step), up)
    assert _close(native.rows(_SCORES, step), normed @ values["gate.weight"].double().T)
    assert torch.equal(native.rows(_LAST, step), residual[_OUTPUTS])
    last = native.rows(_LAST_NORMED, step).double()
    assert _close(logits, last @ values["tied.weight"].double().T)


def test_rows_do_not_depend_on_the_batch(region: Region, executor: Executor) -> None:
    native = _native(region, executor)
    together = native.forward(_step(), IdleView(tokens_count=4))
    for row, token in enumerate(_OUTPUTS.tolist()):
        alone = native.forward(
            _step(_IDS[token : token + 1], torch.tensor([0])), IdleView(tokens_count=1)
        )
        assert torch.equal(alone[0], together[row])


def test_a_step_without_outputs_has_no_logits(region: Region, executor: Executor) -> None:
    native = _native(region, executor)
    none = native.forward(
        _step(outputs=torch.empty(0, dtype=torch.int64)), IdleView(tokens_count=4)
    )
    assert none.shape == (0, 21)


def test_nothing_of_the_region_but_the_router_is_copied(region: Region, executor: Executor) -> None:
    native = _native(region, executor)
    before = native.forward(_step(), IdleView(tokens_count=4))
    entry = region.plan.tensors["tied.weight"]
    ctypes.memset(region.address + entry.offset_bytes, 0, entry.length_bytes)
    assert before.any()
    assert not native.forward(_step(), IdleView(tokens_count=4)).any()


@pytest.mark.parametrize("bits_kept", [7, 10, 23])
def test_router_products_have_fp32_weights(
    region: Region, executor: Executor, bits_kept: int
) -> None:
    """Weights of bf16, fp16 and fp32 precision."""
    entry = region.plan.tensors["gate.weight"]
    gate = tensor_at(region.address + entry.offset_bytes, (5, 10), torch.float32)
    mask = -1 << (23 - bits_kept)
    gate.copy_((gate.view(torch.int32) & mask).view(torch.float32))
    native, step = _native(region, executor), _step()
    native.forward(step, IdleView(tokens_count=4))
    x = native.rows(_NORMED, step).double()
    exact, scale = x @ gate.double().T, x.abs() @ gate.double().abs().T
    assert ((native.rows(_SCORES, step) - exact).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("token_id", [-1, 21])
def test_ids_outside_the_vocabulary_never_reach_memory(
    region: Region, executor: Executor, token_id: int
) -> None:
    native = _native(region, executor)
    with pytest.raises(InternalError, match="token id"):
        native.forward(
            _step(torch.tensor([3, token_id]), torch.tensor([0])), IdleView(tokens_count=2)
        )


def test_outputs_beyond_the_step_are_refused(region: Region, executor: Executor) -> None:
    with pytest.raises(InternalError, match="output"):
        _native(region, executor).forward(
            _step(outputs=torch.tensor([4])), IdleView(tokens_count=4)
        )


def test_the_weights_must_be_those_of_the_program(region: Region, executor: Executor) -> None:
    program = _program()
    short = StepProgram(
        buffers=program.buffers,
        ops=tuple(op for op in program.ops if not isinstance(op, RouterProduct)),
    )
    with pytest.raises(ModelDataError, match=r"does not use: gate\.weight"):
        NativeProgram(short, region.weights(), executor, None)


def test_native_calls_get_what_they_were_made_for(region: Region, executor: Executor) -> None:
    native = _native(region, executor)
    with pytest.raises(InternalError, match="int64"):
        native.forward(_step(_IDS.to(torch.int32)), IdleView(tokens_count=4))
    with pytest.raises(InternalError, match="contiguous"):
        address_of(torch.ones(4, 4).T, torch.float32)


def test_an_observer_sees_every_op_and_may_change_its_result(
    region: Region, executor: Executor
) -> None:
    seen: list[type[Op]] = []

    def observer(op: Op, buffer: Callable[[int], torch.Tensor]) -> None:
        seen.append(type(op))
        if isinstance(op, SelectRows):
            buffer(op.out).zero_()

    native = _native(region, executor, observer)
    chosen = native.choose(_step(sampling=_sampling([(0, 0, 1, 0)] * 2)), IdleView(tokens_count=4))
    assert chosen.token_ids.tolist() == [0, 0]
    assert chosen.peaks.tolist() == [0.0, 0.0]
    assert seen == [type(op) for op in native.program.ops]


def test_finished_ops_are_counted(region: Region, executor: Executor) -> None:
    native = _native(region, executor)
    before = native.finished_ops_count
    native.forward(_step(), IdleView(tokens_count=4))
    assert native.finished_ops_count - before == len(native.program.ops) - 1


def _sampling(rows: Sequence[tuple[float, int, float, float]]) -> SamplingRows:
    """Of temperature, top_k, top_p and min_p; each row with a draw of its own."""
    return np.array(
        [(*row, 3 * number, 2**63 + number) for number, row in enumerate(rows)], SAMPLING_ROW
    )


_WAYS = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    st.integers(0, 25),
    st.sampled_from([0.0, 0.4, 0.95, 1.0]),
    st.sampled_from([0.0, 0.01, 0.5]),
)


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    ways=st.lists(_WAYS, max_size=12),
    threads_count=st.integers(1, 2),
)
def test_the_tokens_are_those_of_the_sampler_alone(
    ids: list[int], ways: list[tuple[float, int, float, float]], threads_count: int
) -> None:
    region, outputs = Region(), torch.arange(len(ids)).flip(0)[: len(ways)]
    step = _step(torch.tensor(ids), outputs, _sampling(ways[: len(ids)]))
    with Executor([0] * threads_count) as executor:
        native, view = _native(region, executor), IdleView(tokens_count=len(ids))
        alone = sample_logits(executor, native.forward(step, view), step.sampling)
        chosen = native.choose(step, view)
    assert torch.equal(chosen.token_ids, alone.token_ids)
    assert torch.equal(chosen.peaks, alone.peaks)
    assert chosen.token_ids.shape == outputs.shape


def test_tokens_are_the_callers_own(region: Region, executor: Executor) -> None:
    native, step = _native(region, executor), _step(sampling=_sampling([(0, 0, 1, 0)] * 2))
    chosen = native.choose(step, IdleView(tokens_count=4))
    token_ids, peaks = chosen.token_ids.clone(), chosen.peaks.clone()
    native.choose(replace(step, token_ids=_IDS.flip(0)), IdleView(tokens_count=4))
    assert torch.equal(chosen.token_ids, token_ids)
    assert torch.equal(chosen.peaks, peaks)


def test_a_row_that_is_not_numbers_is_told_apart(region: Region, executor: Executor) -> None:
    def observer(op: Op, buffer: Callable[[int], torch.Tensor]) -> None:
        if isinstance(op, SelectRows):
            buffer(op.out)[0] = torch.nan

    native = _native(region, executor, observer)
    step = _step(sampling=_sampling([(1, 0, 1, 0)] * 2))
    chosen = native.choose(step, IdleView(tokens_count=4))
    assert (chosen.token_ids < 0).tolist() == [True, False]
    assert chosen.peaks.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        (None, "sample: null address"),
        (_sampling([(1, 0, 1, 0)]), "2 rows are to be sampled"),
        (_sampling([(1, 0, 1, 0), (-1, 0, 1, 0)]), "sample: temperature"),
        (_sampling([(1, 0, float("nan"), 0)] * 2), "sample: temperature, top_p"),
    ],
)
def test_tokens_that_nobody_can_choose_are_refused(
    region: Region, executor: Executor, sampling: SamplingRows | None, complaint: str
) -> None:
    native = _native(region, executor)
    with pytest.raises(InternalError, match=complaint):
        native.choose(_step(sampling=sampling), IdleView(tokens_count=4))
