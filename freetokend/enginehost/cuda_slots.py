"""What a GPU gives an engine before its backend is known: memory, slots, and what was measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, TypeVar

import torch

from freetokend.core.errors import Reason, ResourceError
from freetokend.enginehost.cuda_budget import CudaInputs, device_facts, plan_device, q_heads_count
from freetokend.enginehost.cuda_platform import AttentionStore, CudaPlatform, KvNeeds
from freetokend.enginehost.cuda_profile import SlotProfile
from freetokend.enginehost.deciding import decide, take_slots
from freetokend.enginehost.kv_plan import context_limit, kv_capacity, kv_plan_of
from freetokend.experts.gpu.device_cache import fillable_layers
from freetokend.experts.gpu.dispatch import padded_rows
from freetokend.experts.shrink_plan import LayerTerm
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.layout import EXPERT_RECORDS
from freetokend.policy.backend_choice import AUTO, Backend, BackendDecision
from freetokend.policy.eviction import default_order
from freetokend.policy.step_cost import StepCosts
from freetokend.tensor.dense_tensors import dense_bytes, dense_tensors

# These have nobody who would execute what cannot be filled yet.
_PINNED_FIRST: Final = (Backend.FUSED, Backend.OFFLOAD)
T = TypeVar("T")


class DeviceSlots:
    """Keys and values, dense weights and slots in a GPU's memory, with the first of the pool's
    layers pinned. Fills were put to the proof, and both branches measured where there are any.

    note: why there are fewer slots than the plan has; empty otherwise. costs: None where nothing
    could be measured.
    """

    def __init__(self, inputs: CudaInputs, platform: CudaPlatform, undo: ExitStack) -> None:
        """undo: gets what gives everything back. ConfigError and ResourceError name the key."""
        self._inputs, self._platform = inputs, platform
        bank = self._bank = inputs.index.expert_bank
        arena = platform.new_arena(bank.experts_count * bank.record_bytes)
        undo.callback(arena.close)
        memory = platform.memory()
        self.facts = device_facts(
            inputs,
            memory.free_bytes,
            granularity_bytes=arena.granularity_bytes,
            kv_granularity_bytes=platform.kv_granularity_bytes(inputs.kv_shape.layers_count),
        )
        self.plan = plan_device(self.facts, inputs.settings)
        self.context_tokens = context_limit(inputs.facts, inputs.settings)
        self.kv_capacity = kv_capacity(
            kv_plan_of(self.plan, inputs.kv_shape),
            inputs.facts,
            inputs.settings,
            memory.total_bytes,
        )
        # Before the slots, of which there can be fewer.
        self.attention = _taken("keys and values", self._new_kv)
        if self.attention.memory is not None:
            undo.callback(self.attention.memory.close)
        self.dense = _taken("the dense weights", self._new_dense)
        inputs.progress()
        self.pool = SlotPool(
            arena,
            platform.copier,
            record_bytes=bank.record_bytes,
            experts_count=bank.experts_count,
            slots_capacity=bank.experts_count,
            layer_term=LayerTerm(
                experts_per_layer_count=bank.experts_per_layer_count,
                ticks_per_layer=default_order(bank.moe_layers_count).ticks_per_layer,
            ),
            device=platform.device,
        )
        self.registration = platform.new_registration(
            inputs.region_address, bank.offset_bytes + bank.experts_count * bank.record_bytes
        )
        undo.callback(self.registration.close)
        self.rows = padded_rows(inputs.step_tokens)
        self.ops = platform.new_ops(
            inputs.mapped,
            self.pool,
            rows_capacity=self.rows,
            top_k=inputs.facts.experts_per_token_count,
        )
        self.transfers = platform.new_transfers()
        undo.callback(self.transfers.close)
        self.note = self._take_slots()
        inputs.progress()
        self.costs: StepCosts | None = None
        if inputs.settings.backend != AUTO:
            self._decide()  # what has no room is refused before the pool is pinned
        self._pin(everything=inputs.settings.backend in _PINNED_FIRST)
        self._profile = SlotProfile(
            inputs.mapped, self.pool, platform, self.ops, layers_count=sum(self.pinned())
        )
        self._profile.check_fills()
        inputs.progress()
        self.measured = self._profile.measured(inputs.executor, self.transfers)
        inputs.progress()
        self.costs = self._costs()

    def decide(self) -> BackendDecision:
        """Before anything lies in slots. ConfigError for what was asked and cannot be had."""
        decision = self._decide()
        if decision.backend in _PINNED_FIRST:
            self._pin(everything=True)
            decision = self._decide()
        return decision

    def pinned(self) -> list[bool]:
        """By layer: whether it can be filled now."""
        return fillable_layers(self._bank, self.registration.registered_bytes)

    def fillable(self) -> list[bool]:
        """By layer: whether it can be filled, now or when the rest is pinned."""
        return self.pinned() if self.registration.note else [True] * self._bank.moe_layers_count

    def token_s(self) -> float:
        """Of the experts of all layers, for one token of a full step."""
        top_k = self._inputs.facts.experts_per_token_count
        return self._bank.moe_layers_count * self._profile.token_s(rows=self.rows, top_k=top_k)

    def _decide(self) -> BackendDecision:
        return decide(
            self._inputs.settings,
            self._bank,
            slots_count=self.pool.slots_count,
            fillable_layers_count=sum(self.fillable()),
            costs=self.costs,
        )

    def _new_kv(self) -> AttentionStore:
        inputs = self._inputs
        return self._platform.new_kv(
            KvNeeds(
                asked=inputs.settings.attention,
                shape=inputs.kv_shape,
                # One more, that no sequence is given: rows that only pad a graph write there.
                pages_count=self.plan.kv_pages_count + 1,
                capacity_count=self.kv_capacity + 1,
                q_heads_count=q_heads_count(inputs),
                context_tokens=self.context_tokens,
            )
        )

    def _new_dense(self) -> dict[str, torch.Tensor]:
        inputs = self._inputs
        return dense_tensors(
            inputs.region_address, inputs.index, inputs.program, self._platform.device
        )

    def _take_slots(self) -> str:
        settings = self._inputs.settings
        exact = bool(settings.slots_count) or settings.backend == Backend.FUSED
        return take_slots(
            self.pool.resize,
            self.plan.slots_count,
            exact=exact,
            least_count=self._inputs.facts.experts_per_token_count,
        )

    def _pin(self, *, everything: bool) -> None:
        """All of the pool, or the first layer, without which nothing can be measured."""
        while (everything or not any(self.pinned())) and self.registration.step():
            self._inputs.progress()

    def _costs(self) -> StepCosts | None:
        if self.measured is None:
            return None
        index, bank, rates = self._inputs.index, self._bank, self.measured.rates
        top_k = self._inputs.facts.experts_per_token_count
        slot_bytes_per_s = top_k * bank.record_bytes / self._profile.token_s(rows=1, top_k=top_k)
        in_pool_bytes = sum(
            entry.length_bytes for entry in index.tensors.values() if entry.layout != EXPERT_RECORDS
        )
        return StepCosts(
            moe_layers_count=bank.moe_layers_count,
            experts_per_layer_count=bank.experts_per_layer_count,
            top_k=top_k,
            rates=rates,
            slot_bytes_per_s=slot_bytes_per_s,
            # A token reads them once, as it does experts.
            device_dense_s=dense_bytes(index) / slot_bytes_per_s,
            cpu_dense_s=in_pool_bytes / rates.cpu_alone_bytes_per_s,
        )


def _taken(what: str, take: Callable[[], T]) -> T:
    try:
        return take()
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"The GPU has no memory for {what} any more: {error}. Close other programs that use "
            'it, or set engine.backend to "cpu".',
            reason=Reason.DEVICE_MEMORY,
        ) from error
