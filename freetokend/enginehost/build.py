"""Putting the engine together: executor, model, keys and values, scheduler. Imports torch."""

from __future__ import annotations

import importlib
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

import torch

from freetokend.core.errors import ConfigError, Reason, ResourceError
from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import ModelFacts, model_facts
from freetokend.engine.step import Engine
from freetokend.engine.sweep import SweepingEngine
from freetokend.engine.work import StepEngine
from freetokend.enginehost.auto_device import needs_gpu, try_gpu
from freetokend.enginehost.backend import (
    NO_GPUS,
    BackendChoice,
    Device,
    GpuPresence,
    choose_device,
    uses_cuda,
    uses_host_device,
    without_cache,
)
from freetokend.enginehost.build_cache import (
    CacheInputs,
    build_cache,
    device_facts,
    plan_host_device,
)
from freetokend.enginehost.build_cuda import PADDING_PAGE, build_cuda
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.cuda_budget import CudaInputs, sweep_bytes
from freetokend.enginehost.cuda_platform import CudaPlatform
from freetokend.enginehost.kv_control import KvControl
from freetokend.enginehost.kv_plan import (
    context_limit,
    kv_capacity,
    kv_notes,
    kv_plan_of,
    plan_kv,
)
from freetokend.enginehost.step_limits import SweepLimits, raised_step_tokens
from freetokend.enginehost.trace_control import RoutingTaps
from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.index import FtwIndex
from freetokend.ftw.layout import ROWS16
from freetokend.ftw.reader import FtwDirectory, read_json_object
from freetokend.kvcache.allocator import PageAllocator
from freetokend.kvcache.arena import KvArena, KvMemory
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.link.messages import CacheDescription, EngineSettings
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor, Numerics
from freetokend.native.program import NativeDispatch
from freetokend.native.routing_tap import RoutingTap
from freetokend.policy.kv_sizing import KvPlan, KvShape
from freetokend.policy.memory import StepShape, step_workspace_bytes
from freetokend.scheduler.limits import SchedulerLimits
from freetokend.scheduler.scheduler import Scheduler
from freetokend.tensor.native_program import NativeProgram, buffer_row_bytes
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.program import Linear, Rows, StepProgram

PAGE_TOKENS: Final = 32
KV_ELEMENT_BYTES: Final = 2
# A sweep costs the same transfer however many tokens it has; beyond this, computing them takes
# longer than that.
MOST_SWEEP_TOKENS: Final = 4096
# What a sweep computes with takes at most one such part of the memory.
SWEEP_MEMORY_PARTS: Final = 32


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
    gpus: GpuPresence = NO_GPUS,
    progress: Callable[[], None] = lambda: None,
) -> BuiltEngine:
    """The EngineBuilder of every device."""
    return build_engine_on(
        _gpu_platform,
        directory,
        region_address,
        settings,
        cpus,
        memory,
        gpus=gpus,
        progress=progress,
    )


def build_engine_on(
    new_platform: Callable[[], CudaPlatform],
    directory: FtwDirectory,
    region_address: int,
    settings: EngineSettings,
    cpus: tuple[int, ...],
    memory: HostMemory,
    *,
    gpus: GpuPresence,
    progress: Callable[[], None] = lambda: None,
) -> BuiltEngine:
    """new_platform: the GPU; called where `settings` and `gpus` ask for one alone."""
    torch.set_num_threads(1)  # the executor's threads do the work; torch's would fight them
    builder = _Builder(directory, region_address, settings, Executor(cpus), memory, progress)
    if settings.backend == "cpu" or choose_device(settings, gpus) is not Device.CUDA:
        return builder.build()
    if needs_gpu(settings):
        return builder.build_on(new_platform())
    tried = try_gpu(builder.build_on, new_platform, settings, gpus)
    return builder.in_place(tried) if isinstance(tried, BackendChoice) else tried


def _gpu_platform() -> CudaPlatform:
    # Triton is imported where there is a GPU alone.
    try:
        module = importlib.import_module("freetokend.enginehost.gpu_platform")
    except ImportError as error:
        raise ResourceError(
            f"What a GPU is used with cannot be loaded: {error}. Install freetokend with its extra "
            '"gpu", or set engine.device to "none".',
            reason=Reason.DEVICE_UNUSABLE,
        ) from error
    return cast("CudaPlatform", module.GpuPlatform())


class _Builder:
    """What the parts of one engine are made from."""

    def __init__(
        self,
        directory: FtwDirectory,
        region_address: int,
        settings: EngineSettings,
        executor: Executor,
        memory: HostMemory,
        progress: Callable[[], None],
    ) -> None:
        self._index = directory.index
        self._region_address = region_address
        self._settings = settings
        self._executor = executor
        self._memory = memory
        self._progress = progress
        self._facts = read_model_facts(directory)
        self._step_program = build_program(directory.model_config())
        self._step_tokens, self._notes = raised_step_tokens(settings)
        self._dense_formats = _dense_formats(directory.index)
        self._numerics, notes = _numerics(settings, directory.index, self._dense_formats, executor)
        self._notes += notes
        self._kv_shape = KvShape(
            layers_count=self._facts.layers_count,
            kv_heads_count=self._facts.kv_heads_count,
            head_size=self._facts.head_size,
            element_bytes=KV_ELEMENT_BYTES,
            page_tokens=PAGE_TOKENS,
        )

    def build(self) -> BuiltEngine:
        backend = None
        if uses_host_device(self._settings):
            built = self._with_cache()
            if isinstance(built, BuiltEngine):
                return built
            backend = built
        return self.in_place(backend)

    def build_on(self, platform: CudaPlatform) -> BuiltEngine:
        """Experts in slots of a GPU. ConfigError for a model or numerics that it has no use for."""
        bank, settings = self._index.expert_bank, self._settings
        if not bank.experts_count:
            raise ConfigError(
                "The model has no routed experts that a cache on a GPU could hold. Set "
                'engine.device to "none".',
                param="engine.device",
            )
        sweep_tokens = self._sweep_tokens(
            platform.memory().free_bytes, lambda count: sweep_bytes(self._step_program, count)
        )
        made = build_cuda(
            CudaInputs(
                index=self._index,
                region_address=self._region_address,
                program=self._step_program,
                facts=self._facts,
                settings=settings,
                executor=self._executor,
                kv_shape=self._kv_shape,
                step_tokens=self._step_tokens,
                sweep_tokens=sweep_tokens,
                progress=self._progress,
            ),
            platform,
        )
        if isinstance(made, BackendChoice):
            platform.release()
            return self.in_place(made)
        cache = made.cache
        built = self._built(
            SweepingEngine(
                made.runner,
                made.sweep_runner,
                made.kv,
                cache,
                sweep_from_tokens=made.sweep_from_tokens,
            ),
            kv_plan_of(made.plan, self._kv_shape),
            executions=lambda: cache.executions_count,
            finished_ops=lambda: made.runner.finished_count + made.sweep_runner.finished_count,
            backend=made.backend,
            taps=RoutingTaps(steps=made.taps.steps, sweeps=made.taps.sweeps),
            sweeps=SweepLimits(from_tokens=made.sweep_from_tokens, tokens=sweep_tokens),
            first_page=PADDING_PAGE + 1,
        )
        return replace(
            built,
            kv=self._kv_control(built, made.kv_memory, made.kv_capacity, PADDING_PAGE + 1),
            memory=made.memory,
            trim=platform.release,
            cache=cache,
            cache_description=CacheDescription(
                slots_count=cache.slots_count,
                slots_capacity=cache.slots_capacity,
                layer_runs=made.layer_runs,
                fill_rate_source=made.fill_rate_source,
            ),
            kernel=f"{made.kernels} with {built.kernel}",
            device=Device.CUDA.value,
            device_name=platform.name,
            device_uuid=platform.uuid,
            pinning=cache,
        )

    def in_place(self, backend: BackendChoice | None) -> BuiltEngine:
        """Every expert executed in the pool."""
        bank = self._index.expert_bank
        experts = bank_experts(bank, self._region_address, numerics=self._numerics)
        kv_plan = plan_kv(
            self._kv_shape,
            self._facts,
            self._settings,
            self._workspace_bytes(self._step_tokens),
            self._memory,
        )
        tap = RoutingTap(experts)
        program = self._program(tap)
        kv = NativeKvStore(self._executor, KvArena(self._kv_shape, kv_plan.pages_count))
        return self._built(
            Engine(program, kv),
            kv_plan,
            executions=lambda: experts.executions_count,
            finished_ops=lambda: program.finished_ops_count,
            backend=backend,
            taps=RoutingTaps(steps=tap),
        )

    def _with_cache(self) -> BuiltEngine | BackendChoice:
        """Experts in slots of the host device; the choice where it is to do without."""
        bank, settings = self._index.expert_bank, self._settings
        if not bank.experts_count:
            return without_cache(settings, "the model has no routed experts")
        sweep_tokens = self._sweep_tokens(self._memory.mem_available_bytes, self._workspace_bytes)
        inputs = CacheInputs(
            mapped=MappedBank(bank=bank, region_address=self._region_address),
            facts=self._facts,
            settings=settings,
            executor=self._executor,
            numerics=self._numerics,
            sweep_tokens=sweep_tokens,
        )
        workspace_bytes = sum(map(self._workspace_bytes, (self._step_tokens, sweep_tokens)))
        plan = plan_host_device(inputs, self._kv_shape, workspace_bytes, self._memory)
        made = build_cache(inputs, plan)
        if isinstance(made, BackendChoice):
            return made
        cache = made.cache
        kv_plan = kv_plan_of(plan, self._kv_shape)
        tap, sweep_tap = RoutingTap(cache.decode), RoutingTap(cache.sweep)
        program, sweep_program = self._program(tap), self._program(sweep_tap)
        # A device's memory is there or it is not.
        capacity = kv_capacity(kv_plan, inputs.facts, settings, self._memory.mem_available_bytes)
        arena = KvArena(
            self._kv_shape, kv_plan.pages_count, capacity_count=capacity, populated=True
        )
        engine = SweepingEngine(
            program,
            sweep_program,
            NativeKvStore(self._executor, arena),
            cache,
            sweep_from_tokens=made.sweep_from_tokens,
        )
        built = self._built(
            engine,
            kv_plan,
            executions=lambda: cache.executions_count,
            finished_ops=lambda: program.finished_ops_count + sweep_program.finished_ops_count,
            backend=made.backend,
            taps=RoutingTaps(steps=tap, sweeps=sweep_tap),
            sweeps=SweepLimits(from_tokens=made.sweep_from_tokens, tokens=sweep_tokens),
        )
        return replace(
            built,
            cache=cache,
            cache_description=made.description,
            followed=made.followed,
            kv=self._kv_control(built, arena, capacity),
            memory=device_facts(inputs, self._kv_shape, settings.device_bytes),
        )

    def _kv_control(
        self,
        built: BuiltEngine,
        memory: KvMemory | None,
        capacity_count: int,
        reserved_count: int = 0,
    ) -> KvControl | None:
        if memory is None:
            return None
        return KvControl(
            memory,
            built.allocator,
            built.scheduler,
            shape=self._kv_shape,
            capacity_count=capacity_count,
            context_limit_tokens=context_limit(self._facts, self._settings),
            reserved_count=reserved_count,
        )

    def _program(self, experts: NativeDispatch) -> NativeProgram:
        return NativeProgram(
            self._step_program,
            PoolWeights(self._region_address, self._index),
            self._executor,
            experts,
            numerics=self._numerics,
        )

    def _workspace_bytes(self, tokens_count: int) -> int:
        shape = step_shape(
            self._step_program,
            self._facts,
            self._settings,
            tokens_count,
            self._executor.threads_count,
        )
        return step_workspace_bytes(shape)

    def _sweep_tokens(self, memory_bytes: int, sweep_bytes: Callable[[int], int]) -> int:
        """As asked, or as many as a small share of the memory has room for."""
        if self._settings.sweep_tokens:
            return self._settings.sweep_tokens
        tokens = MOST_SWEEP_TOKENS
        most_bytes = memory_bytes // SWEEP_MEMORY_PARTS
        while tokens > self._step_tokens and sweep_bytes(tokens) > most_bytes:
            tokens //= 2
        return max(tokens, self._step_tokens)

    def _built(
        self,
        engine: StepEngine,
        kv_plan: KvPlan,
        *,
        executions: Callable[[], int],
        finished_ops: Callable[[], int],
        backend: BackendChoice | None,
        sweeps: SweepLimits | None = None,
        taps: RoutingTaps | None = None,
        first_page: int = 0,
    ) -> BuiltEngine:
        facts, settings = self._facts, self._settings
        allocator = PageAllocator(kv_plan.pages_count, first_page=first_page)
        limits = SchedulerLimits(
            max_running_count=settings.max_running_count,
            max_waiting_count=settings.max_waiting_count,
            step_tokens=self._step_tokens,
            servable_context_tokens=kv_plan.servable_context_tokens,
            vocab_size=facts.vocab_size,
            page_tokens=PAGE_TOKENS,
            eos_token_ids=frozenset(facts.eos_token_ids),
            sweep_from_tokens=0 if sweeps is None else sweeps.from_tokens,
            sweep_tokens=0 if sweeps is None else sweeps.tokens,
        )
        return BuiltEngine(
            engine=engine,
            scheduler=Scheduler(limits, allocator, fresh_seed=lambda: secrets.randbits(64)),
            allocator=allocator,
            facts=facts,
            kv_plan=kv_plan,
            kernel=self._executor.isa,
            numerics=self._numerics,
            dense_formats=self._dense_formats,
            threads_count=self._executor.threads_count,
            expert_executions=executions,
            finished_ops=finished_ops,
            notes=(*self._notes, *kv_notes(kv_plan, facts)),
            taps=taps,
            backend=backend,
        )


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
    if uses_host_device(settings) or uses_cuda(settings):
        raise ConfigError(
            'engine.numerics = "fast" rounds activations as no device with slots does, so that '
            'results would depend on what is resident. It is for the backend "cpu": set '
            'engine.numerics to "exact", or engine.device to "none".',
            param="engine.numerics",
        )
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
