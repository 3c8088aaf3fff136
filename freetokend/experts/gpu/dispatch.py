"""Routed experts of a step on a GPU: planned, filled, executed in slots and on the CPU, merged.

Per layer: the plan says where each expert is; what is to be filled is copied into its slot; the
CPU computes its share beside the slots; one sum in routed order merges both. All of it is queued
without a look at the device, in shapes that depend on the number of rows alone, so that a step
can be captured; how many of the rows count, what lies in which slot, how many slots there are and
how misses are split is data on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.gpu.cpu_fork import CpuFork, CpuWork
from freetokend.experts.plan.contract import (
    CPU,
    DEFERRED,
    CachePlanner,
    PlanInputs,
    PlanOutputs,
    PlanShape,
    Stat,
)

# What an offloading step counts once, and not again in its later rounds.
_OF_FIRST_ROUND: Final = (Stat.HITS, Stat.MISSES, Stat.HIT_PAIRS, Stat.PAIRS, Stat.REFUSED)


class FillRecords(Protocol):
    """Copies records from the pool into slots."""

    def __call__(self, fills: torch.Tensor, fills_count: torch.Tensor) -> None:
        """The first fills_count (int32 [1]) of fills: int32 [E, 2], (expert_id, slot)."""
        ...


class SlotExpertsCall(Protocol):
    """Executes pairs whose experts are in slots."""

    def __call__(
        self, x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        """x: bf16 [T, H]; physical: int32 [T, k]; weights: fp32 [T, k] -> y: fp32 [T, k, H],
        already weighted; rows of pairs without a slot stay as they are."""
        ...


class MergeBranches(Protocol):
    """Adds up what the branches computed."""

    def __call__(
        self, y_gpu: torch.Tensor, y_cpu: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """y_*: fp32 [T, k, H] -> fp32 [T, H]: each pair's row of its branch, in routed order;
        nothing for pairs that are neither in a slot nor CPU."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOps:
    """The device's kernels. fork: None where no format needs the CPU (misses are filled in
    rounds)."""

    fill: FillRecords
    slots: SlotExpertsCall
    merge: MergeBranches
    fork: CpuFork | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSpec:
    """What a dispatch is made for.

    buckets_count: of tokens per expert in the tables of fills. least_slots: there are never fewer
    slots that can be evicted or hold what is needed now; offloading takes as many rounds as that
    needs.
    """

    moe_layers_count: int
    experts_per_layer_count: int
    hidden_size: int
    top_k: int
    tokens_capacity: int
    buckets_count: int
    least_slots: int

    def plan_shape(self, tokens_count: int, *, cpu_kernel: bool) -> PlanShape:
        """Of a call with so many rows."""
        return PlanShape(
            moe_layers_count=self.moe_layers_count,
            experts_per_layer_count=self.experts_per_layer_count,
            top_k=self.top_k,
            tokens_capacity=tokens_count,
            cpu_kernel=cpu_kernel,
        )

    def rounds_count(self, tokens_count: int) -> int:
        """Rounds in which every expert of so many rows has had its slot."""
        needed_count = min(tokens_count * self.top_k, self.experts_per_layer_count)
        return -(-needed_count // self.least_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """Calls of one padded number of rows. routed: int32 [layers, rows, k]; served, and pending,
    which later rounds have of a layer: int32 [rows, k]."""

    rows_count: int
    rounds_count: int
    planner: CachePlanner
    outputs: PlanOutputs
    routed: torch.Tensor
    pending: torch.Tensor
    served: torch.Tensor


class CudaExpertDispatch:
    """ExpertDispatch over the slots of a device, for decode steps and prefills without a sweep.

    Its tensors are at addresses that never change; a table or a flag that is changed between two
    steps holds for graphs that were captured before. `valid_tokens` rows of the next step count:
    `begin_step` says how many, before every step.
    """

    def __init__(
        self,
        spec: DispatchSpec,
        ops: BranchOps,
        make_planner: Callable[[PlanShape], CachePlanner],
        device: torch.device,
    ) -> None:
        """Every layer can be filled, and every miss is until `set_fill_counts`."""
        if spec.least_slots < 1 or spec.tokens_capacity < 1:
            raise InternalError(f"no step can be computed with {spec}")
        self.spec: Final = spec
        self._spec = spec
        self._ops = ops
        self._make_planner = make_planner
        self._device = device
        layers, experts = spec.moe_layers_count, spec.experts_per_layer_count
        self.valid_tokens: Final = self._full((1,), 0)
        self._chosen_tokens = self._full((1,), 0)
        self._step_tokens = 0
        self._calls: list[tuple[int, int]] = []
        self.fillable: Final = self._full((layers,), 1)
        self.fillable_layers: tuple[bool, ...] = (True,) * layers
        fill_all = torch.arange(experts + 1, dtype=torch.int32, device=device)
        self.fill_counts: Final = fill_all.repeat(layers, spec.buckets_count, 1)
        self.totals: Final = torch.zeros(layers, len(Stat), dtype=torch.int64, device=device)
        self._lanes: dict[int, _Lane] = {}
        pairs = (padded_rows(spec.tokens_capacity), spec.top_k)
        self._cpu_ids = self._full(pairs, -1)
        self._y = torch.zeros(2, *pairs, spec.hidden_size, dtype=torch.float32, device=device)
        self._counted = _counted_stats(device)

    def begin_step(self, tokens_count: int) -> None:
        """So many rows of the next step count; what follows them is padding."""
        if not 0 <= tokens_count <= self._spec.tokens_capacity:
            raise InternalError(
                f"a step of {tokens_count} tokens; at most {self._spec.tokens_capacity} fit"
            )
        self._step_tokens = tokens_count
        self._calls.clear()
        self.valid_tokens.fill_(tokens_count)
        if self._ops.fork is not None:
            self._ops.fork.begin_step()

    def set_fill_counts(self, moe_layer_index: int, table: Sequence[Sequence[int]]) -> None:
        """How many of a layer's misses are filled: [buckets][misses + 1]."""
        values = torch.tensor(table, dtype=torch.int32)
        there = self.fill_counts.select(0, moe_layer_index)
        if values.shape != there.shape:
            raise InternalError(
                f"a table of fills of {list(values.shape)}; the cache has {list(there.shape)}"
            )
        there.copy_(values)

    def set_fillable(self, fillable: Sequence[bool]) -> None:
        """Which layers' records can be filled (are pinned); the others' misses go to the CPU."""
        if len(fillable) != self._spec.moe_layers_count:
            raise InternalError(f"{len(fillable)} flags for {self._spec.moe_layers_count} layers")
        self.fillable.copy_(torch.tensor(fillable, dtype=torch.int32))
        self.fillable_layers = tuple(fillable)

    @property
    def has_cpu(self) -> bool:
        """Whether the CPU executes what has no slot."""
        return self._ops.fork is not None

    def prepare(self, tokens_count: int) -> None:
        """Make what a step of so many rows needs, before it is captured."""
        self._lane(tokens_count)

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """As of `ExpertDispatch`; bf16 x, zeros for rows that do not count.

        Fewer rows than tokens count in the step are those that want logits: all of them count.
        """
        rows_count = x.shape[0]
        if rows_count == 0:
            return x.new_zeros((0, self._spec.hidden_size), dtype=torch.float32)
        valid_tokens = self.valid_tokens
        if rows_count < self._step_tokens:
            valid_tokens = self._chosen_tokens.fill_(rows_count)
        lane = self._lane(rows_count)
        self._calls.append((moe_layer_index, rows_count))
        routed = lane.routed.select(0, moe_layer_index).narrow(0, 0, rows_count)
        routed.copy_(expert_ids)
        if lane.rounds_count > 1:
            lane.pending.copy_(lane.routed.select(0, moe_layer_index))
        y_gpu, y_cpu = (one.narrow(0, 0, rows_count) for one in self._y.unbind(0))
        served = lane.served.narrow(0, 0, rows_count)
        for round_index in range(lane.rounds_count):
            physical = self._plan(lane, moe_layer_index, round_index, valid_tokens)
            physical = physical.narrow(0, 0, rows_count)
            if self._ops.fork is not None:
                # Before the fill: the CPU computes while records are on their way.
                work = self._cpu_work(x, routed, physical, weights, valid_tokens)
                self._ops.fork.begin(moe_layer_index, work, y_cpu)
            self._ops.fill(lane.outputs.fills, lane.outputs.fills_count)
            self._ops.slots(x, physical, weights, y_gpu)
            if round_index:
                # A slot is above what stands for none.
                torch.maximum(served, physical, out=served)
            else:
                served.copy_(physical)
            if round_index + 1 < lane.rounds_count:
                lane.pending.masked_fill_(lane.outputs.physical != DEFERRED, -1)
        if self._ops.fork is not None:
            self._ops.fork.join()
        return self._ops.merge(y_gpu, y_cpu, served)

    def routed_rows(self) -> list[tuple[int, torch.Tensor]]:
        """Layer by layer what the rows of the last step that count have chosen: int32 [t, k], good
        until the next step.

        A step that replayed a graph has not come by here: its layers have all of its rows.
        """
        layers = range(self._spec.moe_layers_count)
        calls = self._calls or [(layer, self._step_tokens) for layer in layers]
        return [
            (
                layer,
                self._lane(rows_count)
                .routed.select(0, layer)
                .narrow(0, 0, min(rows_count, self._step_tokens)),
            )
            for layer, rows_count in calls
        ]

    def dispatch_placed(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """As `dispatch`, of rows that all count and pairs whose places are known: physical int32
        [T, k], slots, or CPU in layers that cannot be filled. No more rows than a step has."""
        rows_count = x.shape[0]
        y_gpu, y_cpu = (one.narrow(0, 0, rows_count) for one in self._y.unbind(0))
        fork = None if self.fillable_layers[moe_layer_index] else self._ops.fork
        if fork is not None:
            tokens = self._chosen_tokens.fill_(rows_count)
            work = self._cpu_work(x, expert_ids, physical, weights, tokens)
            fork.begin(moe_layer_index, work, y_cpu)
        self._ops.slots(x, physical, weights, y_gpu)
        if fork is not None:
            fork.join()
        return self._ops.merge(y_gpu, y_cpu, physical)

    def check(self) -> None:
        """After a step, when the device has been waited for: InternalError when it is void.

        The step's logits are then no result.
        """
        if self._ops.fork is not None:
            self._ops.fork.check()
        refused_count, deferred_count = (
            int(self.totals.select(1, stat).sum()) for stat in (Stat.REFUSED, Stat.DEFERRED)
        )
        if refused_count or deferred_count:
            self.totals.zero_()
            raise InternalError(
                f"a step is void: {deferred_count} experts found no slot in all rounds, and "
                f"{refused_count} pairs named experts that do not exist"
            )

    def _plan(
        self, lane: _Lane, moe_layer_index: int, round_index: int, valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """int32 [rows, k] of the lane: the slot of each pair, once it is filled."""
        whole = lane.rounds_count == 1
        inputs = PlanInputs(
            routed=lane.routed.select(0, moe_layer_index) if whole else lane.pending,
            valid_tokens=valid_tokens,
            fillable=self.fillable,
            fill_count=self.fill_counts.select(0, moe_layer_index),
        )
        lane.planner.plan(moe_layer_index, inputs, lane.outputs)
        is_last = round_index + 1 == lane.rounds_count
        counted = self._counted.select(0, 2 * (round_index > 0) + is_last)
        self.totals.select(0, moe_layer_index).addcmul_(lane.outputs.stats, counted)
        return lane.outputs.physical

    def _cpu_work(
        self,
        x: torch.Tensor,
        routed: torch.Tensor,
        physical: torch.Tensor,
        weights: torch.Tensor,
        valid_tokens: torch.Tensor,
    ) -> CpuWork:
        ids = self._cpu_ids.narrow(0, 0, x.shape[0])
        ids.copy_(routed).masked_fill_(physical != CPU, -1)
        return CpuWork(x=x, ids=ids, weights=weights, tokens=valid_tokens)

    def _lane(self, rows_count: int) -> _Lane:
        padded = padded_rows(rows_count)
        if padded not in self._lanes:
            self._lanes[padded] = self._new_lane(padded)
        return self._lanes[padded]

    def _new_lane(self, rows_count: int) -> _Lane:
        if rows_count > self._cpu_ids.shape[0]:
            raise InternalError(
                f"a step of {rows_count} rows; at most {self._spec.tokens_capacity} fit"
            )
        has_cpu = self._ops.fork is not None
        shape = self._spec.plan_shape(rows_count, cpu_kernel=has_cpu)
        routed = (rows_count, self._spec.top_k)
        return _Lane(
            rows_count=rows_count,
            rounds_count=1 if has_cpu else self._spec.rounds_count(rows_count),
            planner=self._make_planner(shape),
            outputs=PlanOutputs.empty(shape, self._device),
            routed=self._full((self._spec.moe_layers_count, *routed), -1),
            pending=self._full(routed, -1),
            served=self._full(routed, -1),
        )

    def _full(self, size: tuple[int, ...], value: int) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.int32, device=self._device)


def padded_rows(tokens_count: int) -> int:
    """Rows that a step of so many tokens is computed with: a power of two, so that few kinds of
    step are ever compiled and captured."""
    return 1 << max(tokens_count - 1, 0).bit_length()


def _counted_stats(device: torch.device) -> torch.Tensor:
    """int64 [4, statistics]: what counts of a round that is (not first, last) = 2 bits."""
    rows = []
    for later in (False, True):
        for last in (False, True):
            row = [0 if later and stat in _OF_FIRST_ROUND else 1 for stat in Stat]
            row[Stat.DEFERRED] = int(last)
            rows.append(row)
    return torch.tensor(rows, dtype=torch.int64, device=device)
