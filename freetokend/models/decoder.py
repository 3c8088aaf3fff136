"""The decoder: embedding, layers around a wide residual stream, final norm and logits.

What differs between families is in `ModelConfig` and in the names of their modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from freetokend.core.model_config import ModelConfig, ModelFamily
from freetokend.models.attention import Attention
from freetokend.models.feed_forward import DenseBlock, MoeBlock
from freetokend.models.rope import RopeTable
from freetokend.tensor.protocols import ExpertDispatch, KvView, StepInput, WeightSource

_MOE_MODULE: Final[Mapping[ModelFamily, str]] = MappingProxyType(
    {ModelFamily.MIXTRAL: "block_sparse_moe", ModelFamily.QWEN3_MOE: "mlp"}
)


class DecoderLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x)), the sums in the accumulator dtype."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        experts: ExpertDispatch,
        layer_index: int,
    ) -> None:
        name = f"model.layers.{layer_index}"
        size, eps = config.hidden_size, config.norm_epsilon
        self._attention_norm = weights.norm(f"{name}.input_layernorm", size=size, eps=eps)
        self._attention = Attention(config, weights, layer_index)
        self._feed_forward_norm = weights.norm(
            f"{name}.post_attention_layernorm", size=size, eps=eps
        )
        self._feed_forward: Callable[[torch.Tensor], torch.Tensor]
        if layer_index in config.moe_layer_indices:
            self._feed_forward = MoeBlock(
                config,
                weights,
                experts,
                name=f"{name}.{_MOE_MODULE[config.family]}",
                moe_layer_index=config.moe_layer_indices.index(layer_index),
            )
        else:
            self._feed_forward = DenseBlock(config, weights, name=f"{name}.mlp")

    def __call__(
        self, x: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor, kv: KvView
    ) -> torch.Tensor:
        """x: accumulator dtype [T, H] -> the same."""
        x = x + self._attention(self._attention_norm(x), cosines, signed_sines, kv)
        return x + self._feed_forward(self._feed_forward_norm(x))


class DecoderModel:
    """A StepProgram; holds weights and a table of rotations, no state of any sequence."""

    def __init__(self, config: ModelConfig, weights: WeightSource, experts: ExpertDispatch) -> None:
        self._config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = weights.embedding("model.embed_tokens", rows=vocab, features=hidden)
        self._layers = [
            DecoderLayer(config, weights, experts, index) for index in range(config.layers_count)
        ]
        self._norm = weights.norm("model.norm", size=hidden, eps=config.norm_epsilon)
        if config.tied_embeddings:
            self._output = weights.tied_linear(
                "model.embed_tokens", in_features=hidden, out_features=vocab
            )
        else:
            self._output = weights.linear("lm_head", in_features=hidden, out_features=vocab)
        weights.check_consumed()
        self._rope = RopeTable(config.rope, config.head_size, weights.accumulator_dtype)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """Logits of the tokens in `step.logits_index`: accumulator dtype [S', vocab]."""
        cosines, signed_sines = self._rope.rotations(step.positions)
        x = self._embedding(step.token_ids)
        for layer in self._layers:
            x = layer(x, cosines, signed_sines, kv)
        return self._output(self._norm(x[step.logits_index]))
