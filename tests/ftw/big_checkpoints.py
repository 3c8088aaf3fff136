"""Checkpoints of hundreds of MB and more, written without holding them in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from tests.support.safetensors_files import SAFETENSORS_DTYPES, write_header

_ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def write_big_mixtral(
    directory: Path,
    *,
    layers: int,
    experts: int,
    hidden: int,
    inter: int,
    dtype: str,
    random: bool,
    finite: bool = False,
) -> int:
    """A Mixtral checkpoint; its data is random bits, or zeros in a sparse file. Returns its bytes.

    Random bits hold every kind of number, NaN too: good for comparing bytes, not for inference.
    finite: without the highest bit of the exponents of bf16, so that all numbers are below 2.
    """
    directory.mkdir(parents=True)
    header: dict[str, object] = {}
    end_bytes = 0

    def add(name: str, *shape: int) -> None:
        nonlocal end_bytes
        length_bytes = _ELEMENT_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [end_bytes, end_bytes + length_bytes],
        }
        end_bytes += length_bytes

    add("model.embed_tokens.weight", 1024, hidden)
    add("lm_head.weight", 1024, hidden)
    add("model.norm.weight", hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        add(prefix + "input_layernorm.weight", hidden)
        add(prefix + "post_attention_layernorm.weight", hidden)
        for matrix in ("q_proj", "k_proj", "v_proj", "o_proj"):
            add(f"{prefix}self_attn.{matrix}.weight", hidden, hidden)
        add(prefix + "block_sparse_moe.gate.weight", experts, hidden)
        for expert in range(experts):
            start = f"{prefix}block_sparse_moe.experts.{expert}."
            add(start + "w1.weight", inter, hidden)
            add(start + "w2.weight", hidden, inter)
            add(start + "w3.weight", inter, hidden)
    with open(directory / "model.safetensors", "wb") as file:
        start_bytes = write_header(file.fileno(), header)
        os.ftruncate(file.fileno(), start_bytes + end_bytes)
        if random:
            generator = np.random.default_rng(5)
            file.seek(start_bytes)
            for offset_bytes in range(0, end_bytes, 1 << 24):
                data = generator.bytes(min(1 << 24, end_bytes - offset_bytes))
                if finite:
                    data = (np.frombuffer(data, np.uint16) & 0xBFFF).tobytes()
                file.write(data)
    (directory / "config.json").write_text(
        json.dumps(_config(layers=layers, experts=experts, hidden=hidden, inter=inter))
    )
    return end_bytes


def _config(*, layers: int, experts: int, hidden: int, inter: int) -> dict[str, object]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": 1024,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
