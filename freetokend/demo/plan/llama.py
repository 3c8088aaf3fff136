"""Llama's forward pass in numpy, float32: enough to calibrate on, to sample from and to measure.

The FFN half of a layer is left to the caller, who may replace it by experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetokend.demo.gguf_model import Matrix, ModelShape

TensorSource = Callable[[str], Matrix]
TokenIds = NDArray[np.int64]
Mask = NDArray[np.bool_]

_WINDOWS_AT_ONCE = 8  # bounds the attention scores: 8 * 9 heads * 256 * 256 * 4 bytes = 19 MB


@dataclass(frozen=True)
class AttentionWeights:
    """The attention half of one layer."""

    input_norm: Matrix  # [hidden]
    q: Matrix  # [heads * head_dim, hidden]
    k: Matrix  # [kv_heads * head_dim, hidden]
    v: Matrix  # [kv_heads * head_dim, hidden]
    o: Matrix  # [hidden, heads * head_dim]


@dataclass(frozen=True)
class FfnWeights:
    """The dense FFN half of one layer."""

    input_norm: Matrix  # [hidden]
    gate: Matrix  # [neurons, hidden]
    up: Matrix  # [neurons, hidden]
    down: Matrix  # [hidden, neurons]


@dataclass(frozen=True)
class KeyValues:
    """Rotated keys and values, [batch, kv_heads, tokens, head_dim]."""

    keys: Matrix
    values: Matrix


def load_attention(tensor: TensorSource, layer: int) -> AttentionWeights:
    """Read the attention weights of a layer by their Hugging Face names."""
    prefix = f"model.layers.{layer}."
    return AttentionWeights(
        input_norm=tensor(prefix + "input_layernorm.weight"),
        q=tensor(prefix + "self_attn.q_proj.weight"),
        k=tensor(prefix + "self_attn.k_proj.weight"),
        v=tensor(prefix + "self_attn.v_proj.weight"),
        o=tensor(prefix + "self_attn.o_proj.weight"),
    )


def load_ffn(tensor: TensorSource, layer: int) -> FfnWeights:
    """Read the dense FFN weights of a layer by their Hugging Face names."""
    prefix = f"model.layers.{layer}."
    return FfnWeights(
        input_norm=tensor(prefix + "post_attention_layernorm.weight"),
        gate=tensor(prefix + "mlp.gate_proj.weight"),
        up=tensor(prefix + "mlp.up_proj.weight"),
        down=tensor(prefix + "mlp.down_proj.weight"),
    )


def rms_norm(x: Matrix, weight: Matrix, epsilon: float) -> Matrix:
    """Normalise the last axis to unit root mean square, then scale."""
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    normed: Matrix = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return normed


def silu(x: Matrix) -> Matrix:
    """x * sigmoid(x), without overflow in exp for very negative x."""
    gate: Matrix = np.float32(0.5) * (np.float32(1.0) + np.tanh(np.float32(0.5) * x))
    return x * gate


def softmax(x: Matrix) -> Matrix:
    """Softmax over the last axis; -inf gets weight 0."""
    raised: Matrix = np.exp(x - x.max(axis=-1, keepdims=True))
    weights: Matrix = raised / raised.sum(axis=-1, keepdims=True)
    return weights


def linear(x: Matrix, weight: Matrix) -> Matrix:
    """x [..., in] times weight [out, in], transposed: [..., out]."""
    # As one matrix: numpy multiplies a stack of thin ones hundreds of times slower.
    return (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], len(weight))


def ffn_activations(x: Matrix, weights: FfnWeights) -> Matrix:
    """Neuron activations [..., neurons] for normalised FFN inputs [..., hidden]."""
    return silu(linear(x, weights.gate)) * linear(x, weights.up)


def project_qkv(
    x: Matrix, weights: AttentionWeights, shape: ModelShape, positions: TokenIds
) -> tuple[Matrix, KeyValues]:
    """Queries [batch, heads, tokens, head_dim] and new keys and values, rotated.

    x: residual stream [batch, tokens, hidden]; positions: [batch or 1, tokens].
    """
    normed = rms_norm(x, weights.input_norm, shape.norm_epsilon)

    def split(projected: Matrix) -> Matrix:
        batch, tokens, width = projected.shape
        heads = width // shape.head_dim
        return projected.reshape(batch, tokens, heads, shape.head_dim).swapaxes(1, 2)

    queries = _rotate(split(linear(normed, weights.q)), positions, shape.rope_theta)
    keys = _rotate(split(linear(normed, weights.k)), positions, shape.rope_theta)
    return queries, KeyValues(keys, split(linear(normed, weights.v)))


def _rotate(x: Matrix, positions: TokenIds, theta: float) -> Matrix:
    """Rotary embedding of [batch, heads, tokens, head_dim], halves as in Hugging Face Llama."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = positions[:, None, :, None] * frequencies
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def attend(queries: Matrix, past: KeyValues, allowed: Mask) -> Matrix:
    """Grouped-query attention: [batch, tokens, heads * head_dim].

    allowed: [batch or 1, tokens, past tokens], true where a query may see a key.
    """
    batch, heads, tokens, head_dim = queries.shape
    kv_heads, group = past.keys.shape[1], heads // past.keys.shape[1]
    # The queries that share a key head become rows of one matrix; broadcasting the keys over them
    # instead makes numpy's matmul leave BLAS (ten times slower).
    rows = queries.reshape(batch, kv_heads, group * tokens, head_dim)
    scores = rows @ past.keys.swapaxes(-1, -2) / np.float32(np.sqrt(head_dim))
    scores = scores.reshape(batch, kv_heads, group, tokens, -1)
    scores = np.where(allowed[:, None, None], scores, np.float32(-np.inf))
    mixed = softmax(scores).reshape(batch, kv_heads, group * tokens, -1) @ past.values
    return mixed.reshape(batch, heads, tokens, head_dim).swapaxes(1, 2).reshape(batch, tokens, -1)


def add_window_attention(x: Matrix, weights: AttentionWeights, shape: ModelShape) -> Matrix:
    """The attention half of a layer over whole windows [windows, tokens, hidden], causal."""
    tokens = x.shape[1]
    positions = np.arange(tokens, dtype=np.int64)[None]
    causal = np.tri(tokens, dtype=np.bool_)[None]
    parts = []
    for start in range(0, len(x), _WINDOWS_AT_ONCE):
        part = x[start : start + _WINDOWS_AT_ONCE]
        queries, new = project_qkv(part, weights, shape, positions)
        parts.append(part + linear(attend(queries, new, causal), weights.o))
    return np.concatenate(parts)


def perplexity(x: Matrix, windows: TokenIds, tensor: TensorSource, shape: ModelShape) -> float:
    """exp of the mean loss of every next token.

    x: residual stream after the last layer [windows, tokens, hidden]; windows: ids
    [windows, tokens].
    """
    head = tensor("model.embed_tokens.weight").T
    final = rms_norm(x, tensor("model.norm.weight"), shape.norm_epsilon)
    losses = []
    for states, ids in zip(final, windows, strict=True):
        logits = states[:-1] @ head
        peak = logits.max(axis=-1)
        log_total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=-1))
        losses.append(log_total - logits[np.arange(len(ids) - 1), ids[1:]])
    return float(np.exp(np.mean(np.concatenate(losses), dtype=np.float64)))
