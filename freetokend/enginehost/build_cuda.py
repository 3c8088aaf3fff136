"""An engine whose experts are in slots of a GPU and whose steps are graphs there.

The backend is the one with the least estimated time, from rates that are measured before anything
is served, or the one that was asked for. Long prompts stream whole layers.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import torch

from freetokend.engine.graphs import GraphedProgram, GraphSpec
from freetokend.engine.swept_program import SweptProgram
from freetokend.enginehost.backend import BackendChoice
from freetokend.enginehost.cuda_budget import CudaInputs
from freetokend.enginehost.cuda_kernels import SlotKernels, slot_kernels
from freetokend.enginehost.cuda_platform import ClosableKvMemory, CudaPlatform
from freetokend.enginehost.cuda_slots import DeviceSlots
from freetokend.enginehost.deciding import layer_runs, sweep_from
from freetokend.enginehost.proof import Proven, prove
from freetokend.experts.cpu import bank_experts
from freetokend.experts.gpu.cpu_fork import CpuFork, HostBuffers, StreamFork
from freetokend.experts.gpu.device_cache import DeviceCache, NotingRunner
from freetokend.experts.gpu.device_tap import DeviceTap
from freetokend.experts.gpu.dispatch import (
    BranchOps,
    CudaExpertDispatch,
    DispatchSpec,
    padded_rows,
)
from freetokend.experts.gpu.sweeps import SlotSweeps, SwitchedExperts
from freetokend.kvcache.batch import KvStore
from freetokend.link.messages import LayerRun
from freetokend.native.cpu_branch import CpuBranch
from freetokend.policy.backend_choice import (
    Backend,
    BackendDecision,
    LayerBranch,
    LayerChoice,
    resolve_layers,
)
from freetokend.policy.fill_table import fill_table
from freetokend.policy.kv_sizing import pages_for
from freetokend.policy.layer_overrides import parse_layers
from freetokend.policy.vram_budget import VramFacts, VramPlan
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.state_dict_weights import StateDictWeights

BUCKETS_COUNT: Final = 5
# Of the KV: rows that only pad a graph write there, and no sequence is given it.
PADDING_PAGE: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTaps:
    """Where the choice of experts is seen."""

    steps: DeviceTap
    sweeps: DeviceTap


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaEngine:
    """runner, sweep_runner: steps and sweeps of the model over `kv`, logits on the host.
    sweep_from_tokens 0: never sweep. kernels: names of those that execute what is in slots."""

    runner: NotingRunner
    sweep_runner: SweptProgram
    sweep_from_tokens: int
    taps: RoutedTaps
    kv: KvStore
    cache: DeviceCache
    kv_memory: ClosableKvMemory | None
    kv_capacity: int
    memory: VramFacts
    plan: VramPlan
    backend: BackendChoice
    layer_runs: tuple[LayerRun, ...]
    kernels: str
    fill_rate_source: str


def build_cuda(inputs: CudaInputs, platform: CudaPlatform) -> CudaEngine | BackendChoice:
    """The engine, proven, or why "auto" does without slots. ConfigError and ResourceError name the
    key."""
    overrides = parse_layers(inputs.settings.layers, inputs.index.expert_bank.moe_layers_count)
    kernels = slot_kernels(inputs.index.expert_bank.format, platform.capability)
    undo = ExitStack()
    try:
        slots = DeviceSlots(inputs, platform, undo)
        decision = slots.decide()
        notes = tuple(note for note in (slots.note, slots.registration.note) if note)
        choice = BackendChoice(
            backend=decision.backend.value,
            reason=decision.reason,
            notes=(*decision.notes, *notes),
        )
        if decision.backend is not Backend.CPU:
            choices = resolve_layers(
                decision.backend,
                fillable=slots.fillable(),
                cpu_kernel=True,
                overrides=overrides,
            )
            parts = _Parts(inputs, platform, slots, undo, decision, choices)
            inputs.progress()
            made = parts.engine(choice, kernels)
            inputs.progress()
            prove(inputs, _proven(made, platform.name))
            return made
    except BaseException as error:
        _give_back(platform, undo, error)
        raise
    platform.synchronize()
    undo.close()
    return choice


def _give_back(platform: CudaPlatform, undo: ExitStack, error: BaseException) -> None:
    """After `error`, which a device can make so bad that it takes nothing back."""
    for give in (platform.synchronize, undo.close):
        try:
            give()
        except Exception as again:
            error.add_note(f"not all of the GPU was given back: {again}")


def _proven(made: CudaEngine, name: str) -> Proven:
    return Proven(
        runner=made.runner,
        sweep_runner=made.sweep_runner,
        sweeps=bool(made.sweep_from_tokens) and made.cache.can_sweep,
        steps_tap=made.taps.steps,
        sweeps_tap=made.taps.sweeps,
        kv=made.kv,
        plan=made.plan,
        name=name,
    )


class _Parts:
    """What an engine is put together from beside its slots, in the order in which it is needed."""

    def __init__(
        self,
        inputs: CudaInputs,
        platform: CudaPlatform,
        slots: DeviceSlots,
        undo: ExitStack,
        decision: BackendDecision,
        choices: tuple[LayerChoice, ...],
    ) -> None:
        """undo: gives slots back, and from now on what is made here."""
        bank = inputs.index.expert_bank
        self._inputs, self._platform, self._slots, self._undo = inputs, platform, slots, undo
        self._backend, self._choices = decision.backend, choices
        self._top_k = inputs.facts.experts_per_token_count
        self._with_cpu = decision.backend is Backend.HYBRID or any(
            choice.branch is LayerBranch.CPU for choice in choices
        )
        self._start_note = ""
        make_planner = platform.new_planner(slots.pool.state, bank.moe_layers_count)
        fork = self._new_fork() if self._with_cpu else None
        self._dispatch = CudaExpertDispatch(
            DispatchSpec(
                moe_layers_count=bank.moe_layers_count,
                experts_per_layer_count=bank.experts_per_layer_count,
                hidden_size=bank.hidden_size,
                top_k=self._top_k,
                tokens_capacity=inputs.step_tokens,
                buckets_count=BUCKETS_COUNT,
                least_slots=self._top_k,
            ),
            BranchOps(fill=slots.ops.fill, slots=slots.ops.slots, merge=slots.ops.merge, fork=fork),
            make_planner,
            platform.device,
        )
        self._taps = RoutedTaps(
            steps=DeviceTap(pinned=platform.pins), sweeps=DeviceTap(pinned=platform.pins)
        )
        self._sweeps = SlotSweeps(
            self._dispatch,
            slots.pool.state,
            slots.ops.fill,
            slots.transfers,
            make_planner,
            tap=self._taps.sweeps,
        )
        self._experts = SwitchedExperts(self._dispatch, self._sweeps)
        self._cache = self._new_cache()

    def engine(self, choice: BackendChoice, kernels: SlotKernels) -> CudaEngine:
        inputs, slots = self._inputs, self._slots
        sweep_from_tokens = self._sweep_from()
        if self._backend is Backend.FUSED:
            self._cache.preload()
        program = self._program()
        graphed = self._graphed(program)
        measured = slots.measured
        return CudaEngine(
            runner=NotingRunner(graphed, self._cache, inputs.executor, queued=self._tap_step),
            sweep_runner=SweptProgram(
                program,
                inputs.executor,
                sweeping=self._experts.sweeping,
                pace=slots.transfers.pace,
                note=self._cache.note_step,
                device=self._platform.device,
            ),
            sweep_from_tokens=sweep_from_tokens,
            taps=self._taps,
            kv=slots.attention.store,
            cache=self._cache,
            kv_memory=slots.attention.memory,
            kv_capacity=slots.kv_capacity,
            memory=slots.facts,
            plan=slots.plan,
            backend=replace(
                choice,
                reason=f"{choice.reason}; {self._platform.name}; experts in slots by "
                f"{kernels.reason}; attention by {slots.attention.reason}{self._start_note}",
            ),
            layer_runs=layer_runs(self._choices),
            kernels=kernels.names,
            fill_rate_source="nothing can be filled" if measured is None else measured.source,
        )

    def _new_cache(self) -> DeviceCache:
        """With the slots that there are, and a branch for each layer."""
        slots, bank = self._slots, self._inputs.index.expert_bank
        cache = DeviceCache(
            self._inputs.mapped,
            slots.pool,
            self._dispatch,
            self._sweeps,
            slots.registration,
            least_slots=0 if self._with_cpu else self._top_k,
            synchronize=self._platform.synchronize,
            close_first=self._undo.close,
        )
        table = None
        if slots.measured is not None:
            table = fill_table(slots.measured.rates, bank.experts_per_layer_count)
        cache.set_branches([choice.branch for choice in self._choices], table)
        cache.resize(slots.pool.slots_count)
        return cache

    def _new_fork(self) -> CpuFork:
        inputs = self._inputs
        self._buffers = HostBuffers.make(  # the branch has their addresses
            tokens_capacity=self._slots.rows,
            top_k=self._top_k,
            hidden_size=inputs.index.expert_bank.hidden_size,
            pinned=self._platform.pins,
        )
        experts = bank_experts(inputs.index.expert_bank, inputs.region_address)
        branch = CpuBranch(inputs.executor, experts, self._buffers.addresses())
        self._undo.callback(branch.close)
        chosen = self._platform.new_fork(branch, self._buffers)
        if isinstance(chosen.fork, StreamFork):
            self._undo.callback(chosen.fork.close)
        self._start_note = f"; the CPU started by {chosen.reason}"
        return chosen.fork

    def _program(self) -> CudaProgram:
        return CudaProgram(
            self._inputs.program,
            StateDictWeights(self._slots.dense, torch.bfloat16),
            self._experts,
            positions_count=self._slots.context_tokens,
            device=self._platform.device,
        )

    def _graphed(self, program: CudaProgram) -> GraphedProgram:
        inputs, slots = self._inputs, self._slots
        return GraphedProgram(
            program,
            self._slots.attention.store,
            self._platform.new_backend(),
            GraphSpec(
                rows_capacity=padded_rows(inputs.settings.max_running_count),
                pages_capacity=pages_for(slots.context_tokens, inputs.kv_shape.page_tokens),
                padding_page=PADDING_PAGE,
            ),
            begin_step=self._begin_step,
            device=self._platform.device,
        )

    def _tap_step(self) -> None:
        if self._taps.steps.is_on:
            for layer, expert_ids in self._dispatch.routed_rows():
                self._taps.steps.keep(layer, expert_ids)

    def _begin_step(self, tokens_count: int) -> None:
        self._sweeps.join()
        self._dispatch.begin_step(tokens_count)

    def _sweep_from(self) -> int:
        """As of `sweep_from`; what sweeps launch is compiled for it."""
        slots, bank = self._slots, self._inputs.index.expert_bank
        if slots.costs is None or self._backend is Backend.FUSED:
            return 0
        self._sweeps.warm_up()
        self._cache.note_step()
        to_fill_count = sum(choice.branch is not LayerBranch.CPU for choice in self._choices)
        return sweep_from(
            slots.costs,
            resident_ratio=slots.pool.slots_count / bank.experts_count,
            cpu_kernel=self._backend is Backend.HYBRID,
            fillable_layers_count=to_fill_count,
            token_s=slots.token_s(),
            most_tokens=self._inputs.sweep_tokens,
        )
