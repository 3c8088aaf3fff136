"""Experts computed in plain torch from the records: the oracle of the other dispatches."""

from __future__ import annotations

import torch

from freetokend.experts.bank import MappedBank
from freetokend.ftw.packing import bf16_to_f32, unpack_record
from freetokend.tensor.memory import tensor_at


class TorchExpertDispatch:
    """ExpertDispatch that unpacks each record it needs and computes in `dtype`.

    With fp64 it says what the bf16 weights mean; with fp32 intermediate activations are rounded to
    bf16 where the executor rounds them.
    """

    def __init__(self, mapped: MappedBank, dtype: torch.dtype) -> None:
        self._mapped = mapped
        self._dtype = dtype

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Any float x [T, H]; expert_ids int32 [T, k]; weights [T, k] -> `dtype` [T, H]."""
        out = torch.zeros((x.shape[0], self._mapped.bank.hidden_size), dtype=self._dtype)
        for expert in torch.unique(expert_ids).tolist():
            if expert < 0:
                continue
            gate, up, down = self._matrices(moe_layer_index, expert)
            for token, slot in (expert_ids == expert).nonzero().tolist():
                row = x[token].to(self._dtype)
                hidden = torch.nn.functional.silu(gate @ row) * (up @ row)
                if self._dtype == torch.float32:
                    hidden = hidden.to(torch.bfloat16).to(self._dtype)
                out[token] += weights[token, slot].to(self._dtype) * (down @ hidden)
        return out

    def _matrices(
        self, moe_layer_index: int, expert: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bank = self._mapped.bank
        address = self._mapped.record_address(moe_layer_index, expert)
        record = tensor_at(address, (bank.record_bytes,), torch.uint8).numpy()
        gate, up, down = (
            torch.from_numpy(bf16_to_f32(part)).to(self._dtype)
            for part in unpack_record(record, bank.hidden_size, bank.intermediate_size)
        )
        return gate, up, down
