"""The kernels of a dispatch in plain torch, for the device "cpu": what those of a GPU must do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetokend.device.copier import CopyRange, HostCopier
from freetokend.experts.bank import MappedBank
from freetokend.experts.plan.contract import CPU
from freetokend.experts.slot_pool import SlotPool
from freetokend.native.executor import Executor
from freetokend.tensor.memory import address_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOps:
    """`FillRecords`, `SlotExpertsCall` and `MergeBranches` over a pool of slots in host memory."""

    mapped: MappedBank
    pool: SlotPool
    executor: Executor

    def fill(self, fills: torch.Tensor, fills_count: torch.Tensor) -> None:
        """A copy for each entry that counts."""
        bank = self.mapped
        HostCopier().copy(
            [
                CopyRange(
                    from_address=bank.region_address + bank.bank.record_offset_bytes(expert),
                    to_address=self.pool.slot_address(slot),
                    length_bytes=bank.bank.record_bytes,
                )
                for expert, slot in fills[: int(fills_count)].tolist()
            ]
        )

    def slots(
        self, x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        """The executor over the slots, as if each were an expert of one layer."""
        bank, ids = self.mapped.bank, physical.clamp(min=-1).contiguous()
        computed = torch.full_like(y, float("nan"))
        self.executor.experts(
            address_of(x, torch.bfloat16),
            address_of(ids, torch.int32),
            address_of(weights, torch.float32),
            computed.data_ptr(),
            tokens=ids.shape[0],
            top_k=ids.shape[1],
            hidden_size=bank.hidden_size,
            intermediate_size=bank.intermediate_size,
            bank=self.pool.base_address,
            record_bytes=bank.record_bytes,
            experts_count=max(self.pool.slots_count, ids.shape[1]),
            weight_format=bank.format,
            has_bias=bank.has_bias,
            activation=bank.activation,
            activation_limit=bank.activation_limit,
            activation_alpha=bank.activation_alpha,
        )
        y.copy_(torch.where((physical >= 0).unsqueeze(-1), computed, y))

    @staticmethod
    def merge(y_gpu: torch.Tensor, y_cpu: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
        """In routed order, one addition after the other."""
        place = physical.unsqueeze(-1)
        rows = torch.where(place >= 0, y_gpu, torch.where(place == CPU, y_cpu, 0.0))
        out = torch.zeros_like(rows.select(1, 0))
        for row in rows.unbind(1):
            out = out + row
        return out
