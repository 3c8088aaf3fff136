"""Tiny random Hugging Face checkpoints (Mixtral, Qwen3-MoE) with a working tokenizer, torch-free.

Weights are scaled so that every part of the model matters: attention scores and router logits have
a standard deviation of about 1 to 2 and the output logits of about 2, so a wrong result shows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.safetensors_files import Stored, stored, write_checkpoint_files
from tests.support.tiny_tokenizer import MIN_VOCAB, special_token_ids, write_tiny_tokenizer

_CONFIG_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    layers: int
    hidden: int
    inter: int
    experts: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


class _Writer:
    """Collects random tensors under their names."""

    def __init__(self, dtype: str, seed: int) -> None:
        self._dtype = dtype
        self._random = np.random.default_rng(seed)
        self.tensors: dict[str, Stored] = {}

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = self._random.standard_normal((rows, columns), dtype=np.float32)
        self.put(name, values * np.float32(gain / sqrt(columns)))

    def vector(self, name: str, size: int, centre: float) -> None:
        values = self._random.standard_normal(size, dtype=np.float32)
        self.put(name, np.float32(centre) + np.float32(0.1) * values)

    def fused(self, name: str, count: int, rows: int, columns: int, gain: float) -> None:
        values = self._random.standard_normal((count, rows, columns), dtype=np.float32)
        self.put(name, values * np.float32(gain / sqrt(columns)))

    def put(self, name: str, values: Values) -> None:
        self.tensors[name] = stored(values, self._dtype)

    def ends(self, shape: _Shape, *, tied: bool) -> None:
        gain = 2.0 if tied else sqrt(shape.hidden)
        self.matrix("model.embed_tokens.weight", shape.vocab, shape.hidden, gain)
        self.vector("model.norm.weight", shape.hidden, 1.0)
        if not tied:
            self.matrix("lm_head.weight", shape.vocab, shape.hidden, 2.0)

    def attention(self, prefix: str, shape: _Shape, *, bias: bool, qk_norm: bool) -> None:
        q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.vector(prefix + "input_layernorm.weight", shape.hidden, 1.0)
        for name, rows, columns in (
            ("q_proj", q_width, shape.hidden),
            ("k_proj", kv_width, shape.hidden),
            ("v_proj", kv_width, shape.hidden),
            ("o_proj", shape.hidden, q_width),
        ):
            self.matrix(f"{prefix}self_attn.{name}.weight", rows, columns, 1.3)
            if bias:
                self.vector(f"{prefix}self_attn.{name}.bias", rows, 0.0)
        if qk_norm:
            self.vector(prefix + "self_attn.q_norm.weight", shape.head_dim, 1.0)
            self.vector(prefix + "self_attn.k_norm.weight", shape.head_dim, 1.0)
        self.vector(prefix + "post_attention_layernorm.weight", shape.hidden, 1.0)

    def experts(self, prefix: str, names: Sequence[str], shape: _Shape) -> None:
        gate, up, down = names
        for expert in range(shape.experts):
            start = f"{prefix}experts.{expert}."
            self.matrix(f"{start}{gate}.weight", shape.inter, shape.hidden, 1.5)
            self.matrix(f"{start}{up}.weight", shape.inter, shape.hidden, 1.5)
            self.matrix(f"{start}{down}.weight", shape.hidden, shape.inter, 1.5)

    def fused_experts(self, prefix: str, shape: _Shape) -> None:
        start = prefix + "experts."
        self.fused(start + "gate_up_proj", shape.experts, 2 * shape.inter, shape.hidden, 1.5)
        self.fused(start + "down_proj", shape.experts, shape.hidden, shape.inter, 1.5)


def write_tiny_mixtral(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    inter: int = 96,
    experts: int = 4,
    top_k: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 320,
    dtype: str = "bf16",
    seed: int = 0,
    tied: bool = False,
    fused: bool = False,
    shards: int = 1,
) -> None:
    """Write a Mixtral checkpoint into `directory` (created).

    dtype: "bf16", "f16" or "f32"; fused: the naming with one tensor per layer; the tokenizer is
    left out when `vocab` is too small for it (see MIN_VOCAB of tiny_tokenizer).
    """
    shape = _Shape(
        layers=layers,
        hidden=hidden,
        inter=inter,
        experts=experts,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
    )
    writer = _Writer(dtype, seed)
    writer.ends(shape, tied=tied)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        writer.attention(prefix, shape, bias=False, qk_norm=False)
        block = prefix + ("mlp." if fused else "block_sparse_moe.")
        writer.matrix(block + "gate.weight", experts, hidden, 2.0)
        if fused:
            writer.fused_experts(block, shape)
        else:
            writer.experts(block, ("w1", "w3", "w2"), shape)
    config = _config(shape, dtype, tied=tied) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": inter,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "sliding_window": None,
    }
    _write(directory, writer, config, shards)


def write_tiny_qwen3_moe(
    directory: Path,
    *,
    layers: int = 3,
    hidden: int = 64,
    inter: int = 48,
    experts: int = 8,
    top_k: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 320,
    dtype: str = "bf16",
    seed: int = 0,
    tied: bool = False,
    fused: bool = False,
    shards: int = 1,
    dense_inter: int = 160,
    mlp_only_layers: Sequence[int] = (),
    decoder_sparse_step: int = 1,
    norm_topk_prob: bool = True,
    attention_bias: bool = False,
) -> None:
    """Write a Qwen3-MoE checkpoint into `directory` (created); see `write_tiny_mixtral`.

    Layers in `mlp_only_layers`, and those that `decoder_sparse_step` leaves out, are dense with
    `dense_inter` neurons.
    """
    shape = _Shape(
        layers=layers,
        hidden=hidden,
        inter=inter,
        experts=experts,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
    )
    writer = _Writer(dtype, seed)
    writer.ends(shape, tied=tied)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        writer.attention(prefix, shape, bias=attention_bias, qk_norm=True)
        block = prefix + "mlp."
        if layer in mlp_only_layers or (layer + 1) % decoder_sparse_step:
            writer.matrix(block + "gate_proj.weight", dense_inter, hidden, 1.5)
            writer.matrix(block + "up_proj.weight", dense_inter, hidden, 1.5)
            writer.matrix(block + "down_proj.weight", hidden, dense_inter, 1.5)
            continue
        writer.matrix(block + "gate.weight", experts, hidden, 2.0)
        if fused:
            writer.fused_experts(block, shape)
        else:
            writer.experts(block, ("gate_proj", "up_proj", "down_proj"), shape)
    config = _config(shape, dtype, tied=tied) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": dense_inter,
        "moe_intermediate_size": inter,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": norm_topk_prob,
        "mlp_only_layers": list(mlp_only_layers),
        "decoder_sparse_step": decoder_sparse_step,
        "attention_bias": attention_bias,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "use_sliding_window": False,
    }
    _write(directory, writer, config, shards)


def _config(shape: _Shape, dtype: str, *, tied: bool) -> dict[str, object]:
    config: dict[str, object] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "dtype": _CONFIG_DTYPES[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if shape.vocab >= MIN_VOCAB:
        specials = special_token_ids(shape.vocab)
        config["eos_token_id"] = specials["<|im_end|>"]
        config["pad_token_id"] = specials["<|endoftext|>"]
    return config


def _write(directory: Path, writer: _Writer, config: dict[str, object], shards: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint_files(directory, writer.tensors, shards=shards)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    eos = config["eos_token_id"]
    generation = (
        {} if eos is None else {"eos_token_id": eos, "pad_token_id": config["pad_token_id"]}
    )
    (directory / "generation_config.json").write_text(json.dumps(generation))
    vocab = config["vocab_size"]
    if isinstance(vocab, int) and vocab >= MIN_VOCAB:
        write_tiny_tokenizer(directory, vocab)
