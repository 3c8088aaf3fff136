"""How many KV pages an engine starts with, and how many it may have later. Torch-free."""

from __future__ import annotations

from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import ModelFacts
from freetokend.link.messages import EngineSettings
from freetokend.policy.kv_sizing import KvDemand, KvPlan, KvShape, pages_for, size_kv
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES
from freetokend.policy.vram_budget import VramPlan


def context_limit(facts: ModelFacts, settings: EngineSettings) -> int:
    """Tokens that one request may have, however many pages there are."""
    return min(facts.max_context_tokens, settings.max_context_tokens or facts.max_context_tokens)


def kv_plan_of(plan: VramPlan, shape: KvShape) -> KvPlan:
    """The KV part of the division."""
    return KvPlan(
        pages_count=plan.kv_pages_count,
        page_tokens=shape.page_tokens,
        kv_bytes=plan.kv_pages_count * shape.page_bytes,
        servable_context_tokens=plan.servable_context_tokens,
        limited_by=plan.limited_by,
        split=plan.split,
        note=plan.note,
    )


def kv_capacity(
    plan: KvPlan, facts: ModelFacts, settings: EngineSettings, memory_bytes: int
) -> int:
    """The most pages there can be: as many as all running requests can use, or memory_bytes hold;
    never fewer than there are at the start."""
    most = pages_for(context_limit(facts, settings), plan.page_tokens) * settings.max_running_count
    page_bytes = plan.kv_bytes // plan.pages_count
    return max(plan.pages_count, min(most, memory_bytes // page_bytes))


def kv_notes(plan: KvPlan, facts: ModelFacts) -> tuple[str, ...]:
    """Less KV memory than asked, or a context shorter than the model's, is something to be told."""
    notes = [plan.note] if plan.note else []
    if plan.servable_context_tokens < facts.max_context_tokens:
        notes.append(
            f"One request can have {plan.servable_context_tokens} of the model's "
            f"{facts.max_context_tokens} tokens: {plan.split}."
        )
    return tuple(notes)


def plan_kv(
    shape: KvShape,
    facts: ModelFacts,
    settings: EngineSettings,
    workspace_bytes: int,
    memory: HostMemory,
) -> KvPlan:
    """Of an engine without a device, whose pages take memory as they are used."""
    limit_bytes = memory.mem_available_bytes
    if memory.cgroup_available_bytes is not None:
        limit_bytes = min(limit_bytes, memory.cgroup_available_bytes)
    return size_kv(
        shape,
        KvDemand(
            model_context_tokens=facts.max_context_tokens,
            max_running_count=settings.max_running_count,
            available_bytes=limit_bytes - workspace_bytes - DEFAULT_HEADROOM_BYTES,
            kv_bytes=settings.kv_bytes or None,
            max_context_tokens=settings.max_context_tokens or None,
        ),
    )
