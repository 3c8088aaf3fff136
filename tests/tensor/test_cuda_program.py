"""Programs of a GPU: their values on the CPU, and whole steps on a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from freetokend.core.errors import InternalError
from freetokend.kvcache.batch import KvBatch
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.program import Experts
from freetokend.tensor.protocols import StepInput, StepRunner
from freetokend.tensor.state_dict_weights import StateDictWeights
from freetokend.tensor.torch_program import TorchProgram
from tests.fakes.cuda_guard import pretend_cuda
from tests.support.device_model import (
    DenseExperts,
    DensePages,
    DensePagesView,
    OnlyOn,
    SmallShape,
    WaitsForDeviceError,
    decode_batch,
    on_device,
    random_weights,
)

SHAPE = SmallShape()
POSITIONS = 40
PAGES = 16
CPU = torch.device("cpu")


def _weights(device: torch.device = CPU) -> StateDictWeights:
    return StateDictWeights(random_weights(SHAPE.program(), device=device), torch.bfloat16)


def _cuda_program(device: torch.device = CPU) -> CudaProgram:
    return CudaProgram(
        SHAPE.program(),
        _weights(device),
        DenseExperts(SHAPE, device=device),
        positions_count=POSITIONS,
        device=device,
    )


def _step(batch: KvBatch, device: torch.device = CPU) -> StepInput:
    """Tokens of the batch; the last one of each sequence wants logits."""
    tokens = batch.positions.shape[0]
    ids = torch.randint(SHAPE.vocab, (tokens,), generator=torch.Generator().manual_seed(tokens))
    ends = torch.bincount(batch.sequence_index).cumsum(0) - 1
    return StepInput(
        token_ids=ids.to(device),
        positions=batch.positions.long().to(device),
        logits_index=ends.to(device),
    )


def _prefill() -> KvBatch:
    lengths = (9, 5, 12)
    return decode_batch(lengths, page_tokens=SHAPE.page_tokens, tokens=lambda row: lengths[row])


def _decode() -> KvBatch:
    """The next token of each of these sequences, where the prefill left them room."""
    batch = decode_batch((10, 6, 13), page_tokens=SHAPE.page_tokens)
    table = torch.zeros(3, 4, dtype=torch.int32)
    table[:, :3] = _prefill().page_table
    table[2, 3] = PAGES - 1
    return replace(batch, page_table=table)


def test_values_are_those_of_the_other_programs() -> None:
    """bf16 inputs, fp32 sums: only the order of sums and a bf16 rounding now and then differ."""
    programs: tuple[StepRunner, StepRunner] = (
        _cuda_program(),
        TorchProgram(SHAPE.program(), _weights(), DenseExperts(SHAPE)),
    )
    stores = [DensePages(SHAPE, PAGES) for _ in range(2)]
    for batch in (_prefill(), _decode()):
        step = _step(batch)
        ours, theirs = (
            program.forward(step, store.view(batch))
            for program, store in zip(programs, stores, strict=True)
        )
        assert ours.dtype is torch.float32
        error = torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)
        assert error <= 2e-3
        assert torch.linalg.vector_norm(theirs) > 1


def test_ranges_of_ops_are_the_whole_step() -> None:
    program, batch = _cuda_program(), _prefill()
    step = _step(batch)
    whole = program.forward(step, DensePages(SHAPE, PAGES).view(batch))
    view = DensePages(SHAPE, PAGES).view(batch)
    ends = [at + 1 for at, op in enumerate(program.program.ops) if isinstance(op, Experts)]
    for first, last in zip((0, *ends), (*ends, -1), strict=True):
        program.execute(step, view, first=first, last=last)
        # A step of others in between leaves the buffers alone.
        program.forward(_step(_decode()), DensePages(SHAPE, PAGES).view(_decode()))
    assert torch.equal(program.logits(step), whole)
    with pytest.raises(KeyError):
        program.logits(step)


def test_logits_of_another_step_are_refused() -> None:
    program, batch = _cuda_program(), _prefill()
    step = _step(batch)
    program.execute(step, DensePages(SHAPE, PAGES).view(batch))
    with pytest.raises(InternalError, match="not executed"):
        program.logits(replace(step, logits_index=step.logits_index[:1]))


def test_positions_end_where_it_was_said() -> None:
    batch = decode_batch((POSITIONS + 1,), page_tokens=SHAPE.page_tokens)
    with pytest.raises(IndexError):
        _cuda_program().forward(_step(batch), DensePages(SHAPE, PAGES).view(batch))


def test_what_a_gpu_does_not_compute_is_refused() -> None:
    tensors, program = random_weights(SHAPE.program()), SHAPE.program()
    experts = DenseExperts(SHAPE)
    with pytest.raises(InternalError, match="bf16"):
        CudaProgram(
            program,
            StateDictWeights(tensors, torch.float32),
            experts,
            positions_count=POSITIONS,
            device=CPU,
        )
    with pytest.raises(InternalError, match="0 positions"):
        CudaProgram(program, _weights(), experts, positions_count=0, device=CPU)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(InternalError, match="round fp32 products"):
            _cuda_program()
    finally:
        torch.set_float32_matmul_precision("highest")


# ---- on a GPU that is only pretended


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> torch.device:
    """For FakeTensorMode."""
    return pretend_cuda(tmp_path_factory.mktemp("guard"))


MakeView = Callable[[DensePages, KvBatch], DensePagesView]


def _fake_steps(
    device: torch.device, make_view: MakeView
) -> list[tuple[int, torch.dtype, str, tuple[int, ...]]]:
    """A prefill and a decode step; (calls, dtype, device, shape) of the logits of each."""
    with FakeTensorMode():
        program, pages = _cuda_program(device), DensePages(SHAPE, PAGES, device=device)
        found = []
        for batch in (_prefill, _decode):
            # Fake tensors have no values from which to build the batch; shapes are enough.
            table, tokens = {_prefill: ((3, 3), 26), _decode: ((3, 4), 3)}[batch]
            there = KvBatch(
                page_table=torch.zeros(table, dtype=torch.int32, device=device),
                sequence_index=torch.zeros(tokens, dtype=torch.int32, device=device),
                positions=torch.zeros(tokens, dtype=torch.int32, device=device),
            )
            step = StepInput(
                token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
                positions=there.positions.long(),
                logits_index=torch.zeros(3, dtype=torch.int64, device=device),
            )
            with OnlyOn("cuda") as mode:
                logits = program.forward(step, make_view(pages, there))
            found.append((mode.calls_count, logits.dtype, logits.device.type, tuple(logits.shape)))
    return found


def test_whole_steps_run_on_a_pretended_gpu(gpu: torch.device) -> None:
    for calls_count, *logits in _fake_steps(gpu, DensePages.view):
        assert calls_count > 20 * SHAPE.layers
        assert logits == [torch.float32, "cuda", (3, SHAPE.vocab)]


class _Faulty(DensePagesView):
    """A view with one planted fault."""

    def __init__(
        self, store: DensePages, batch: KvBatch, fault: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(store, batch)
        self._fault = fault

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return super().attend(layer_index, self._fault(q), k, v, scale)


def _reads_a_number(q: torch.Tensor) -> torch.Tensor:
    return q * float(q.sum().item())


def _reads_a_shape(q: torch.Tensor) -> torch.Tensor:
    return q * float((q > 0).nonzero().shape[0])


def _mixes_devices(q: torch.Tensor) -> torch.Tensor:
    return q + torch.zeros(q.shape)


def _copies_from_the_host(q: torch.Tensor) -> torch.Tensor:
    return q * torch.ones(1).to(q.device)


def _indexes_from_the_host(q: torch.Tensor) -> torch.Tensor:
    return q[torch.arange(q.shape[0])]


@pytest.mark.parametrize(
    "fault",
    [
        _reads_a_number,
        _reads_a_shape,
        _mixes_devices,
        _copies_from_the_host,
        _indexes_from_the_host,
    ],
)
def test_a_planted_fault_is_found(
    gpu: torch.device, fault: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises((WaitsForDeviceError, DataDependentOutputException)):
        _fake_steps(gpu, lambda store, batch: _Faulty(store, batch, fault))


def test_batches_of_tests_are_copied_there() -> None:
    """The helper that the tests of graphs use as well."""
    batch = on_device(_decode(), "cpu")
    assert torch.equal(batch.page_table, _decode().page_table)
