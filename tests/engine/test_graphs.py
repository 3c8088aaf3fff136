"""Steps as graphs: when they are captured, what they read, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from freetokend.core.errors import InternalError, ResourceError
from freetokend.engine.graphs import GraphBackend, GraphCounts, GraphedProgram, GraphSpec
from freetokend.experts.plan.contract import Stat
from freetokend.experts.plan.native import NativePlanner
from freetokend.kvcache.batch import KvBatch
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.protocols import ExpertDispatch, StepInput
from freetokend.tensor.state_dict_weights import StateDictWeights
from tests.experts.gpu.dispatch_lives import EXPERTS, HIDDEN, INTER, LAYERS, TOP_K, Life
from tests.support.device_model import (
    DenseExperts,
    DensePages,
    SmallShape,
    decode_batch,
    random_weights,
)
from tests.support.recorded_graphs import RecordingBackend, RepeatingBackend

SHAPE = SmallShape(layers=LAYERS, hidden=HIDDEN, inter=INTER, experts=EXPERTS, top_k=TOP_K)
PAGES, PADDING_PAGE = 24, 23
SPEC = GraphSpec(rows_capacity=4, pages_capacity=5, padding_page=PADDING_PAGE)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Pair:
    """A graphed program and a plain one, each with pages of its own."""

    graphed: GraphedProgram
    pages: DensePages
    plain: CudaProgram
    plain_pages: DensePages
    told: list[int]

    def both(self, batch: KvBatch, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of one step, by graph and without."""
        step = step_of(batch, seed)
        return (
            self.graphed.forward(step, self.pages.view(batch)),
            self.plain.forward(step, self.plain_pages.view(batch)),
        )

    def agree(self, batch: KvBatch, *, seed: int = 0) -> None:
        ours, theirs = self.both(batch, seed=seed)
        assert ours.shape == theirs.shape
        # torch's products on the CPU depend on the number of rows.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)
        assert theirs.abs().max() > 1


def step_of(batch: KvBatch, seed: int) -> StepInput:
    tokens_count = batch.positions.shape[0]
    random = torch.Generator().manual_seed(seed)
    return StepInput(
        token_ids=torch.randint(SHAPE.vocab, (tokens_count,), generator=random),
        positions=batch.positions.long(),
        logits_index=torch.bincount(batch.sequence_index).cumsum(0) - 1,
    )


def decode(*lengths: int) -> KvBatch:
    return decode_batch(lengths, page_tokens=SHAPE.page_tokens)


def new_program(experts: ExpertDispatch) -> CudaProgram:
    return CudaProgram(
        SHAPE.program(),
        StateDictWeights(random_weights(SHAPE.program()), torch.bfloat16),
        experts,
        positions_count=64,
        device=CPU,
    )


def new_pair(backend: GraphBackend, *, begin_step: Callable[[int], None] | None = None) -> Pair:
    told: list[int] = []
    pages, plain_pages = DensePages(SHAPE, PAGES), DensePages(SHAPE, PAGES)
    graphed = GraphedProgram(
        new_program(DenseExperts(SHAPE)),
        pages,
        backend,
        SPEC,
        begin_step=begin_step or told.append,
        device=CPU,
    )
    return Pair(graphed, pages, new_program(DenseExperts(SHAPE)), plain_pages, told)


def test_a_size_is_run_then_captured_then_replayed() -> None:
    backend = RecordingBackend()
    pair = new_pair(backend)
    lengths = [5, 9, 2]
    sizes = [3, 3, 1, 3, 4, 1, 2, 3, 2, 1]
    for at, size in enumerate(sizes):
        pair.agree(decode(*(length + at for length in [*lengths, 7][:size])), seed=at)
    counts = pair.graphed.counts()
    # 3 and 4 tokens share a size.
    assert counts == GraphCounts(
        captured_rows=(1, 2, 4),
        captures_count=3,
        replays_count=7,
        eager_count=3,
        failures=(),
    )
    assert [graph.replays_count for graph in backend.graphs] == [4, 2, 1]
    assert pair.told == sizes


def test_the_recorded_step_reads_nothing_but_its_inputs() -> None:
    """A recording that was made with one step's numbers gives another's when it is replayed."""
    pair = new_pair(RecordingBackend())
    for seed in range(4):
        pair.agree(decode(3 + 4 * seed, 18 - 5 * seed), seed=seed)
    assert pair.graphed.counts().replays_count == 3


def test_other_steps_run_as_they_are() -> None:
    pair = new_pair(RecordingBackend())
    prefill = decode_batch((6, 3), page_tokens=SHAPE.page_tokens, tokens=lambda row: (6, 3)[row])
    too_many = decode(1, 1, 1, 1, 1)
    too_long = decode(4 * 5 + 1, 2)
    for batch in (prefill, too_many, too_long):
        for _ in range(2):
            pair.agree(batch)
    counts = pair.graphed.counts()
    assert (counts.eager_count, counts.captured_rows) == (6, ())


def test_only_what_is_asked_for_comes_back() -> None:
    pair, batch = new_pair(RecordingBackend()), decode(3, 5, 2)
    whole, _ = pair.both(batch)
    step = step_of(batch, 0)
    for chosen in ([2, 0], [1], []):
        asked = StepInput(
            token_ids=step.token_ids,
            positions=step.positions,
            logits_index=torch.tensor(chosen, dtype=torch.int64),
        )
        found = pair.graphed.forward(asked, pair.pages.view(batch))
        assert torch.equal(found, whole[chosen])


def test_padding_keeps_to_its_page() -> None:
    """A row that was a sequence's before must not write there as padding."""
    pair = new_pair(RecordingBackend())
    for at, lengths in enumerate([(6, 7, 8, 9), (7, 8, 9, 10), (8, 9, 10, 11)]):
        pair.agree(decode(*lengths), seed=at)
    last = decode(9, 10, 11)
    pair.agree(last, seed=9)
    for ours, theirs in (
        (pair.pages.keys, pair.plain_pages.keys),
        (pair.pages.values, pair.plain_pages.values),
    ):
        torch.testing.assert_close(
            ours[:, :PADDING_PAGE], theirs[:, :PADDING_PAGE], rtol=0, atol=0.05
        )
        assert ours[:, PADDING_PAGE].any()
        assert not theirs[:, PADDING_PAGE].any()


class Refusing:
    """A backend that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.asked_count = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> RecordingNothing:
        self.asked_count += 1
        raise self._error


class RecordingNothing:
    def replay(self) -> torch.Tensor:
        raise AssertionError("nothing was captured")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), "not permitted"),
        (ResourceError("the GPU's driver refused cuLaunchHostFunc"), "cuLaunchHostFunc"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_capture_that_fails_is_told_and_not_tried_again(error: Exception, reason: str) -> None:
    backend = Refusing(error)
    pair = new_pair(backend)
    for at in range(4):
        pair.agree(decode(3 + at, 5 + at), seed=at)
    counts = pair.graphed.counts()
    assert backend.asked_count == 1
    assert (counts.captures_count, counts.replays_count, counts.eager_count) == (0, 0, 4)
    ((rows, why),) = counts.failures
    assert rows == 2
    assert reason in why


def test_a_fault_of_ours_is_no_refusal() -> None:
    pair = new_pair(Refusing(InternalError("a bug")))
    pair.both(decode(3))
    with pytest.raises(InternalError, match="a bug"):
        pair.both(decode(4))


def test_sizes_are_powers_of_two() -> None:
    spec = GraphSpec(rows_capacity=6, pages_capacity=5, padding_page=0)
    with pytest.raises(InternalError, match="6 rows"):
        GraphedProgram(
            new_program(DenseExperts(SHAPE)),
            DensePages(SHAPE, PAGES),
            RecordingBackend(),
            spec,
            begin_step=lambda _: None,
            device=CPU,
        )


# ---- with the expert cache


@pytest.fixture
def life() -> Iterator[Life]:
    one = Life.begin(NativePlanner, offloads=False)
    yield one
    one.end()


class CpuExperts:
    """The bank of a life, executed on the CPU."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        return self._life.cpu.dispatch(moe_layer_index, x, expert_ids, weights)


def _addresses(graphed: GraphedProgram, life: Life) -> Sequence[int]:
    lanes = graphed._lanes.values()
    inputs = [
        one
        for lane in lanes
        for one in (lane.step.token_ids, lane.step.positions, lane.batch.page_table)
    ]
    state = life.pool.state
    kept = [life.dispatch.valid_tokens, life.dispatch.fill_counts, state.slots_count]
    return [*(one.data_ptr() for one in (*inputs, *kept)), life.pool.base_address]


def test_a_resize_needs_no_new_capture(life: Life) -> None:
    backend = RepeatingBackend()
    pages, plain_pages = DensePages(SHAPE, PAGES), DensePages(SHAPE, PAGES)
    graphed = GraphedProgram(
        new_program(life.dispatch),
        pages,
        backend,
        SPEC,
        begin_step=life.dispatch.begin_step,
        device=CPU,
    )
    plain = new_program(CpuExperts(life))
    life.pool.resize(4)
    before: Sequence[int] = ()
    sizes = (4, 9, 2, 12, 0, 5)
    for at, slots_count in enumerate(sizes):
        batch = decode(3 + at, 5 + at, 2 + at)
        step = step_of(batch, at)
        ours = graphed.forward(step, pages.view(batch))
        life.dispatch.check()
        theirs = plain.forward(step, plain_pages.view(batch))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)
        if at == 1:
            before = _addresses(graphed, life)
        life.pool.resize(slots_count)
        life.pool.check_integrity()
    assert backend.captures_count == graphed.counts().captures_count == 1
    assert graphed.counts().replays_count == len(sizes) - 1
    assert _addresses(graphed, life) == before
    # Of the four rows of each step three counted.
    pairs = life.dispatch.totals.select(1, Stat.PAIRS)
    assert pairs.tolist() == [3 * TOP_K * len(sizes)] * LAYERS
