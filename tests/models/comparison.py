"""Runs a checkpoint in several ways and compares logits position by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freetokend.models.registry import build_program
from freetokend.tensor.program import Embed, Op, Route, RouterProduct
from freetokend.tensor.protocols import KvView, StepInput, StepRunner
from freetokend.tensor.state_dict_weights import StateDictWeights
from freetokend.tensor.torch_program import TorchProgram
from tests.models.checkpoints import Checkpoint, hf_model
from tests.support.reference import ReferenceExperts, ReferenceKv, split_experts

# One step: (sequence, how many of its next tokens) for each sequence that takes part.
Step = Sequence[tuple[int, int]]


class RouterProbe:
    """An Observer that notes router logits, and can replace what was chosen by them.

    `logits`: fp32 [T, E] per MoE layer and step, in order. `choices`, when set: per MoE layer the
    ids [T, k] and weights [T, k] of the one step that follows; what the model chose is overwritten.
    """

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.choices: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._moe_layer_index = 0

    def __call__(self, op: Op, buffer: Callable[[int], torch.Tensor]) -> None:
        match op:
            case Embed():
                self._moe_layer_index = 0
            case RouterProduct():
                self.logits.append(buffer(op.out).clone())
            case Route():
                if self.choices is not None:
                    ids, weights = self.choices[self._moe_layer_index]
                    assert ids.shape == buffer(op.ids).shape
                    buffer(op.ids).copy_(ids)
                    buffer(op.weights).copy_(weights)
                self._moe_layer_index += 1
            case _:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A bound program with what a step needs: a fresh cache per run, and the probe within it."""

    model: StepRunner
    new_cache: Callable[[], Callable[[Sequence[int]], KvView]]
    probe: RouterProbe

    def run(self, prompts: Sequence[torch.Tensor], steps: Sequence[Step]) -> list[torch.Tensor]:
        """Feed the prompts as `steps` say; returns logits of every position per prompt."""
        view = self.new_cache()
        done = [0] * len(prompts)
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        for step in steps:
            ids, positions, sequences = [], [], []
            for sequence, count in step:
                start, end = done[sequence], done[sequence] + count
                ids.append(prompts[sequence][start:end])
                positions.append(torch.arange(start, end))
                sequences += [sequence] * count
                done[sequence] = end
            every = StepInput(
                token_ids=torch.cat(ids),
                positions=torch.cat(positions),
                logits_index=torch.arange(len(sequences)),
            )
            rows = self.model.forward(every, view(sequences))
            counts = [count for _, count in step]
            for (sequence, _), part in zip(step, torch.split(rows, counts), strict=True):
                logits[sequence].append(part)
        assert done == [len(prompt) for prompt in prompts]
        return [torch.cat(parts) for parts in logits]


def reference_runner(checkpoint: Checkpoint, dtype: torch.dtype) -> Runner:
    """Our model over plain tensors, experts and attention by torch."""
    plain, gate_up, down = split_experts(checkpoint.tensors)
    probe = RouterProbe()
    model = TorchProgram(
        build_program(checkpoint.config),
        StateDictWeights(plain, dtype),
        ReferenceExperts(gate_up, down, dtype),
        observer=probe,
    )
    return Runner(model=model, new_cache=lambda: ReferenceKv(dtype).view, probe=probe)


def whole(lengths: Sequence[int]) -> list[Step]:
    """Every prompt in one step, all together."""
    return [[(sequence, length) for sequence, length in enumerate(lengths)]]


def one_by_one(lengths: Sequence[int]) -> list[Step]:
    """Every prompt token by token, all sequences side by side."""
    return [
        [(sequence, 1) for sequence, length in enumerate(lengths) if index < length]
        for index in range(max(lengths))
    ]


def chunked(lengths: Sequence[int], chunk: int) -> list[Step]:
    """Prefill in chunks: sequence s begins s steps later, so chunks and decodes mix."""
    steps: list[Step] = []
    done = [0] * len(lengths)
    while any(have < length for have, length in zip(done, lengths, strict=True)):
        step: list[tuple[int, int]] = []
        for sequence, length in enumerate(lengths):
            left = length - done[sequence]
            if left == 0 or sequence > len(steps):
                continue
            # The last tokens go one at a time, as in decoding.
            count = 1 if left <= chunk else min(chunk, left - chunk)
            step.append((sequence, count))
            done[sequence] += count
        steps.append(step)
    return steps


def hf_logits(
    checkpoint: Checkpoint, dtype: torch.dtype, prompts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """transformers' logits of every position, each prompt by itself in one pass."""
    model: Any = hf_model(checkpoint, dtype)
    with torch.inference_mode():
        return [model(prompt[None]).logits[0] for prompt in prompts]


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per position ||found - expected|| / ||expected||: fp64 [T]."""
    found, expected = found.double(), expected.double()
    norm = torch.linalg.vector_norm
    return torch.div(norm(found - expected, dim=-1), norm(expected, dim=-1))
