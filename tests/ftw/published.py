"""Tiny checkpoints of gpt-oss and DeepSeek-V4 in the layout they were published in, torch-free.

What they mean is given in float64, worked out here from the codes and not by the project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ftw.schemes.checkpoints import E2M1, e4m3, random_fp8, table, to_bf16
from tests.support.safetensors_files import Stored, write_checkpoint_files

Floats = NDArray[np.float64]
GPT_OSS = "GptOssForCausalLM"
DEEPSEEK_V4 = "DeepseekV4ForCausalLM"
# Of DeepSeek-V4: by layer, how much keys and values are compressed, then that of a guessing layer.
RATIOS = [0, 4, 128, 0]


@dataclass(frozen=True)
class Expert:
    """gate, up [I, H] and down [H, I]; biases [I], [I], [H], or none."""

    gate: Floats
    up: Floats
    down: Floats
    biases: tuple[Floats, Floats, Floats] | None = None


@dataclass
class Published:
    """A checkpoint: config, tensors by name, and what they mean.

    values: of everything but the experts; experts: by layer and number; ignored: names of tensors
    that nothing computes with.
    """

    config: dict[str, Any]
    hidden: int
    inner: int
    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, Floats] = field(default_factory=dict)
    experts: dict[tuple[int, int], Expert] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def write(self, directory: Path, **config: object) -> Path:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self.config | config))
        write_checkpoint_files(directory, self.tensors)
        return directory

    def bf16(self, name: str, *shape: int, gain: float = 1.0, centre: float = 0.0) -> Floats:
        drawn = centre + gain * self.random.standard_normal(shape)
        bits, values = to_bf16(drawn.astype(np.float32))
        self.tensors[name] = Stored("BF16", shape, bits.tobytes())
        self.values[name] = values
        return values

    def f32(self, name: str, *shape: int, gain: float = 0.1) -> None:
        drawn = (gain * self.random.standard_normal(shape)).astype(np.float32)
        self.tensors[name] = Stored("F32", shape, drawn.tobytes())
        self.values[name] = drawn.astype(np.float64)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        """`name`.weight in blocks of 128 x 128 and their `name`.scale."""
        grid = (-(-rows // 128), -(-columns // 128))
        codes = random_fp8(self.random, rows, columns)
        scales = self.random.integers(115, 119, grid, np.uint8)
        wide = np.repeat(np.repeat(2.0 ** (scales - 127.0), 128, axis=0), 128, axis=1)
        self.tensors[name + ".weight"] = Stored("F8_E4M3", (rows, columns), codes.tobytes())
        self.tensors[name + ".scale"] = Stored("F8_E8M0", grid, scales.tobytes())
        self.values[name + ".weight"] = table(e4m3)[codes] * wide[:rows, :columns]

    def fp4(self, *shape: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Floats]:
        """Bytes [.., K/2], scales [.., K/32] and what they mean, of deviation about 1/sqrt(K).

        Groups are whole: what is beyond a K that they do not divide is in bytes and scales only.
        """
        *outer, columns = shape
        groups = -(-columns // 32)
        packed = self.random.integers(0, 256, (*outer, groups * 16), np.uint8)
        scales = self.random.integers(122, 125, (*outer, groups), np.uint8)
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*outer, groups * 32)
        values = np.array(E2M1)[codes] * np.repeat(2.0 ** (scales - 127.0), 32, axis=-1)
        return packed, scales, values[..., :columns]


def gpt_oss(
    *,
    plain: bool = False,
    tied: bool = False,
    hidden: int = 64,
    inner: int = 96,
    experts: int = 4,
    layers: int = 2,
) -> Published:
    """gpt-oss; plain: its experts in bf16, as fine-tuning leaves them."""
    heads, kv_heads, head, vocab = 4, 2, 32, 96
    made = Published(
        config=_gpt_oss_config(hidden, inner, experts, layers, tied=tied),
        hidden=hidden,
        inner=inner,
    )
    if not plain:
        made.config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        }
    made.bf16("model.embed_tokens.weight", vocab, hidden)
    made.bf16("model.norm.weight", hidden, centre=1.0, gain=0.1)
    if not tied:
        made.bf16("lm_head.weight", vocab, hidden)
    for layer in range(layers):
        start = f"model.layers.{layer}."
        made.bf16(start + "input_layernorm.weight", hidden, centre=1.0, gain=0.1)
        made.bf16(start + "post_attention_layernorm.weight", hidden, centre=1.0, gain=0.1)
        for name, rows, columns in (
            ("q_proj", heads * head, hidden),
            ("k_proj", kv_heads * head, hidden),
            ("v_proj", kv_heads * head, hidden),
            ("o_proj", hidden, heads * head),
        ):
            made.bf16(f"{start}self_attn.{name}.weight", rows, columns, gain=1 / sqrt(columns))
            made.bf16(f"{start}self_attn.{name}.bias", rows)
        made.bf16(start + "self_attn.sinks", heads)
        made.bf16(start + "mlp.router.weight", experts, hidden)
        made.bf16(start + "mlp.router.bias", experts)
        _gpt_oss_experts(made, layer, experts, plain=plain)
    return made


def _gpt_oss_config(
    hidden: int, inner: int, experts: int, layers: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": [GPT_OSS],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "vocab_size": 96,
        "max_position_embeddings": 4096,
        "initial_context_length": 128,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }


def _gpt_oss_experts(made: Published, layer: int, experts: int, *, plain: bool) -> None:
    start = f"model.layers.{layer}.mlp.experts."
    matrices, biases = [], []
    for name, rows, columns in (
        ("gate_up_proj", 2 * made.inner, made.hidden),
        ("down_proj", made.hidden, made.inner),
    ):
        biases.append(made.bf16(f"{start}{name}_bias", experts, rows))
        del made.values[f"{start}{name}_bias"]
        if plain:
            stored = made.bf16(start + name, experts, columns, rows, gain=2 / sqrt(columns))
            del made.values[start + name]
            matrices.append(stored.transpose(0, 2, 1))
            continue
        packed, scales, values = made.fp4(experts, rows, columns)
        blocks = (*scales.shape, 16)
        made.tensors[f"{start}{name}_blocks"] = Stored("U8", blocks, packed.tobytes())
        made.tensors[f"{start}{name}_scales"] = Stored("U8", scales.shape, scales.tobytes())
        matrices.append(values)
    for number in range(experts):
        made.experts[layer, number] = Expert(
            gate=matrices[0][number, 0::2],
            up=matrices[0][number, 1::2],
            down=matrices[1][number],
            biases=(biases[0][number, 0::2], biases[0][number, 1::2], biases[1][number]),
        )


def deepseek_v4(*, hidden: int = 64, inner: int = 32, experts: int = 4) -> Published:
    """DeepSeek-V4: one layer of each kind of attention, the first of which routes by a table."""
    made = Published(
        config=_deepseek_v4_config(hidden, inner, experts),
        hidden=hidden,
        inner=inner,
    )
    made.bf16("embed.weight", 96, hidden)
    made.bf16("norm.weight", hidden, centre=1.0, gain=0.1)
    made.bf16("head.weight", 96, hidden)
    for name, shape in (("fn", (4, 4 * hidden)), ("base", (4,)), ("scale", (1,))):
        made.f32("hc_head_" + name, *shape)
    for layer in range(3):
        _deepseek_v4_attention(made, f"layers.{layer}.", RATIOS[layer])
        _deepseek_v4_experts(made, layer)
    # Guesses of further tokens: another layer, with names of its own.
    kept = dict(made.values)
    _deepseek_v4_attention(made, "mtp.0.", RATIOS[3])
    made.bf16("mtp.0.enorm.weight", hidden)
    made.fp8("mtp.0.e_proj", hidden, hidden)
    made.tensors["mtp.0.ffn.experts.0.w1.weight"] = Stored("I8", (inner, 16), bytes(inner * 16))
    made.values = kept
    made.ignored = {name for name in made.tensors if name.startswith("mtp.")}
    return made


def _deepseek_v4_config(hidden: int, inner: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": [DEEPSEEK_V4],
        "model_type": "deepseek_v4",
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "compress_ratios": RATIOS,
        "num_hash_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 96,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "vocab_size": 96,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }


def _deepseek_v4_attention(made: Published, start: str, ratio: int) -> None:
    hidden, attention = made.hidden, start + "attn."
    made.bf16(start + "attn_norm.weight", hidden, centre=1.0, gain=0.1)
    made.fp8(attention + "wq_a", 96, hidden)
    made.bf16(attention + "q_norm.weight", 96, centre=1.0, gain=0.1)
    made.fp8(attention + "wq_b", 128, 96)
    made.fp8(attention + "wkv", 32, hidden)
    made.bf16(attention + "kv_norm.weight", 32, centre=1.0, gain=0.1)
    made.fp8(attention + "wo_a", 32, 64)
    made.fp8(attention + "wo_b", hidden, 32)
    made.f32(attention + "attn_sink", 4)
    if ratio:
        _compressor(made, attention + "compressor.", 64 if ratio == 4 else 32, 32, ratio)
    if ratio == 4:
        made.fp8(attention + "indexer.wq_b", 32, 96)
        made.bf16(attention + "indexer.weights_proj.weight", 2, hidden)
        _compressor(made, attention + "indexer.compressor.", 32, 16, ratio)
    for block in ("hc_attn_", "hc_ffn_"):
        for name, shape in (("fn", (24, 4 * hidden)), ("base", (24,)), ("scale", (3,))):
            made.f32(start + block + name, *shape)


def _compressor(made: Published, start: str, width: int, head: int, ratio: int) -> None:
    made.bf16(start + "wkv.weight", width, made.hidden)
    made.bf16(start + "wgate.weight", width, made.hidden)
    made.f32(start + "ape", ratio, width)
    made.bf16(start + "norm.weight", head, centre=1.0, gain=0.1)


def _deepseek_v4_experts(made: Published, layer: int) -> None:
    hidden, inner, count = made.hidden, made.inner, made.config["n_routed_experts"]
    start = f"layers.{layer}.ffn"
    made.bf16(start + "_norm.weight", hidden, centre=1.0, gain=0.1)
    made.bf16(start + ".gate.weight", count, hidden)
    if layer == 0:
        ids = made.random.integers(0, count, (96, 2), np.int64)
        made.tensors[start + ".gate.tid2eid"] = Stored("I64", ids.shape, ids.tobytes())
        made.values[start + ".gate.tid2eid"] = ids.astype(np.float64)
    else:
        made.f32(start + ".gate.bias", count)
    made.fp8(start + ".shared_experts.w1", inner, hidden)
    made.fp8(start + ".shared_experts.w3", inner, hidden)
    made.fp8(start + ".shared_experts.w2", hidden, inner)
    for number in range(count):
        matrices = []
        for name, rows, columns in (
            ("w1", inner, hidden),
            ("w3", inner, hidden),
            ("w2", hidden, inner),
        ):
            packed, scales, values = made.fp4(rows, columns)
            base = f"{start}.experts.{number}.{name}"
            made.tensors[base + ".weight"] = Stored("I8", packed.shape, packed.tobytes())
            made.tensors[base + ".scale"] = Stored("F8_E8M0", scales.shape, scales.tobytes())
            matrices.append(values)
        gate, up, down = matrices
        made.experts[layer, number] = Expert(gate=gate, up=up, down=down)


def changed(tensor: Stored, shape: tuple[int, ...]) -> Stored:
    """The tensor under another shape of as many elements, or cut to it."""
    element_bytes = len(tensor.data) // int(np.prod(tensor.shape))
    return Stored(tensor.dtype, shape, tensor.data[: int(np.prod(shape)) * element_bytes])


def write_with(
    made: Published, directory: Path, tensors: Mapping[str, Stored | None], **config: object
) -> Path:
    """The checkpoint with some tensors put in the place of its own; None takes one away."""
    own = made.tensors
    made.tensors = {name: tensor for name, tensor in (own | tensors).items() if tensor is not None}
    try:
        return made.write(directory, **config)
    finally:
        made.tensors = own
