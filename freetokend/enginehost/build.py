"""Putting the engine together: executor, model, keys and values, scheduler. Imports torch."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Final

import torch

from freetokend.core.errors import ConfigError
from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import ModelFacts, model_facts
from freetokend.engine.step import Engine
from freetokend.enginehost.built import BuiltEngine
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.index import FtwIndex
from freetokend.ftw.layout import ROWS16
from freetokend.ftw.reader import FtwDirectory, read_json_object
from freetokend.kvcache.allocator import PageAllocator
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.link.messages import EngineSettings
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor, Numerics
from freetokend.policy.kv_sizing import KvDemand, KvPlan, KvShape, size_kv
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES, StepShape, step_workspace_bytes
from freetokend.scheduler.limits import SchedulerLimits
from freetokend.scheduler.scheduler import Scheduler
from freetokend.tensor.native_program import NativeProgram, buffer_row_bytes
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.program import Linear, Rows, StepProgram

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
    executor = Executor(cpus)
    dense_formats = _dense_formats(directory.index)
    numerics, numerics_notes = _numerics(settings, directory.index, dense_formats, executor)
    step_program = build_program(directory.model_config())
    workspace_bytes = step_workspace_bytes(
        step_shape(step_program, facts, settings, step_tokens, executor.threads_count)
    )
    kv_plan, shape = _plan_kv(facts, settings, workspace_bytes, memory)
    experts = bank_experts(directory.index.expert_bank, region_address, numerics=numerics)
    program = NativeProgram(
        step_program,
        PoolWeights(region_address, directory.index),
        executor,
        experts,
        numerics=numerics,
    )
    arena = KvArena(shape, kv_plan.pages_count)
    engine = Engine(program, NativeKvStore(executor, arena), executor)
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
        numerics=numerics,
        dense_formats=dense_formats,
        threads_count=executor.threads_count,
        expert_executions=lambda: experts.executions_count,
        finished_ops=lambda: program.finished_ops_count,
        notes=(*notes, *numerics_notes, *_kv_notes(kv_plan, facts)),
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


def _dense_formats(index: FtwIndex) -> tuple[str, ...]:
    """Weight formats of the matrices outside the experts, the one with most bytes first."""
    bytes_by_format: Counter[str] = Counter()
    for entry in index.tensors.values():
        if entry.layout == ROWS16:
            bytes_by_format[entry.dtype] += entry.length_bytes
    return tuple(name for name, _ in bytes_by_format.most_common())


def _numerics(
    settings: EngineSettings, index: FtwIndex, dense_formats: tuple[str, ...], executor: Executor
) -> tuple[Numerics, tuple[str, ...]]:
    """What can be computed of what was asked, and a note on weights that "fast" does not touch."""
    if settings.numerics not in ("exact", "fast"):
        raise ConfigError(
            f'engine.numerics = "{settings.numerics}" is unknown: write "exact" or "fast"',
            param="engine.numerics",
        )
    if settings.numerics == "exact":
        return "exact", ()
    bank = index.expert_bank
    formats = {*dense_formats, *([bank.format] if bank.experts_count else [])}
    exact = sorted(name for name in formats if not executor.has_fast(name))
    if not exact:
        return "fast", ()
    note = (
        f'engine.numerics = "fast" changes nothing for weights in {" and ".join(exact)} with the '
        f"instruction set {executor.isa}: they are computed exactly."
    )
    return ("exact" if len(exact) == len(formats) else "fast"), (note,)


def step_shape(
    program: StepProgram,
    facts: ModelFacts,
    settings: EngineSettings,
    step_tokens: int,
    threads_count: int,
) -> StepShape:
    """What a native step of this program needs memory for."""
    inputs = [op.x for op in program.ops if isinstance(op, Linear)]
    return StepShape(
        step_tokens=step_tokens,
        max_running_count=settings.max_running_count,
        threads_count=threads_count,
        token_bytes=buffer_row_bytes(program, Rows.TOKENS),
        output_bytes=buffer_row_bytes(program, Rows.OUTPUTS),
        widest_size=max(program.buffers[x].width for x in inputs),
        hidden_size=facts.hidden_size,
        experts_per_token_count=facts.experts_per_token_count,
        expert_size=facts.expert_size,
        vocab_size=facts.vocab_size,
    )


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
    facts: ModelFacts, settings: EngineSettings, workspace_bytes: int, memory: HostMemory
) -> tuple[KvPlan, KvShape]:
    shape = KvShape(
        layers_count=facts.layers_count,
        kv_heads_count=facts.kv_heads_count,
        head_size=facts.head_size,
        element_bytes=KV_ELEMENT_BYTES,
        page_tokens=PAGE_TOKENS,
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
