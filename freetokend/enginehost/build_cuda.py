"""An engine whose experts are in slots of a GPU and whose steps are graphs there.

Every miss is filled ("offload"), or split between fills and the CPU ("hybrid") by a table of the
rates that are measured before anything is served. Long prompts stream whole layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from freetokend.core.errors import Reason, ResourceError
from freetokend.core.model_config import ModelFacts
from freetokend.engine.graphs import GraphedProgram, GraphSpec
from freetokend.engine.swept_program import SweptProgram
from freetokend.enginehost.backend import BackendChoice
from freetokend.enginehost.build_cache import layer_runs
from freetokend.enginehost.cuda_kernels import SlotKernels, slot_kernels
from freetokend.enginehost.cuda_platform import CudaPlatform, KvNeeds
from freetokend.enginehost.cuda_profile import SlotProfile, SlotRates
from freetokend.experts.bank import MappedBank
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
from freetokend.experts.shrink_plan import LayerTerm
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.index import FtwIndex
from freetokend.kvcache.batch import KvStore
from freetokend.link.messages import EngineSettings, LayerRun
from freetokend.native.cpu_branch import CpuBranch
from freetokend.native.executor import Executor
from freetokend.policy.backend_choice import Backend, LayerBranch, resolve_layers
from freetokend.policy.eviction import default_order
from freetokend.policy.fill_table import fill_table
from freetokend.policy.kv_sizing import KvShape, pages_for
from freetokend.policy.layer_overrides import parse_layers
from freetokend.policy.prefill_crossover import PrefillFacts, prefill_crossover
from freetokend.policy.step_cost import StepCosts, estimated_miss_ratio
from freetokend.policy.vram_budget import Preset, VramFacts, VramPlan, VramWishes, plan_vram
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.dense_tensors import dense_bytes, dense_tensors
from freetokend.tensor.native_program import buffer_row_bytes
from freetokend.tensor.program import Attend, Rows, StepProgram
from freetokend.tensor.state_dict_weights import StateDictWeights

BUCKETS_COUNT: Final = 5
# What graphs of all sizes take beside the memory they share, and what libraries load.
GRAPH_BYTES: Final = 256 << 20
# Of attention's parts, per query and column; and y of both branches.
_PARTS_COUNT: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaInputs:
    """What an engine on a GPU is built from. step_tokens, sweep_tokens: the most of one step, and
    of one sweep."""

    index: FtwIndex
    region_address: int
    program: StepProgram
    facts: ModelFacts
    settings: EngineSettings
    executor: Executor
    kv_shape: KvShape
    step_tokens: int
    sweep_tokens: int

    @property
    def mapped(self) -> MappedBank:
        return MappedBank(bank=self.index.expert_bank, region_address=self.region_address)


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
    plan: VramPlan
    backend: BackendChoice
    layer_runs: tuple[LayerRun, ...]
    kernels: str
    fill_rate_source: str


def plan_device(inputs: CudaInputs, platform: CudaPlatform) -> VramPlan:
    """Slots and KV pages; errors as of `plan_vram`."""
    bank, facts, settings = inputs.index.expert_bank, inputs.facts, inputs.settings
    free_bytes = platform.memory().free_bytes
    if settings.device_bytes:
        free_bytes = min(free_bytes, settings.device_bytes)
    return plan_vram(
        VramFacts(
            free_bytes=free_bytes,
            own_bytes=0,
            dense_bytes=dense_bytes(inputs.index),
            workspace_bytes=workspace_bytes(inputs),
            state_bytes=0,
            graph_bytes=GRAPH_BYTES,
            record_bytes=bank.record_bytes,
            experts_count=bank.experts_count,
            experts_per_layer_count=bank.experts_per_layer_count,
            top_k=facts.experts_per_token_count,
            kv_page_bytes=inputs.kv_shape.page_bytes,
            kv_page_tokens=inputs.kv_shape.page_tokens,
            model_context_tokens=facts.max_context_tokens,
            max_running_count=settings.max_running_count,
        ),
        VramWishes(
            preset=Preset(settings.preset),
            slots_count=settings.slots_count or None,
            kv_bytes=settings.kv_bytes or None,
            max_context_tokens=settings.max_context_tokens or None,
        ),
    )


def workspace_bytes(inputs: CudaInputs) -> int:
    """What a step needs beside weights: buffers, results of both branches, attention's parts and
    logits."""
    facts, rows = inputs.facts, padded_rows(inputs.step_tokens)
    pair_bytes = 8 * facts.hidden_size + 2 * (facts.expert_size + 16)
    token_bytes = buffer_row_bytes(inputs.program, Rows.TOKENS) + (
        facts.experts_per_token_count * pair_bytes
    )
    running = padded_rows(inputs.settings.max_running_count)
    parts_bytes = running * q_heads_count(inputs) * _PARTS_COUNT * 4 * (facts.head_size + 2)
    # Results and what they are made from are there at once.
    results_bytes = 2 * rows * token_bytes + parts_bytes + 2 * running * facts.vocab_size * 4
    return results_bytes + sweep_bytes(inputs.program, inputs.sweep_tokens)


def sweep_bytes(program: StepProgram, tokens_count: int) -> int:
    """What a sweep of so many tokens keeps; its experts run in parts as big as a step."""
    return 2 * tokens_count * buffer_row_bytes(program, Rows.TOKENS)


def q_heads_count(inputs: CudaInputs) -> int:
    """Of the model's attention; the most of any layer."""
    program = inputs.program
    return max(
        program.buffers[op.q].width // op.head_size for op in program.ops if isinstance(op, Attend)
    )


def build_cuda(inputs: CudaInputs, platform: CudaPlatform, *, hybrid: bool) -> CudaEngine:
    """hybrid: the CPU executes what is not filled. ConfigError and ResourceError name the key."""
    overrides = parse_layers(inputs.settings.layers, inputs.index.expert_bank.moe_layers_count)
    kernels = slot_kernels(inputs.index.expert_bank.format, platform.capability)
    plan = plan_device(inputs, platform)
    parts = _Parts(inputs, platform, hybrid=hybrid, overrides=overrides)
    try:
        return parts.engine(plan, kernels)
    except BaseException:
        parts.close()
        raise


class _Parts:
    """What an engine is put together from, in the order in which it is needed."""

    def __init__(
        self,
        inputs: CudaInputs,
        platform: CudaPlatform,
        *,
        hybrid: bool,
        overrides: Mapping[int, LayerBranch],
    ) -> None:
        bank = inputs.index.expert_bank
        self._inputs, self._platform, self._hybrid = inputs, platform, hybrid
        self._overrides = overrides
        with_cpu = hybrid or LayerBranch.CPU in overrides.values()
        self._top_k = inputs.facts.experts_per_token_count
        self._rows = padded_rows(inputs.step_tokens)
        self._pool = SlotPool(
            platform.new_arena(bank.experts_count * bank.record_bytes),
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
        self._registration = platform.new_registration(
            inputs.region_address, bank.offset_bytes + bank.experts_count * bank.record_bytes
        )
        self._branch: CpuBranch | None = None
        self._buffers: HostBuffers | None = None  # the branch has their addresses
        self._fork: CpuFork | None = None
        self._start_note = ""
        fork = self._new_fork() if with_cpu else None
        self._ops = platform.new_ops(
            inputs.mapped, self._pool, rows_capacity=self._rows, top_k=self._top_k
        )
        make_planner = platform.new_planner(self._pool.state, bank.moe_layers_count)
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
            BranchOps(fill=self._ops.fill, slots=self._ops.slots, merge=self._ops.merge, fork=fork),
            make_planner,
            platform.device,
        )
        self._transfers = platform.new_transfers()
        self._taps = RoutedTaps(
            steps=DeviceTap(pinned=platform.pins), sweeps=DeviceTap(pinned=platform.pins)
        )
        self._sweeps = SlotSweeps(
            self._dispatch,
            self._pool.state,
            self._ops.fill,
            self._transfers,
            make_planner,
            tap=self._taps.sweeps,
        )
        self._experts = SwitchedExperts(self._dispatch, self._sweeps)
        self._cache = DeviceCache(
            inputs.mapped,
            self._pool,
            self._dispatch,
            self._sweeps,
            self._registration,
            least_slots=0 if with_cpu else self._top_k,
            synchronize=platform.synchronize,
            close_first=self._close_queues,
        )

    def close(self) -> None:
        self._cache.close()

    def engine(self, plan: VramPlan, kernels: SlotKernels) -> CudaEngine:
        inputs, bank = self._inputs, self._inputs.index.expert_bank
        while self._cache.register(bank.offset_bytes):
            pass
        note = self._registration.note
        if note and not self._hybrid:
            raise ResourceError(
                f"Without the CPU every record must be pinned: {note}. Set engine.backend to "
                '"auto" or "hybrid".',
                reason=Reason.HOST_MEMORY,
                param="engine.backend",
            )
        choices = resolve_layers(
            Backend.HYBRID if self._hybrid else Backend.OFFLOAD,
            fillable=self._cache.fillable(bank.offset_bytes),
            cpu_kernel=self._branch is not None,
            overrides=self._overrides,
        )
        self._cache.set_branches([choice.branch for choice in choices])
        self._cache.resize(plan.slots_count)
        profile = SlotProfile(
            inputs.mapped,
            self._pool,
            self._platform,
            self._ops,
            layers_count=sum(self._cache.fillable(bank.offset_bytes)),
        )
        profile.check_fills()
        executor = inputs.executor if self._hybrid else None
        measured = profile.measured(executor, self._transfers)
        if self._hybrid and measured is not None:
            self._cache.set_fill_counts(fill_table(measured.rates, bank.experts_per_layer_count))
        needs = KvNeeds(
            asked=inputs.settings.attention,
            shape=inputs.kv_shape,
            # One more, that no sequence is given: rows that only pad a graph write there.
            pages_count=plan.kv_pages_count + 1,
            q_heads_count=q_heads_count(inputs),
            context_tokens=plan.servable_context_tokens,
        )
        attention = self._platform.new_kv(needs)
        program = self._program(plan)
        graphed = self._graphed(program, plan, attention.store)
        runner = NotingRunner(graphed, self._cache, inputs.executor, queued=self._tap_step)
        asked = inputs.settings.backend
        how = "it is asked for" if asked != "auto" else "a GPU is there"
        return CudaEngine(
            runner=runner,
            sweep_runner=SweptProgram(
                program,
                inputs.executor,
                sweeping=self._experts.sweeping,
                pace=self._transfers.pace,
                note=self._cache.note_step,
                device=self._platform.device,
            ),
            sweep_from_tokens=self._sweep_from(profile, measured),
            taps=self._taps,
            kv=attention.store,
            cache=self._cache,
            plan=plan,
            backend=BackendChoice(
                backend="hybrid" if self._hybrid else "offload",
                reason=f"{how}: {self._platform.name}; experts in slots by {kernels.reason}; "
                f"attention by {attention.reason}{self._start_note}",
                notes=(note,) if note else (),
            ),
            layer_runs=layer_runs(choices),
            kernels=kernels.names,
            fill_rate_source="nothing can be filled" if measured is None else measured.source,
        )

    def _new_fork(self) -> CpuFork:
        inputs = self._inputs
        self._buffers = HostBuffers.make(
            tokens_capacity=self._rows,
            top_k=self._top_k,
            hidden_size=inputs.index.expert_bank.hidden_size,
            pinned=self._platform.pins,
        )
        experts = bank_experts(inputs.index.expert_bank, inputs.region_address)
        self._branch = CpuBranch(inputs.executor, experts, self._buffers.addresses())
        chosen = self._platform.new_fork(self._branch, self._buffers)
        self._fork, self._start_note = chosen.fork, f"; the CPU started by {chosen.reason}"
        return chosen.fork

    def _close_queues(self) -> None:
        self._transfers.close()
        if self._branch is not None:
            if isinstance(self._fork, StreamFork):
                self._fork.close()
            self._branch.close()

    def _program(self, plan: VramPlan) -> CudaProgram:
        inputs, device = self._inputs, self._platform.device
        tensors = dense_tensors(inputs.region_address, inputs.index, inputs.program, device)
        return CudaProgram(
            inputs.program,
            StateDictWeights(tensors, torch.bfloat16),
            self._experts,
            positions_count=plan.servable_context_tokens,
            device=device,
        )

    def _graphed(self, program: CudaProgram, plan: VramPlan, kv: KvStore) -> GraphedProgram:
        inputs = self._inputs
        return GraphedProgram(
            program,
            kv,
            self._platform.new_backend(),
            GraphSpec(
                rows_capacity=padded_rows(inputs.settings.max_running_count),
                pages_capacity=pages_for(plan.servable_context_tokens, inputs.kv_shape.page_tokens),
                padding_page=plan.kv_pages_count,
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

    def _sweep_from(self, profile: SlotProfile, measured: SlotRates | None) -> int:
        """From how many prompt tokens on a sweep is faster, if there is room for one; 0 when it
        never is."""
        if measured is None:
            return 0
        self._sweeps.warm_up()
        self._cache.note_step()
        inputs, bank = self._inputs, self._inputs.index.expert_bank
        resident_ratio = self._cache.slots_count / bank.experts_count
        token_s = bank.moe_layers_count * profile.token_s(rows=self._rows, top_k=self._top_k)
        crossover = prefill_crossover(
            PrefillFacts(
                costs=StepCosts(
                    moe_layers_count=bank.moe_layers_count,
                    experts_per_layer_count=bank.experts_per_layer_count,
                    top_k=self._top_k,
                    rates=measured.rates,
                    slot_bytes_per_s=measured.rates.fill_alone_bytes_per_s,
                    device_dense_s=0.0,
                    cpu_dense_s=0.0,
                ),
                resident_ratio=resident_ratio,
                miss_ratio=estimated_miss_ratio(resident_ratio),
                cpu_kernel=self._hybrid,
                fillable_layers_count=sum(self._dispatch.fillable_layers),
                stream_token_s=token_s,
                decode_token_s=token_s,
            ),
            most_tokens=inputs.sweep_tokens,
        )
        return crossover if crossover <= inputs.sweep_tokens else 0
