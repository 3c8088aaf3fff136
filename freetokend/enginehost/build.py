"""Putting the engine together: executor, model, keys and values, scheduler. Imports torch."""

from __future__ import annotations

import secrets
from typing import Final

import torch

from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import ModelFacts, model_facts
from freetokend.engine.step import Engine
from freetokend.enginehost.built import BuiltEngine
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.reader import FtwDirectory, read_json_object
from freetokend.kvcache.allocator import PageAllocator
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.link.messages import EngineSettings
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvDemand, KvPlan, KvShape, size_kv
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES, StepShape, step_workspace_bytes
from freetokend.scheduler.limits import SchedulerLimits
from freetokend.scheduler.scheduler import Scheduler
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights

PAGE_TOKENS: Final = 32
KV_ELEMENT_BYTES: Final = 2
# Room for prompts beside a full batch of decoding requests; below it a prompt would crawl.
LEAST_PREFILL_TOKENS: Final = 16


def read_model_facts(directory: FtwDirectory) -> ModelFacts:
    """Facts from config.json and, where there is one, generation_config.json."""
    generation = None
    path = directory.path / "generation_config.json"
    if path.exists():
        generation = read_json_object(path, "the model's generation settings")
    return model_facts(directory.model_config(), generation)


def build_engine(
    directory: FtwDirectory,
    region_address: int,
    settings: EngineSettings,
    cpus: tuple[int, ...],
    memory: HostMemory,
) -> BuiltEngine:
    """The EngineBuilder of the cpu backend."""
    torch.set_num_threads(1)  # the executor's threads do the work; torch's would fight them
    facts = read_model_facts(directory)
    step_tokens, notes = _step_tokens(settings)
    kv_plan, shape = _plan_kv(facts, settings, step_tokens, memory)
    executor = Executor(cpus)
    experts = bank_experts(directory.index.expert_bank, region_address)
    program = NativeProgram(
        build_program(directory.model_config()),
        PoolWeights(region_address, directory.index),
        executor,
        experts,
    )
    arena = KvArena(shape, kv_plan.pages_count)
    engine = Engine(program, NativeKvStore(executor, arena))
    allocator = PageAllocator(kv_plan.pages_count)
    limits = SchedulerLimits(
        max_running_count=settings.max_running_count,
        max_waiting_count=settings.max_waiting_count,
        step_tokens=step_tokens,
        servable_context_tokens=kv_plan.servable_context_tokens,
        vocab_size=facts.vocab_size,
        page_tokens=PAGE_TOKENS,
        eos_token_ids=frozenset(facts.eos_token_ids),
    )
    return BuiltEngine(
        engine=engine,
        scheduler=Scheduler(limits, allocator, fresh_seed=lambda: secrets.randbits(64)),
        allocator=allocator,
        facts=facts,
        kv_plan=kv_plan,
        kernel=executor.isa,
        threads_count=executor.threads_count,
        expert_executions=lambda: experts.executions_count,
        finished_ops=lambda: program.finished_ops_count,
        notes=(*notes, *_kv_notes(kv_plan, facts)),
    )


def _step_tokens(settings: EngineSettings) -> tuple[int, tuple[str, ...]]:
    least = settings.max_running_count + LEAST_PREFILL_TOKENS
    if settings.step_tokens >= least:
        return settings.step_tokens, ()
    note = (
        f"engine.step_tokens was raised from {settings.step_tokens} to {least}: one token of each "
        f"of {settings.max_running_count} running requests and {LEAST_PREFILL_TOKENS} of a prompt."
    )
    return least, (note,)


def _kv_notes(plan: KvPlan, facts: ModelFacts) -> tuple[str, ...]:
    """Less KV memory than asked, or a context shorter than the model's, is something to be told."""
    notes = [plan.note] if plan.note else []
    if plan.servable_context_tokens < facts.max_context_tokens:
        notes.append(
            f"One request can have {plan.servable_context_tokens} of the model's "
            f"{facts.max_context_tokens} tokens: {plan.split}."
        )
    return tuple(notes)


def _plan_kv(
    facts: ModelFacts, settings: EngineSettings, step_tokens: int, memory: HostMemory
) -> tuple[KvPlan, KvShape]:
    shape = KvShape(
        layers_count=facts.layers_count,
        kv_heads_count=facts.kv_heads_count,
        head_size=facts.head_size,
        element_bytes=KV_ELEMENT_BYTES,
        page_tokens=PAGE_TOKENS,
    )
    workspace_bytes = step_workspace_bytes(
        StepShape(
            step_tokens=step_tokens,
            max_running_count=settings.max_running_count,
            hidden_size=facts.hidden_size,
            attention_size=facts.q_heads_count * facts.head_size,
            experts_per_token_count=facts.experts_per_token_count,
            expert_size=facts.expert_size,
            vocab_size=facts.vocab_size,
        )
    )
    limit_bytes = memory.mem_available_bytes
    if memory.cgroup_available_bytes is not None:
        limit_bytes = min(limit_bytes, memory.cgroup_available_bytes)
    plan = size_kv(
        shape,
        KvDemand(
            model_context_tokens=facts.max_context_tokens,
            max_running_count=settings.max_running_count,
            available_bytes=limit_bytes - workspace_bytes - DEFAULT_HEADROOM_BYTES,
            kv_bytes=settings.kv_bytes or None,
            max_context_tokens=settings.max_context_tokens or None,
        ),
    )
    return plan, shape
