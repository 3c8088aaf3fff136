"""How the memory of a GPU is divided for a model and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from freetokend.core.model_config import ModelFacts
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.dispatch import padded_rows
from freetokend.ftw.index import FtwIndex
from freetokend.link.messages import EngineSettings
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvShape
from freetokend.policy.vram_budget import (
    Preset,
    VramFacts,
    VramPlan,
    VramWishes,
    plan_vram,
)
from freetokend.tensor.dense_tensors import dense_bytes
from freetokend.tensor.native_program import buffer_row_bytes
from freetokend.tensor.program import Attend, Rows, StepProgram

# What graphs of all sizes take beside the memory they share, and what libraries load.
GRAPH_BYTES: Final = 256 << 20
# Of attention's parts, per query and column; and y of both branches.
_PARTS_COUNT: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaInputs:
    """What an engine on a GPU is built from. step_tokens, sweep_tokens: the most of one step, and
    of one sweep; progress: called after each part, since who does nothing for long is replaced."""

    index: FtwIndex
    region_address: int
    program: StepProgram
    facts: ModelFacts
    settings: EngineSettings
    executor: Executor
    kv_shape: KvShape
    step_tokens: int
    sweep_tokens: int
    progress: Callable[[], None] = lambda: None

    @property
    def mapped(self) -> MappedBank:
        return MappedBank(bank=self.index.expert_bank, region_address=self.region_address)


def plan_device(facts: VramFacts, settings: EngineSettings) -> VramPlan:
    """Slots and KV pages. Errors as of `plan_vram`."""
    return plan_vram(
        facts,
        VramWishes(
            preset=Preset(settings.preset),
            slots_count=settings.slots_count or None,
            kv_bytes=settings.kv_bytes or None,
            max_context_tokens=settings.max_context_tokens or None,
        ),
    )


def device_facts(
    inputs: CudaInputs, free_bytes: int, *, granularity_bytes: int, kv_granularity_bytes: int
) -> VramFacts:
    """What the GPU's memory is divided by; granularity: in which memory of slots, and of the KV of
    all layers, comes and goes."""
    bank, facts, settings = inputs.index.expert_bank, inputs.facts, inputs.settings
    if settings.device_bytes:
        free_bytes = min(free_bytes, settings.device_bytes)
    return VramFacts(
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
        granularity_bytes=granularity_bytes,
        kv_granularity_bytes=kv_granularity_bytes,
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
