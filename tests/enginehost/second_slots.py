"""Experts from slots by a second implementation: plans and fills of its own, torch in the slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from freetokend.device.copier import HostCopier
from freetokend.device.host_arena import HostArena
from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.experts.fill import FillLink
from freetokend.experts.plan.contract import (
    CPU,
    DEFERRED,
    PlanInputs,
    PlanOutputs,
    PlanShape,
    Stat,
)
from freetokend.experts.plan.native import NativePlanner
from freetokend.experts.reference import TorchExpertDispatch
from freetokend.experts.slot_pool import SlotPool
from freetokend.native.executor import Executor
from freetokend.policy.eviction import default_order
from freetokend.tensor.program import Experts, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBank(MappedBank):
    """The bank's experts where they lie in slots: reading one without a slot fails."""

    pool: SlotPool = field(repr=False)

    def record_address(self, moe_layer_index: int, expert: int) -> int:
        slot = int(self.pool.state.slot_of_expert[self.bank.expert_id(moe_layer_index, expert)])
        return self.pool.slot_address(slot)


class SecondSlots:
    """An ExpertDispatch, and an Observer that puts its results in the place of a program's own.

    fill_misses: as of `CacheSpec`. plant: called with the address of each slot just filled.
    """

    def __init__(
        self,
        mapped: MappedBank,
        executor: Executor,
        *,
        slots_count: int,
        top_k: int,
        fill_misses: bool,
        plant: Callable[[int], None] = lambda _: None,
    ) -> None:
        bank = mapped.bank
        self._bank, self._top_k, self._fill_misses, self._plant = bank, top_k, fill_misses, plant
        self.mapped = mapped
        self.pool = SlotPool(
            HostArena(bank.length_bytes),
            HostCopier(),
            record_bytes=bank.record_bytes,
            experts_count=bank.experts_count,
            slots_capacity=bank.experts_count,
        )
        self.pool.resize(slots_count)
        self._link = FillLink(mapped, self.pool)
        slots = SlotBank(bank=bank, region_address=mapped.region_address, pool=self.pool)
        self._in_slots = TorchExpertDispatch(slots, torch.float32)
        self._on_cpu = CpuExpertDispatch(executor, mapped)
        self._fillable = torch.ones(bank.moe_layers_count, dtype=torch.int32)
        halves = [-(-misses // 2) for misses in range(bank.experts_per_layer_count + 1)]
        self._table = torch.tensor([halves], dtype=torch.int32)
        self.slot_pairs_count = self.cpu_pairs_count = 0

    def __call__(self, op: Op, buffer: Callable[[int], torch.Tensor]) -> None:
        """Observer: after the program's own experts."""
        if isinstance(op, Experts):
            parts = [buffer(number).clone() for number in (op.x, op.ids, op.weights)]
            buffer(op.out).copy_(self.dispatch(op.moe_layer_index, *parts))

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """In as many rounds as the plan takes."""
        pending = expert_ids.clone()
        out = torch.zeros((x.shape[0], self._bank.hidden_size))
        while bool((pending >= 0).any()):
            planned = self._planned(moe_layer_index, pending)
            filled = [
                (int(expert_id), int(slot))
                for expert_id, slot in planned.fills[: int(planned.fills_count)]
            ]
            self._link.wait(self._link.submit(planned.fills, len(filled)))
            for _, slot in filled:
                self._plant(self.pool.slot_address(slot))
            in_slots = torch.where(planned.physical >= 0, pending, -1)
            on_cpu = torch.where(planned.physical == CPU, pending, -1)
            self.slot_pairs_count += int((in_slots >= 0).sum())
            self.cpu_pairs_count += int((on_cpu >= 0).sum())
            out += self._in_slots.dispatch(moe_layer_index, x, in_slots, weights)
            out += self._on_cpu.dispatch(moe_layer_index, x, on_cpu.contiguous(), weights)
            assert planned.stats[Stat.DEFERRED] == 0 or filled, "a round that does nothing"
            pending = torch.where(planned.physical == DEFERRED, pending, -1)
        return out

    def _planned(self, moe_layer_index: int, routed: torch.Tensor) -> PlanOutputs:
        tokens, top_k = routed.shape
        shape = PlanShape(
            moe_layers_count=self._bank.moe_layers_count,
            experts_per_layer_count=self._bank.experts_per_layer_count,
            top_k=top_k,
            tokens_capacity=tokens,
            cpu_kernel=not self._fill_misses,
        )
        order = default_order(self._bank.moe_layers_count)
        outputs = PlanOutputs.empty(shape)
        inputs = PlanInputs(
            routed=routed.contiguous(),
            valid_tokens=torch.tensor([tokens], dtype=torch.int32),
            fillable=self._fillable,
            fill_count=self._table,
        )
        NativePlanner(self.pool.state, shape, order).plan(moe_layer_index, inputs, outputs)
        return outputs

    def close(self) -> None:
        self._link.close()
        self.pool.close()
