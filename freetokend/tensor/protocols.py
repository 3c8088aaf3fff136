"""The torch-typed contracts between `models`, `experts`, `kvcache` and `engine`.

Shapes: T tokens of one step, S sequences, H hidden size, k experts per token, Nq/Nkv heads, D
head size. All tokens of a step are flattened; which sequence a token belongs to is the KvView's
business. Where a docstring says fp32, a fp64 run has fp64.
Numerics (the contract of the design): an output element depends on its own row and token only,
never on batch, chunking, threads or residency. Residual stream and router are fp32; inputs of
matrix products are the activation dtype (bf16 when serving, fp32 or fp64 in reference runs); sums
are fp32 (fp64 in a fp64 run).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from freetokend.tensor.program import Op
from freetokend.tensor.sampling import ChosenTokens, SamplingRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Tokens of one engine step, all sequences one after another.

    token_ids: int64 [T]; positions: int64 [T], position of each token in its own sequence;
    logits_index: int64 [S'], which of the T tokens want logits; sampling: [S'], how to choose a
    token from each row of them, None where nobody asks for tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor
    sampling: SamplingRows | None = None


class ExpertDispatch(Protocol):
    """Runs routed experts, wherever their weights are."""

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """x: activation dtype [T, H]; expert_ids: int32 [T, k]; weights: fp32 [T, k].

        Returns fp32 [T, H]: sum over k, in routed order, of weights * expert(x). All contiguous.
        """
        ...


class KvView(Protocol):
    """Keys and values of the sequences of one step; writes new ones, attends over all."""

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Store k, v of this step's tokens, then causal attention with grouped queries.

        q: fp32 [T, Nq, D] (rope applied); k, v: fp32 [T, Nkv, D]. Returns activation dtype
        [T, Nq * D], contiguous as q, k and v are. Keys and values are kept in the cache's dtype
        (bf16 when serving).
        """
        ...


class StepRunner(Protocol):
    """A step program bound to weights."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """One pass over the step's tokens; returns fp32 logits [S', vocab], the caller's own."""
        ...


class TokenRunner(Protocol):
    """A step program bound to weights, run to its end: a token of each row of logits."""

    @property
    def vocab_size(self) -> int: ...

    def choose(self, step: StepInput, kv: KvView) -> ChosenTokens:
        """One pass over the step's tokens; S' tokens, as `step.sampling` asks."""
        ...


class Observer(Protocol):
    """Is shown every op after it was executed; for tests and measurements.

    `buffer(number)` is the [rows, width] tensor of a buffer of the program. What is written into
    it in place is what the ops that follow read.
    """

    def __call__(self, op: Op, buffer: Callable[[int], torch.Tensor]) -> None: ...
