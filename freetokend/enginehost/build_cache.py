"""The expert cache of the host device, from the settings: budget, rates, backend, branches."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from freetokend.core.errors import ConfigError, Reason, ResourceError
from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import ModelFacts
from freetokend.device.host_arena import HostArena
from freetokend.enginehost.backend import BackendChoice, cache_key
from freetokend.enginehost.deciding import decide, layer_runs, sweep_from, take_slots
from freetokend.enginehost.split_control import FollowedSplit
from freetokend.experts.bank import MappedBank
from freetokend.experts.cache import CacheSpec, ExpertCache
from freetokend.experts.host_rates import BURST_COUNT, HostRates, measure_host_rates
from freetokend.experts.slot_checks import VerifyReport
from freetokend.ftw.layout import ExpertBank
from freetokend.link.messages import CacheDescription, EngineSettings
from freetokend.native.executor import Executor, Numerics
from freetokend.policy.backend_choice import Backend, BackendDecision, LayerBranch, resolve_layers
from freetokend.policy.fill_table import fill_table
from freetokend.policy.kv_sizing import KvShape, pages_for
from freetokend.policy.layer_overrides import parse_layers
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES, gib
from freetokend.policy.step_cost import StepCosts
from freetokend.policy.vram_budget import (
    DEFAULT_GRANULARITY_BYTES,
    Preset,
    VramFacts,
    VramPlan,
    VramWishes,
    least_bytes,
    plan_vram,
)

# Of the experts, what a device of the size that is chosen here has room for: the share that the
# published measurements of this kind of cache were made with.
AUTO_RESIDENT_RATIO: Final = 0.37
_AUTO_CONTEXT_TOKENS: Final = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedExperts:
    """A cache with its slots, and what is to be told of it. sweep_from_tokens 0: never sweep;
    followed: how its misses are split at first."""

    cache: ExpertCache
    backend: BackendChoice
    description: CacheDescription
    sweep_from_tokens: int
    followed: FollowedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInputs:
    """What a cache is built from. `numerics`: what is computed, not what was asked; sweep_tokens:
    the most of one sweep."""

    mapped: MappedBank
    facts: ModelFacts
    settings: EngineSettings
    executor: Executor
    numerics: Numerics
    sweep_tokens: int

    @property
    def bank(self) -> ExpertBank:
        return self.mapped.bank

    @property
    def rate_bytes_per_s(self) -> float | None:
        return float(self.settings.link_bytes_per_s) or None


def plan_host_device(
    inputs: CacheInputs, shape: KvShape, workspace_bytes: int, memory: HostMemory
) -> VramPlan:
    """Slots and KV pages in the memory that stands for a GPU's. What a GPU would hold besides,
    dense weights and workspace, stays in ordinary memory and is not charged to it.

    ResourceError where the machine has no such memory. Otherwise as of `plan_vram`, but that what
    does not fit a size that was asked for is a ConfigError.
    """
    settings = inputs.settings
    available_bytes = memory.mem_available_bytes
    if memory.cgroup_available_bytes is not None:
        available_bytes = min(available_bytes, memory.cgroup_available_bytes)
    room_bytes = available_bytes - workspace_bytes - DEFAULT_HEADROOM_BYTES
    device_bytes = settings.device_bytes or min(_auto_device_bytes(inputs, shape), room_bytes)
    if not 0 < device_bytes <= room_bytes:
        raise ResourceError(
            f'The device "host" would take {gib(device_bytes)}, and this machine has '
            f"{gib(available_bytes)} available, less {gib(workspace_bytes)} for a step and "
            f"{gib(DEFAULT_HEADROOM_BYTES)} for others. Lower engine.device_bytes, close other "
            'programs, or set engine.device to "none".',
            reason=Reason.HOST_MEMORY,
        )
    try:
        return plan_vram(device_facts(inputs, shape, device_bytes), _wishes(settings))
    except ResourceError as error:
        if not settings.device_bytes:
            raise
        # Nobody else has a part of it, so that trying again cannot help.
        raise ConfigError(
            f"engine.device_bytes = {settings.device_bytes} is too little. {error.message}",
            param="engine.device_bytes",
        ) from error


def device_facts(inputs: CacheInputs, shape: KvShape, device_bytes: int) -> VramFacts:
    """What the memory that stands for a GPU's is divided by; device_bytes: how much there is."""
    bank, facts = inputs.bank, inputs.facts
    return VramFacts(
        free_bytes=device_bytes,
        own_bytes=0,
        dense_bytes=0,
        workspace_bytes=0,
        state_bytes=0,
        graph_bytes=0,
        record_bytes=bank.record_bytes,
        experts_count=bank.experts_count,
        experts_per_layer_count=bank.experts_per_layer_count,
        top_k=facts.experts_per_token_count,
        kv_page_bytes=shape.page_bytes,
        kv_page_tokens=shape.page_tokens,
        model_context_tokens=facts.max_context_tokens,
        max_running_count=inputs.settings.max_running_count,
        on_host=True,
        cushion_bytes=0,
        # Keys and values of each layer are a range of their own.
        kv_granularity_bytes=2 * shape.layers_count * mmap.PAGESIZE,
    )


def _wishes(settings: EngineSettings) -> VramWishes:
    return VramWishes(
        preset=Preset(settings.preset),
        slots_count=settings.slots_count or None,
        kv_bytes=settings.kv_bytes or None,
        max_context_tokens=settings.max_context_tokens or None,
    )


def build_cache(inputs: CacheInputs, plan: VramPlan) -> CachedExperts | BackendChoice:
    """The cache, or why "auto" does without one. ConfigError and ResourceError name the key."""
    bank, settings = inputs.bank, inputs.settings
    overrides = parse_layers(settings.layers, bank.moe_layers_count)
    measured = measure_host_rates(
        inputs.mapped,
        inputs.executor,
        HostArena(BURST_COUNT * bank.record_bytes),
        numerics=inputs.numerics,
        rate_bytes_per_s=inputs.rate_bytes_per_s,
    )
    costs = _costs(inputs, measured)
    decision = decide(
        settings,
        bank,
        slots_count=plan.slots_count,
        fillable_layers_count=bank.moe_layers_count,
        costs=costs,
    )
    backend = _choice_of(decision)
    if decision.backend is Backend.CPU:
        return backend
    choices = resolve_layers(
        decision.backend,
        fillable=[True] * bank.moe_layers_count,
        cpu_kernel=True,
        overrides=overrides,
    )
    branches = tuple(choice.branch for choice in choices)
    cache = ExpertCache(
        inputs.mapped,
        HostArena(bank.experts_count * bank.record_bytes),
        CacheSpec(
            slots_capacity=bank.experts_count,
            fill_misses=decision.backend in (Backend.FUSED, Backend.OFFLOAD),
            rate_bytes_per_s=inputs.rate_bytes_per_s,
            numerics=inputs.numerics,
        ),
    )
    try:
        cache.set_fill_counts(fill_table(measured.rates, bank.experts_per_layer_count))
        cache.set_branches(branches)
        exact = bool(settings.slots_count) or decision.backend is Backend.FUSED
        least_count = inputs.facts.experts_per_token_count
        note = take_slots(cache.resize, plan.slots_count, exact=exact, least_count=least_count)
        if note:
            backend = replace(backend, notes=(*backend.notes, note))
        sample = cache.fill_sample()
        if sample.differences:
            choice = _unusable(settings, sample)
            cache.close()
            return choice
        if decision.backend is Backend.FUSED:
            cache.preload()
    except BaseException:
        cache.close()
        raise
    return CachedExperts(
        cache=cache,
        backend=backend,
        description=CacheDescription(
            slots_count=cache.slots_count,
            slots_capacity=cache.slots_capacity,
            layer_runs=layer_runs(choices),
            fill_rate_source=measured.source,
        ),
        sweep_from_tokens=_sweep_from(inputs, cache.slots_count, costs, measured, overrides),
        followed=FollowedSplit(cache=cache, branches=branches, rates=measured.rates),
    )


def _choice_of(decision: BackendDecision) -> BackendChoice:
    return BackendChoice(
        backend=decision.backend.value, reason=decision.reason, notes=decision.notes
    )


def _unusable(settings: EngineSettings, sample: VerifyReport) -> BackendChoice:
    """What "auto" does without a device whose memory does not hold what was copied there.

    ResourceError where a backend that needs it was asked for.
    """
    first = sample.differences[0]
    reason = (
        f"{len(sample.differences)} of {sample.compared_count} experts copied to the device for a "
        f"check differ from the pool (expert {first.expert_id}, from byte {first.offset_bytes} on)"
    )
    if settings.backend != "auto":
        raise ResourceError(
            f'engine.backend = "{settings.backend}" needs a device that keeps what it is given: '
            f'{reason}. Set engine.backend to "cpu" to serve without it; if this happens again, '
            "check the machine's memory and the driver.",
            reason=Reason.DEVICE_UNUSABLE,
        )
    key = cache_key(settings)
    return BackendChoice(
        backend=Backend.CPU.value,
        reason=reason,
        notes=(f"{key} has no effect: {reason}.",) if key else (),
    )


def _auto_device_bytes(inputs: CacheInputs, shape: KvShape) -> int:
    bank, settings = inputs.bank, inputs.settings
    slots = settings.slots_count or max(
        int(AUTO_RESIDENT_RATIO * bank.experts_count), inputs.facts.experts_per_token_count
    )
    tokens = settings.max_context_tokens or min(
        inputs.facts.max_context_tokens, _AUTO_CONTEXT_TOKENS
    )
    kv_bytes = settings.kv_bytes or pages_for(tokens, shape.page_tokens) * shape.page_bytes
    # Each of both may take a part of a granule more.
    share_bytes = slots * bank.record_bytes + kv_bytes + 2 * DEFAULT_GRANULARITY_BYTES
    return max(share_bytes, least_bytes(device_facts(inputs, shape, 0), _wishes(settings)))


def _costs(inputs: CacheInputs, measured: HostRates) -> StepCosts:
    """Dense layers are computed by the CPU whatever holds the experts, so they say nothing here."""
    bank = inputs.bank
    return StepCosts(
        moe_layers_count=bank.moe_layers_count,
        experts_per_layer_count=bank.experts_per_layer_count,
        top_k=inputs.facts.experts_per_token_count,
        rates=measured.rates,
        slot_bytes_per_s=measured.rates.cpu_alone_bytes_per_s,
        device_dense_s=0.0,
        cpu_dense_s=0.0,
    )


def _sweep_from(
    inputs: CacheInputs,
    slots_count: int,
    costs: StepCosts,
    measured: HostRates,
    overrides: Mapping[int, LayerBranch],
) -> int:
    bank = inputs.bank
    unfillable_count = sum(branch is LayerBranch.CPU for branch in overrides.values())
    return sweep_from(
        costs,
        resident_ratio=slots_count / bank.experts_count,
        cpu_kernel=True,
        fillable_layers_count=bank.moe_layers_count - unfillable_count,
        token_s=bank.moe_layers_count * measured.chunk_token_s,
        most_tokens=inputs.sweep_tokens,
    )
