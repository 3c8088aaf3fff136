"""Decode steps as graphs: captured once per padded number of rows, replayed from then on.

The first step of a size runs op by op, which compiles and loads what it needs; the second is
captured. All of them read the same inputs at addresses that never change. Rows that only pad a
step to its size are told apart by a count on the device, and keep to a page that no sequence has.
How many slots the expert cache has, what lies there and how misses are split is data on the
device too, so that a change of it needs no new capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import torch

from freetokend.core.errors import InternalError, ResourceError
from freetokend.kvcache.batch import KvBatch, KvStore
from freetokend.tensor.protocols import KvView, StepInput, StepRunner


class CapturedGraph(Protocol):
    """A step that can be repeated."""

    def replay(self) -> torch.Tensor:
        """Run it over what now lies at the addresses it was captured with; its result, which the
        next replay overwrites."""
        ...


class GraphBackend(Protocol):
    """What captures."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """The work that `run` queues, as a graph; nothing of it is done yet.

        RuntimeError or ResourceError where the device refuses.
        """
        ...


class CudaGraphBackend:
    """torch's graphs, all out of one pool of memory: they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """See `GraphBackend.capture`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads allocate and copy while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return _TorchGraph(graph, result)


class _TorchGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._result


@runtime_checkable
class BatchView(Protocol):
    """A KvView that shows the batch it was made for."""

    @property
    def page_table(self) -> torch.Tensor: ...

    @property
    def sequence_index(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """rows_capacity: the most tokens of a step that is captured, a power of two. pages_capacity:
    the most pages a sequence can have. padding_page: a page that no sequence is ever given."""

    rows_capacity: int
    pages_capacity: int
    padding_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCounts:
    """captured_rows: sizes that have a graph; failures: (size, why it has none)."""

    captured_rows: tuple[int, ...]
    captures_count: int
    replays_count: int
    eager_count: int
    failures: tuple[tuple[int, str], ...]


@dataclass(slots=True, kw_only=True)
class _Lane:
    """Inputs of one size, and what became of its graph."""

    step: StepInput
    batch: KvBatch
    view: KvView
    was_run: bool = False
    graph: CapturedGraph | None = None
    failure: str = ""

    def load(self, step: StepInput, batch: BatchView, padding_page: int) -> None:
        """Copy a step in, and let the rows behind it be padding."""
        tokens_count, pages_count = batch.page_table.shape
        for there, here in (
            (self.step.token_ids, step.token_ids),
            (self.step.positions, step.positions),
            (self.batch.positions, batch.positions),
        ):
            there.narrow(0, 0, tokens_count).copy_(here)
        table = self.batch.page_table
        table.narrow(0, 0, tokens_count).narrow(1, 0, pages_count).copy_(batch.page_table)
        padding_count = table.shape[0] - tokens_count
        if padding_count:
            for there in (self.step.token_ids, self.step.positions, self.batch.positions):
                there.narrow(0, tokens_count, padding_count).zero_()
            table.narrow(0, tokens_count, padding_count).narrow(1, 0, 1).fill_(padding_page)


@dataclass(slots=True, kw_only=True)
class _Counters:
    captures_count: int = 0
    replays_count: int = 0
    eager_count: int = 0
    failures: dict[int, str] = field(default_factory=dict)


class GraphedProgram:
    """A StepRunner that replays graphs where a step is one token of each sequence.

    `program` and the views of `kv` work on `device` and never wait for it; a view reads the tensors
    of its batch when it attends. Other steps run as they are, moved to the device.
    """

    def __init__(
        self,
        program: StepRunner,
        kv: KvStore,
        backend: GraphBackend,
        spec: GraphSpec,
        *,
        begin_step: Callable[[int], None],
        device: torch.device,
    ) -> None:
        """begin_step: is told before every step how many of its rows count."""
        if spec.rows_capacity < 1 or spec.rows_capacity & (spec.rows_capacity - 1):
            raise InternalError(f"{spec.rows_capacity} rows of a graph are no power of two")
        self._program: Final = program
        self._kv = kv
        self._backend = backend
        self._spec = spec
        self._begin_step = begin_step
        self._device = device
        self._lanes: dict[int, _Lane] = {}
        self._counters = _Counters()

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    def counts(self) -> GraphCounts:
        """For status; from any thread."""
        now, lanes = self._counters, dict(self._lanes)
        return GraphCounts(
            captured_rows=tuple(sorted(rows for rows, one in lanes.items() if one.graph)),
            captures_count=now.captures_count,
            replays_count=now.replays_count,
            eager_count=now.eager_count,
            failures=tuple(sorted(now.failures.items())),
        )

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """One pass over the step's tokens; fp32 logits [S', vocab] on the device, the caller's."""
        tokens_count = step.token_ids.shape[0]
        self._begin_step(tokens_count)
        if not isinstance(kv, BatchView) or not self._can_replay(step, kv):
            self._counters.eager_count += 1
            return self._program.forward(step_on(step, self._device), kv)
        rows_count = 1 << (tokens_count - 1).bit_length()
        lane = self._lane(rows_count)
        lane.load(step, kv, self._spec.padding_page)
        logits = self._run(rows_count, lane)
        return logits.index_select(0, step.logits_index.to(self._device))

    def _can_replay(self, step: StepInput, kv: BatchView) -> bool:
        sequences_count, pages_count = kv.page_table.shape
        return (
            sequences_count == step.token_ids.shape[0] <= self._spec.rows_capacity
            and pages_count <= self._spec.pages_capacity
        )

    def _run(self, rows_count: int, lane: _Lane) -> torch.Tensor:
        """Logits of every row, until the next step."""
        if lane.graph is None and lane.was_run and not lane.failure:
            self._capture(rows_count, lane)
        if lane.graph is not None:
            self._counters.replays_count += 1
            return lane.graph.replay()
        self._counters.eager_count += 1
        lane.was_run = True
        return self._program.forward(lane.step, lane.view)

    def _capture(self, rows_count: int, lane: _Lane) -> None:
        try:
            lane.graph = self._backend.capture(lambda: self._program.forward(lane.step, lane.view))
        except (RuntimeError, ResourceError) as error:
            lane.failure = str(error) or type(error).__name__
            self._counters.failures[rows_count] = lane.failure
        else:
            self._counters.captures_count += 1

    def _lane(self, rows_count: int) -> _Lane:
        if rows_count not in self._lanes:
            self._lanes[rows_count] = self._new_lane(rows_count)
        return self._lanes[rows_count]

    def _new_lane(self, rows_count: int) -> _Lane:
        def rows(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows_count, dtype=dtype, device=self._device)

        numbers = torch.arange(rows_count, device=self._device)
        table = (rows_count, self._spec.pages_capacity)
        batch = KvBatch(
            page_table=torch.full(
                table, self._spec.padding_page, dtype=torch.int32, device=self._device
            ),
            sequence_index=numbers.to(torch.int32),
            positions=rows(torch.int32),
        )
        step = StepInput(
            token_ids=rows(torch.int64), positions=rows(torch.int64), logits_index=numbers
        )
        return _Lane(step=step, batch=batch, view=self._kv.view(batch))


def step_on(step: StepInput, device: torch.device) -> StepInput:
    """The step there."""
    return StepInput(
        token_ids=step.token_ids.to(device),
        positions=step.positions.to(device),
        logits_index=step.logits_index.to(device),
    )
