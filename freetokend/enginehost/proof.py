"""A GPU's first steps beside the CPU's, on the model's own weights, before anything is served.

A prompt, two steps of one token (the first of a size is computed op by op, the second is a graph)
and, where prompts are swept, the prompt again as a sweep. The CPU computes the same from the pool
and keeps its own few keys and values; the GPU's lie in pages that nobody has been given yet.

A sum in another order may choose another expert where two are as good as each other, and with many
layers some token of any prompt has such a place. So the CPU is given the experts that the GPU
chose, after each of them was found to be one of its own best or as good as the last of them; then
all logits are comparable.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from freetokend.core.errors import Reason, ResourceError
from freetokend.engine.sweep import layer_ends
from freetokend.engine.swept_program import SweptProgram
from freetokend.enginehost.cuda_budget import CudaInputs
from freetokend.experts.cpu import bank_experts
from freetokend.experts.gpu.device_cache import NotingRunner
from freetokend.experts.gpu.device_tap import DeviceTap
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.batch import KvStore, SequenceSpan, kv_batch
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.native.routing_tap import Tapped
from freetokend.policy.kv_sizing import pages_for
from freetokend.policy.vram_budget import VramPlan
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.program import Embed, Op, Route
from freetokend.tensor.protocols import KvView, StepInput

# Of a step's logits, as the norm of the difference over the norm of the CPU's: what tests/gpu holds
# a model of two layers to.
LOGITS_ERROR: Final = 5e-3
# For each layer of a deeper one. Both devices round activations to bf16 (2^-9) at the same places,
# of sums in another order; where one rounds up and the other down, all layers behind it differ.
# What computes something else is off by a multiple of it.
LAYER_ERROR: Final = 1.5e-3
# How much worse than the last of the CPU's own an expert may be that the GPU chose, in standard
# deviations of the token's router logits, over the bound of the logits: this is of the worst token
# of any layer, that one of a whole step.
TIE_RATIO: Final = 5.0
# More rows than the kernels of decoding take, and than a page of keys and values has.
PROMPT_TOKENS: Final = 36
DECODE_STEPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """The parts of an engine that are put to the proof; kv: of which no page is in use. sweeps:
    whether prompts are swept."""

    runner: NotingRunner
    sweep_runner: SweptProgram
    sweeps: bool
    steps_tap: DeviceTap
    sweeps_tap: DeviceTap
    kv: KvStore
    plan: VramPlan
    name: str


def prove(inputs: CudaInputs, parts: Proven) -> None:
    """ResourceError where the device does not compute what the CPU does, within `most_error`."""
    _Proof(inputs, parts).run()


class _Proof:
    def __init__(self, inputs: CudaInputs, parts: Proven) -> None:
        self._inputs, self._parts = inputs, parts
        self._most_error = most_error(inputs.facts.layers_count)
        most = parts.plan.servable_context_tokens
        self._prompt_count = max(1, min(PROMPT_TOKENS, inputs.step_tokens, most - DECODE_STEPS))
        self._decodes_count = min(DECODE_STEPS, most - self._prompt_count)
        count = self._prompt_count + self._decodes_count
        # Far apart in the vocabulary, and the same every time.
        vocab = inputs.facts.vocab_size
        self._token_ids = [inputs.facts.bos_token_id or 0]
        self._token_ids += [2_654_435_761 * at % vocab for at in range(1, count)]
        shape = inputs.kv_shape
        pages_count = min(pages_for(count, shape.page_tokens), parts.plan.kv_pages_count)
        # Not in the order of memory; page 0 is for padding.
        self._pages_there = array("i", reversed(range(1, pages_count + 1)))
        self._pages_here = array("i", range(pages_count))
        self._kv_here = NativeKvStore(inputs.executor, KvArena(shape, pages_count))
        self._routing = _GivenRouting(parts.name, TIE_RATIO * self._most_error)
        self._program = NativeProgram(
            inputs.program,
            PoolWeights(inputs.region_address, inputs.index),
            inputs.executor,
            bank_experts(inputs.index.expert_bank, inputs.region_address),
            observer=self._routing,
        )

    @torch.inference_mode()
    def run(self) -> None:
        parts, prompt = self._parts, self._prompt_count
        self._compare("a prompt", parts.steps_tap, parts.runner.logits, 0, prompt)
        for at in range(self._decodes_count):
            what = "a decode step"
            self._compare(what, parts.steps_tap, parts.runner.logits, prompt + at, 1)
        if parts.sweeps:
            self._compare("a sweep", parts.sweeps_tap, self._sweep, 0, prompt)

    def _compare(
        self,
        what: str,
        tap: DeviceTap,
        compute: Callable[[StepInput, KvView], torch.Tensor],
        first: int,
        count: int,
    ) -> None:
        """Tokens [first, first + count) of the sequence."""
        facts, bank = self._inputs.facts, self._inputs.index.expert_bank
        tap.start(bank.moe_layers_count * count * facts.experts_per_token_count)
        try:
            ours = compute(*self._step(self._parts.kv, self._pages_there, first, count))
            tapped = tap.take()
        finally:
            tap.stop()
        self._inputs.progress()
        self._routing.given(what, tapped)
        theirs = self._program.forward(*self._step(self._kv_here, self._pages_here, first, count))
        self._inputs.progress()
        error = relative_error(ours, theirs)
        if not error <= self._most_error:
            raise unlike(
                self._parts.name,
                f"logits of {what} differ by {error:.1e} of their size, and up to "
                f"{self._most_error:.1e} is expected of a model of this depth",
            )

    def _sweep(self, step: StepInput, kv: KvView) -> torch.Tensor:
        runner, first = self._parts.sweep_runner, 0
        for last in layer_ends(runner.program):
            runner.execute(step, kv, first=first, last=last)
            first = last
        return runner.logits(step)

    def _step(
        self, kv: KvStore, pages: array[int], first: int, count: int
    ) -> tuple[StepInput, KvView]:
        span = SequenceSpan(pages=pages, first_position=first, tokens_count=count)
        batch = kv_batch([span], kv.page_tokens)
        step = StepInput(
            token_ids=torch.tensor(self._token_ids[first : first + count], dtype=torch.int64),
            positions=batch.positions.long(),
            logits_index=torch.arange(count),
        )
        return step, kv.view(batch)


class _GivenRouting:
    """An Observer that lets a step go on with the experts that a device has chosen."""

    def __init__(self, name: str, tolerance: float) -> None:
        """tolerance: in standard deviations of a row of router logits."""
        self._name, self._tolerance = name, tolerance
        self._what = ""
        self._chosen: list[torch.Tensor] = []
        self._layer = 0

    def given(self, what: str, tapped: Tapped) -> None:
        """For the next step."""
        ids = np.frombuffer(tapped.ids, dtype="<u2").astype(np.int64)
        sizes = [(one.tokens_count, one.experts_per_token) for one in tapped.layers]
        ends = np.cumsum([rows * top_k for rows, top_k in sizes])[:-1]
        parts = np.split(ids, ends) if sizes else []
        self._chosen = [
            torch.from_numpy(part).view(size) for part, size in zip(parts, sizes, strict=True)
        ]
        self._what = what

    def __call__(self, op: Op, buffer: Callable[[int], torch.Tensor]) -> None:
        match op:
            case Embed():
                self._layer = 0
            case Route():
                self._route(op, buffer)
                self._layer += 1
            case _:
                pass

    def _route(self, op: Route, buffer: Callable[[int], torch.Tensor]) -> None:
        ids, logits = buffer(op.ids), buffer(op.logits)
        chosen = self._chosen[self._layer] if self._layer < len(self._chosen) else None
        if chosen is None or chosen.shape != ids.shape or bool((chosen >= logits.shape[1]).any()):
            raise unlike(self._name, f"{self._what} has no experts of MoE layer {self._layer}")
        ordered = chosen.sort(dim=1).values
        last = logits.gather(1, ids.long()).min(dim=1).values
        worst = logits.gather(1, chosen).min(dim=1).values
        least = last - self._tolerance * logits.std(dim=1)
        if bool((ordered.diff(dim=1) == 0).any()) or not bool((worst >= least).all()):
            raise unlike(
                self._name, f"{self._what} has chosen other experts in MoE layer {self._layer}"
            )
        weights = logits.softmax(dim=1).gather(1, chosen)
        if op.router.renormalise:
            weights = weights / weights.sum(dim=1, keepdim=True)
        weights = weights * op.router.weight_scale
        differ = (chosen != ids).any(dim=1, keepdim=True)
        buffer(op.weights).copy_(torch.where(differ, weights, buffer(op.weights)))
        ids.copy_(chosen)


def most_error(layers_count: int) -> float:
    """The most that the logits of a model with so many layers may differ by."""
    return max(LOGITS_ERROR, LAYER_ERROR * layers_count)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of a step; no number where one of them has one that is none."""
    norm = torch.linalg.vector_norm
    return float(norm(ours - theirs) / norm(theirs))


def unlike(name: str, what: str) -> ResourceError:
    """Of a device whose results are not to be used."""
    return ResourceError(
        f"{name} does not compute what the CPU does with the same weights: {what}. Set "
        'engine.device to "none" to serve without it; `bash tests/gpu/run.sh` in the sources '
        "shows which part of it differs.",
        reason=Reason.DEVICE_UNUSABLE,
    )
