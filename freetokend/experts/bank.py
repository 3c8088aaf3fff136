"""The bank of expert records in mapped memory: where a layer's records begin."""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.errors import InternalError
from freetokend.ftw.layout import ExpertBank


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedBank:
    """An ExpertBank whose region is mapped at `region_address` (64-bit throughout)."""

    bank: ExpertBank
    region_address: int

    def layer_address(self, moe_layer_index: int) -> int:
        """Address of the record of expert 0 of a MoE layer."""
        return self.record_address(moe_layer_index, 0)

    def record_address(self, moe_layer_index: int, expert: int) -> int:
        """Address of one record; InternalError outside the bank, before anything reads there."""
        bank = self.bank
        if not 0 <= moe_layer_index < bank.moe_layers_count:
            raise InternalError(
                f"MoE layer {moe_layer_index} is outside the bank's {bank.moe_layers_count} layers"
            )
        if not 0 <= expert < bank.experts_per_layer_count:
            raise InternalError(
                f"expert {expert} is outside the {bank.experts_per_layer_count} of a layer"
            )
        expert_id = bank.expert_id(moe_layer_index, expert)
        return self.region_address + bank.record_offset_bytes(expert_id)
