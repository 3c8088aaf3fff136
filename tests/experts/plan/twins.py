"""An implementation of the plan call beside the oracle: the same steps, the same integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from freetokend.experts.plan.contract import (
    CPU,
    DEFERRED,
    NONE,
    CachePlanner,
    KernelOrder,
    PlanInputs,
    PlanOutputs,
    PlanShape,
    Stat,
)
from freetokend.experts.plan.oracle import OraclePlanner, OracleResult, OracleState
from freetokend.experts.residency import EMPTY, HELD_FROM, NOT_RESIDENT, ResidencyState
from freetokend.policy.eviction import NEVER

MakePlanner = Callable[[ResidencyState, PlanShape, KernelOrder], CachePlanner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decode step of one layer."""

    layer: int
    routed: list[list[int]]
    valid_tokens: int
    fillable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Slots for a layer; `wanted` empty: all experts."""

    layer: int
    wanted: list[int] = field(default_factory=list)
    fillable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The end of a reservation."""

    layer: int
    uses: list[int]
    tokens_count: int
    kept_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Another number of slots; what lies behind the end is lost."""

    slots_count: int


Step = Plan | Reserve | Release | Resize


class Twins:
    """The oracle, whose state is a list, and an implementation, whose state is tensors."""

    def __init__(
        self,
        make_planner: MakePlanner,
        shape: PlanShape,
        order: KernelOrder,
        *,
        slots_capacity: int,
        fill_count: Sequence[Sequence[int]] = ((0, 1), (0, 1)),
    ) -> None:
        experts_count = shape.moe_layers_count * shape.experts_per_layer_count
        self.shape = shape
        self.fill_count = [list(row) for row in fill_count]
        self.tensors = ResidencyState.empty(
            experts_count=experts_count, slots_capacity=slots_capacity
        )
        self.planner = make_planner(self.tensors, shape, order)
        self.state = OracleState.empty(experts_count=experts_count, slots_capacity=slots_capacity)
        self.oracle = OraclePlanner(
            layers_count=shape.moe_layers_count,
            experts_per_layer_count=shape.experts_per_layer_count,
            cpu_kernel=shape.cpu_kernel,
            order=order,
            state=self.state,
        )
        self.outputs = PlanOutputs.empty(shape)
        self._apply_resize(Resize(slots_count=slots_capacity))

    def run(self, step: Step) -> OracleResult | None:
        """One step of both; AssertionError where they differ or break an invariant."""
        before = list(self.state.expert_of_slot), list(self.state.slot_key)
        result: OracleResult | None = None
        match step:
            case Plan():
                result = self._plan(step)
                self._check_plan(step, result, *before)
            case Reserve():
                result = self._reserve(step)
            case Release():
                self.oracle.release(
                    step.layer,
                    step.uses,
                    tokens_count=step.tokens_count,
                    kept_count=step.kept_count,
                )
                self.planner.release(
                    step.layer,
                    torch.tensor(step.uses, dtype=torch.int32),
                    tokens_count=step.tokens_count,
                    kept_count=step.kept_count,
                )
            case Resize():
                self._apply_resize(step)
        self.check_equal()
        self._check_invariants()
        return result

    def check_equal(self) -> None:
        """Both states are the same."""
        state, tensors = self.state, self.tensors
        assert tensors.slot_of_expert.tolist() == state.slot_of_expert
        assert tensors.expert_of_slot.tolist() == state.expert_of_slot
        assert tensors.slot_key.tolist() == state.slot_key
        assert tensors.demanded_at.tolist() == state.demanded_at
        assert tensors.score.tolist() == state.score
        assert tensors.clock.tolist() == [state.clock]
        assert tensors.slots_count.tolist() == [state.slots_count]

    def inputs(self, step: Plan | Reserve) -> PlanInputs:
        """Tensors of a step; other layers are as fillable as this one is not."""
        fillable = [int(not step.fillable)] * self.shape.moe_layers_count
        fillable[step.layer] = int(step.fillable)
        size = (self.shape.tokens_capacity, self.shape.top_k)
        routed = step.routed if isinstance(step, Plan) else torch.full(size, 1).tolist()
        valid = step.valid_tokens if isinstance(step, Plan) else 0
        return PlanInputs(
            routed=torch.tensor(routed, dtype=torch.int32),
            valid_tokens=torch.tensor([valid], dtype=torch.int32),
            fillable=torch.tensor(fillable, dtype=torch.int32),
            fill_count=torch.tensor(self.fill_count, dtype=torch.int32),
        )

    def _plan(self, step: Plan) -> OracleResult:
        expected = self.oracle.plan(
            step.layer,
            step.routed,
            valid_tokens=step.valid_tokens,
            fillable=step.fillable,
            fill_count=self.fill_count,
        )
        out = self.outputs
        fills_before, cpu_before = out.fills.tolist(), out.cpu.tolist()
        self.planner.plan(step.layer, self.inputs(step), out)
        assert out.physical.tolist() == expected.physical
        assert out.cpu_count.tolist() == [len(expected.cpu)]
        assert out.cpu.tolist() == expected.cpu + cpu_before[len(expected.cpu) :]
        self._check_fills(expected, fills_before)
        return expected

    def _reserve(self, step: Reserve) -> OracleResult:
        expected = self.oracle.reserve(
            step.layer, fillable=step.fillable, wanted=step.wanted or None
        )
        wanted = torch.tensor(step.wanted, dtype=torch.int32) if step.wanted else None
        out = self.outputs
        fills_before, untouched = out.fills.tolist(), (out.physical.tolist(), out.cpu.tolist())
        self.planner.reserve(step.layer, self.inputs(step), out, wanted=wanted)
        assert (out.physical.tolist(), out.cpu.tolist()) == untouched
        self._check_fills(expected, fills_before)
        return expected

    def _check_fills(self, expected: OracleResult, before: list[list[int]]) -> None:
        fills = [list(fill) for fill in expected.fills]
        assert self.outputs.fills_count.tolist() == [len(fills)]
        assert self.outputs.fills.tolist() == fills + before[len(fills) :]
        assert self.outputs.stats.tolist() == [expected.stats[one] for one in Stat]

    def _check_plan(
        self, step: Plan, result: OracleResult, held_before: list[int], keys_before: list[int]
    ) -> None:
        """What no call may do, whatever the oracle thinks."""
        first = step.layer * self.shape.experts_per_layer_count
        needed = {first + e for row in step.routed[: step.valid_tokens] for e in row if e >= 0}
        for _, slot in result.fills:
            assert held_before[slot] not in needed
            assert held_before[slot] == EMPTY or keys_before[slot] < HELD_FROM
            assert slot < self.state.slots_count
        for token, row in enumerate(step.routed):
            for routed, physical in zip(row, result.physical[token], strict=True):
                if token >= step.valid_tokens or routed < 0:
                    assert physical == NONE
                elif physical >= 0:
                    assert self.state.expert_of_slot[physical] == first + routed
                else:
                    assert physical == (CPU if self.shape.cpu_kernel else DEFERRED)

    def _check_invariants(self) -> None:
        state = self.state
        occupied = [e for e in state.expert_of_slot if e != EMPTY]
        assert len(set(occupied)) == len(occupied)
        for slot, expert in enumerate(state.expert_of_slot):
            if expert != EMPTY:
                assert slot < state.slots_count
                assert state.slot_of_expert[expert] == slot
        for expert, slot in enumerate(state.slot_of_expert):
            assert slot == NOT_RESIDENT or state.expert_of_slot[slot] == expert
        for demanded_at, score in zip(state.demanded_at, state.score, strict=True):
            assert demanded_at <= state.clock
            assert score >= NEVER

    def _apply_resize(self, step: Resize) -> None:
        state = self.state
        for slot in range(step.slots_count, len(state.expert_of_slot)):
            if state.expert_of_slot[slot] != EMPTY:
                state.slot_of_expert[state.expert_of_slot[slot]] = NOT_RESIDENT
            state.expert_of_slot[slot] = EMPTY
            state.slot_key[slot] = 0
        state.slots_count = step.slots_count
        self.tensors.slot_of_expert.copy_(torch.tensor(state.slot_of_expert))
        self.tensors.expert_of_slot.copy_(torch.tensor(state.expert_of_slot))
        self.tensors.slot_key.copy_(torch.tensor(state.slot_key))
        self.tensors.slots_count.fill_(step.slots_count)
