"""Experts computed in plain torch from the records: the oracle of the other dispatches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.bank import MappedBank
from freetokend.ftw.formats import parse_format
from freetokend.ftw.layout import ExpertBank
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing_record import unpack_record
from freetokend.tensor.memory import tensor_at


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expert:
    """gate and up [I, H], down [H, I]; biases [I], [I], [H], or None."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


class TorchExpertDispatch:
    """ExpertDispatch that unpacks each record it needs and computes in `dtype`.

    With fp64 it says what the weights mean, in whatever format they are; with fp32 intermediate
    activations are rounded to bf16 where the executor rounds them.
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
        for expert_id in torch.unique(expert_ids).tolist():
            if expert_id < 0:
                continue
            expert = self._expert(moe_layer_index, expert_id)
            for token, slot in (expert_ids == expert_id).nonzero().tolist():
                row = x[token].to(self._dtype)
                out[token] += weights[token, slot].to(self._dtype) * self._output(expert, row)
        return out

    def _output(self, expert: _Expert, row: torch.Tensor) -> torch.Tensor:
        gate, up = expert.gate @ row, expert.up @ row
        if expert.biases is not None:
            gate, up = gate + expert.biases[0], up + expert.biases[1]
        hidden = activate(gate, up, self._mapped.bank)
        if self._dtype == torch.float32:
            hidden = hidden.to(torch.bfloat16).to(self._dtype)
        out = expert.down @ hidden
        return out if expert.biases is None else out + expert.biases[2]

    def _expert(self, moe_layer_index: int, expert: int) -> _Expert:
        bank = self._mapped.bank
        address = self._mapped.record_address(moe_layer_index, expert)
        record = tensor_at(address, (bank.record_bytes,), torch.uint8).numpy()
        found = unpack_record(
            record,
            parse_format(bank.format),
            bank.hidden_size,
            bank.intermediate_size,
            has_bias=bank.has_bias,
        )
        gate, up, down = (
            torch.from_numpy(dequantise(matrix)).to(self._dtype)
            for matrix in (found.gate, found.up, found.down)
        )
        biases = None
        if found.biases is not None:
            of_gate, of_up, of_down = (
                torch.from_numpy(bias.copy()).to(self._dtype) for bias in found.biases
            )
            biases = (of_gate, of_up, of_down)
        return _Expert(gate=gate, up=up, down=down, biases=biases)


def activate(gate: torch.Tensor, up: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """What goes into down, for products of any shape, as the bank's activation says.

    InternalError for an activation that is none of `ExpertBank`'s.
    """
    if bank.activation_limit > 0.0:
        gate = gate.clamp(max=bank.activation_limit)
        up = up.clamp(min=-bank.activation_limit, max=bank.activation_limit)
    match bank.activation:
        case "silu":
            return torch.nn.functional.silu(gate) * up
        case "gelu":
            return torch.nn.functional.gelu(gate) * up
        case "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        case "swiglu_oai":
            return (up + 1.0) * gate * torch.sigmoid(bank.activation_alpha * gate)
        case _:
            raise InternalError(f"there is no activation {bank.activation!r}")
