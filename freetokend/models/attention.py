"""Grouped-query attention with rotary positions and optional query/key norms."""

from __future__ import annotations

import torch

from freetokend.core.model_config import ModelConfig
from freetokend.models.rope import rotate
from freetokend.tensor.protocols import KvView, WeightSource


class Attention:
    """One layer's attention; keys, values and masking belong to the KvView."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer_index: int) -> None:
        name = f"model.layers.{layer_index}.self_attn"
        self._layer_index = layer_index
        self._q_heads = config.q_heads_count
        self._kv_heads = config.kv_heads_count
        self._head_size = config.head_size
        self._scale = config.head_size**-0.5
        q_size = self._q_heads * self._head_size
        kv_size = self._kv_heads * self._head_size
        hidden, bias = config.hidden_size, config.attention_bias
        self._q = weights.linear(
            f"{name}.q_proj", in_features=hidden, out_features=q_size, bias=bias
        )
        self._k = weights.linear(
            f"{name}.k_proj", in_features=hidden, out_features=kv_size, bias=bias
        )
        self._v = weights.linear(
            f"{name}.v_proj", in_features=hidden, out_features=kv_size, bias=bias
        )
        self._o = weights.linear(
            f"{name}.o_proj", in_features=q_size, out_features=hidden, bias=bias
        )
        self._q_norm = self._k_norm = None
        if config.qk_norm:
            size, eps = config.head_size, config.norm_epsilon
            self._q_norm = weights.norm(f"{name}.q_norm", size=size, eps=eps)
            self._k_norm = weights.norm(f"{name}.k_norm", size=size, eps=eps)

    def __call__(
        self, x: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor, kv: KvView
    ) -> torch.Tensor:
        """x: activation dtype [T, H] -> accumulator dtype [T, H]."""
        tokens = x.shape[0]
        q = self._q(x).view(tokens, self._q_heads, self._head_size)
        k = self._k(x).view(tokens, self._kv_heads, self._head_size)
        v = self._v(x).view(tokens, self._kv_heads, self._head_size)
        accumulator = q.dtype
        if self._q_norm is not None and self._k_norm is not None:
            q = self._q_norm(q).to(accumulator)
            k = self._k_norm(k).to(accumulator)
        q = rotate(q, cosines, signed_sines)
        k = rotate(k, cosines, signed_sines)
        return self._o(kv.attend(self._layer_index, q, k, v, self._scale))
