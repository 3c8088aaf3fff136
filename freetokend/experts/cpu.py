"""Every routed expert executed in place by the native executor."""

from __future__ import annotations

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.bank import MappedBank
from freetokend.ftw.layout import ExpertBank
from freetokend.native.executor import Executor, Numerics, is_fast
from freetokend.native.program import BankExperts, BankSpec
from freetokend.tensor.memory import address_of


def bank_experts(
    bank: ExpertBank, region_address: int, *, numerics: Numerics = "exact"
) -> BankExperts:
    """The executor's own dispatch over a bank of the mapped region, for native programs.

    numerics: "fast" lets the executor round activations to int8 where a format allows it.
    """
    return BankExperts(
        BankSpec(
            records=region_address + bank.offset_bytes,
            record_bytes=bank.record_bytes,
            layers_count=bank.moe_layers_count,
            experts_per_layer_count=bank.experts_per_layer_count,
            hidden_size=bank.hidden_size,
            intermediate_size=bank.intermediate_size,
            weight_format=bank.format,
            has_bias=bank.has_bias,
            activation=bank.activation,
            activation_limit=bank.activation_limit,
            activation_alpha=bank.activation_alpha,
            fast=is_fast(numerics),
        )
    )


class CpuExpertDispatch:
    """ExpertDispatch over a MappedBank, for programs that run op by op in torch."""

    def __init__(
        self, executor: Executor, mapped: MappedBank, *, numerics: Numerics = "exact"
    ) -> None:
        """numerics: "fast" lets the executor round activations to int8 where a format allows it."""
        self._executor = executor
        self._numerics: Numerics = numerics
        self._mapped = mapped

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """x bf16 [T, H]; expert_ids int32 [T, k]; weights fp32 [T, k] -> fp32 [T, H].

        The branches' results are merged by one reduction in routed order, so that other branches
        can join without changing a bit.
        """
        bank = self._mapped.bank
        tokens, top_k = expert_ids.shape
        if x.shape != (tokens, bank.hidden_size) or weights.shape != expert_ids.shape:
            raise InternalError(
                f"experts got x {list(x.shape)}, ids {list(expert_ids.shape)} and weights "
                f"{list(weights.shape)}; the bank's hidden size is {bank.hidden_size}"
            )
        partial = torch.empty((tokens, top_k, bank.hidden_size), dtype=torch.float32)
        self._executor.experts(
            address_of(x, torch.bfloat16),
            address_of(expert_ids, torch.int32),
            address_of(weights, torch.float32),
            partial.data_ptr(),
            tokens=tokens,
            top_k=top_k,
            hidden_size=bank.hidden_size,
            intermediate_size=bank.intermediate_size,
            bank=self._mapped.layer_address(moe_layer_index),
            record_bytes=bank.record_bytes,
            experts_count=bank.experts_per_layer_count,
            weight_format=bank.format,
            has_bias=bank.has_bias,
            activation=bank.activation,
            activation_limit=bank.activation_limit,
            activation_alpha=bank.activation_alpha,
            numerics=self._numerics,
        )
        out = torch.empty((tokens, bank.hidden_size), dtype=torch.float32)
        self._executor.merge(
            partial.data_ptr(),
            out.data_ptr(),
            tokens=tokens,
            top_k=top_k,
            hidden_size=bank.hidden_size,
        )
        return out
