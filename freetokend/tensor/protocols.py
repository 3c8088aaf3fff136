"""The torch-typed contracts between `models`, `experts`, `kvcache` and `engine`.

Shapes: T tokens of one step, S sequences, H hidden size, k experts per token, Nq/Nkv heads, D
head size. All tokens of a step are flattened; which sequence a token belongs to is the KvView's
business. Where a docstring says fp32, a fp64 run has fp64 (`WeightSource.accumulator_dtype`).
Numerics (the contract of the design): an output element depends on its own row and token only,
never on batch, chunking, threads or residency. Residual stream and router are fp32; inputs of
matrix products are `activation_dtype` (bf16 when serving, fp32 or fp64 in reference runs); sums are
fp32 (fp64 in a fp64 run).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Tokens of one engine step, all sequences one after another.

    token_ids: int64 [T]; positions: int64 [T], position of each token in its own sequence;
    logits_index: int64 [S'], which of the T tokens want logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor


class Linear(Protocol):
    """y = x W^T (+ b); W [out, in]."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: activation_dtype [T, in] -> accumulator dtype (fp32) [T, out]."""
        ...


class Embedding(Protocol):
    """Token id -> row, as the accumulator dtype."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [T] -> fp32 [T, H]."""
        ...


class Norm(Protocol):
    """Root mean square normalisation over the last dimension, computed in fp32."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: fp32 [..., N] -> activation_dtype [..., N]."""
        ...


class WeightSource(Protocol):
    """Where a model gets its non-expert weights from, by Hugging Face module name (no suffix).

    The model states the shape it expects and whether there is a bias; ModelDataError names a tensor
    that is missing, of another shape, or asked for twice. `check_consumed` raises ModelDataError
    naming leftovers. Implementations: the FTW region in the pool (native kernels, bf16), a state
    dict of plain tensors (torch kernels, any dtype; reference runs and GPU).
    """

    @property
    def activation_dtype(self) -> torch.dtype: ...

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Dtype of sums and of the residual stream: fp32, in a fp64 run fp64."""
        ...

    def linear(
        self, name: str, *, in_features: int, out_features: int, bias: bool = False
    ) -> Linear: ...

    def embedding(self, name: str, *, rows: int, features: int) -> Embedding: ...

    def tied_linear(self, name: str, *, in_features: int, out_features: int) -> Linear:
        """The output projection that shares the embedding's matrix (tie_word_embeddings)."""
        ...

    def norm(self, name: str, *, size: int, eps: float) -> Norm: ...

    def router(self, name: str, *, in_features: int, experts_count: int) -> Linear:
        """Router logits: weights and sums in the accumulator dtype, never rounded to bf16."""
        ...

    def check_consumed(self) -> None: ...


class ExpertDispatch(Protocol):
    """Runs routed experts, wherever their weights are."""

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """x: activation_dtype [T, H]; expert_ids: int32 [T, k]; weights: fp32 [T, k].

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

        q: fp32 [T, Nq, D] (rope applied); k, v: fp32 [T, Nkv, D]. Returns activation_dtype
        [T, Nq * D], contiguous as q, k and v are. Keys and values are kept in the cache's dtype
        (bf16 when serving).
        """
        ...


class StepProgram(Protocol):
    """A loaded model."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """One pass over the step's tokens; returns fp32 logits [S', vocab]."""
        ...
