"""GGUF models written by the `gguf` package from tiny Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.packing import as_f32
from tests.support.tiny_checkpoints import write_tiny_mixtral, write_tiny_qwen3_moe

Values = NDArray[np.float32]
Type = gguf.GGMLQuantizationType
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def random_blocks(random: np.random.Generator, kind: Type, values: Values) -> NDArray[np.uint8]:
    """`values` quantised, or random blocks of the types for which `gguf` has no quantiser."""
    if kind not in (Type.Q4_K, Type.Q6_K):
        return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    elements, length = gguf.GGML_QUANT_SIZES[kind]
    shape = (*values.shape[:-1], values.shape[-1] // elements, length)
    raw = random.integers(0, 256, shape, np.uint8)
    halves = (0, 2) if kind is Type.Q4_K else (208,)
    for place in halves:
        scales = random.uniform(1e-4, 3e-4, (*shape[:-1], 1)).astype(np.float16)
        raw[..., place : place + 2] = scales.view(np.uint8)
    return raw.reshape(*shape[:-2], -1)


def write_gguf(
    directory: Path,
    kind: Type,
    *,
    mixtral: bool = False,
    facts: Mapping[str, int] | None = None,
    kinds: Mapping[str, Type] | None = None,
    leave_out: tuple[str, ...] = (),
    extra: Mapping[str, Values] | None = None,
    **more: Any,
) -> dict[str, Values]:
    """A directory with config.json, tokenizer and model.gguf. What the file means, by HF name.

    kind: of all matrices but the router; kinds: of single ones, by GGUF name; facts: metadata that
    is to differ; leave_out, extra: tensors by GGUF name.
    """
    write = write_tiny_mixtral if mixtral else write_tiny_qwen3_moe
    sizes = {"hidden": 256, "inter": 256, "experts": 4, "layers": 1, "heads": 4, "kv_heads": 2}
    write(directory, head_dim=64, **(sizes | more))
    tensors = read_values(directory)
    (directory / "model.safetensors").unlink()
    architecture = "llama" if mixtral else "qwen3moe"
    writer = gguf.GGUFWriter(directory / "model.gguf", architecture)
    said = {"block_count": 1, "embedding_length": 256, "attention.head_count": 4}
    experts = (sizes | more)["experts"]
    said |= {"attention.head_count_kv": 2, "expert_count": experts, "expert_used_count": 2}
    for key, value in (said | dict(facts or {})).items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(300)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 300)
    random = np.random.default_rng(4)
    meaning = {}
    for name, members in grouped(tensors).items():
        if name in leave_out:
            continue
        value = np.stack([tensors[member] for member in members])
        if len(members) == 1 and "_exps" not in name:
            value = value[0]
        place = name.split(".")[2] if name.startswith("blk.") else ""
        is_paired = mixtral and place in HEADS
        if is_paired:
            value = paired(value, HEADS[place])
        plain = value.ndim == 1 or "ffn_gate_inp" in name
        chosen = Type.F32 if plain else (kinds or {}).get(name, kind)
        raw = random_blocks(random, chosen, value)
        writer.add_tensor(name, raw, raw_dtype=chosen)
        exact = gguf.quants.dequantize(raw, chosen).reshape(value.shape)
        if is_paired:
            exact = unpaired(exact, HEADS[place])
        for number, member in enumerate(members):
            meaning[member] = exact[number] if "_exps" in name else exact
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    if mixtral:
        writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meaning


def read_values(directory: Path) -> dict[str, Values]:
    """All tensors of a safetensors checkpoint."""
    with Checkpoint(directory) as checkpoint:
        return {
            name: as_f32(checkpoint.read(tensor, 0, tensor.length_bytes), tensor.dtype).reshape(
                tensor.shape
            )
            for name, tensor in checkpoint.tensors.items()
        }


def grouped(tensors: Mapping[str, Values]) -> dict[str, list[str]]:
    """GGUF names, and the tensors that are in each: several experts, or one."""
    result: dict[str, list[str]] = {}
    for name in tensors:
        if name in ENDS:
            result[ENDS[name]] = [name]
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        module, last = rest.rsplit(".", 1)
        ours = LAYER_NAMES.get(module) or EXPERT_NAMES[module.rsplit(".", 1)[1]]
        result.setdefault(f"blk.{layer}.{ours}.{last}", []).append(name)
    return result


def paired(values: Values, heads: int) -> Values:
    """Rows as files of the llama architecture have them: halves of a head interleaved."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def unpaired(values: Values, heads: int) -> Values:
    """The inverse of `paired`."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
