"""A wheel with a tiny random GGUF model, and a plan for it: the builder's work in milliseconds."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from freetokend.demo.plan.format import UpcyclePlan, format_plan
from freetokend.demo.wheels import WheelPin, sha256_of

LAYERS, EXPERTS, TOP_K, HIDDEN, NEURONS, HEADS, KV_HEADS, VOCABULARY = 2, 4, 2, 64, 32, 4, 2, 96
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class TinySource:
    """The files that a build of the tiny model needs."""

    wheel: Path
    pin: WheelPin
    plan: Path


def tiny_plan(alpha: float = 0.7, kept: int = 24) -> UpcyclePlan:
    random = np.random.default_rng(1)
    keep = np.zeros((LAYERS, EXPERTS, NEURONS), dtype=np.bool_)
    for row in keep.reshape(-1, NEURONS):
        row[random.permutation(NEURONS)[:kept]] = True
    router = random.standard_normal((LAYERS, EXPERTS, HIDDEN)).astype(np.float16)
    return UpcyclePlan(router=router, keep=keep, alpha=alpha, top_k=TOP_K)


def write_tiny_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(NEURONS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 126))]
    )
    writer.add_token_types([3, 3, 3] + [1] * 93)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape) / np.sqrt(shape[-1]) + (len(shape) == 1)
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", VOCABULARY, HIDDEN)
    add("output_norm.weight", HIDDEN)
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", HIDDEN)
        add(prefix + "ffn_norm.weight", HIDDEN)
        add(prefix + "attn_q.weight", HIDDEN, HIDDEN)
        add(prefix + "attn_k.weight", kv_width, HIDDEN)
        add(prefix + "attn_v.weight", kv_width, HIDDEN)
        add(prefix + "attn_output.weight", HIDDEN, HIDDEN)
        add(prefix + "ffn_gate.weight", NEURONS, HIDDEN)
        add(prefix + "ffn_up.weight", NEURONS, HIDDEN)
        add(prefix + "ffn_down.weight", HIDDEN, NEURONS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pin_of(wheel: Path) -> WheelPin:
    return WheelPin("tiny-model", "1.0", sha256_of(wheel), wheel.stat().st_size)


def make_tiny_source(directory: Path, plan: UpcyclePlan) -> TinySource:
    directory.mkdir(parents=True, exist_ok=True)
    gguf = directory / "tiny.gguf"
    write_tiny_gguf(gguf)
    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
    gguf.unlink()
    plan_path = directory / "plan.npz"
    plan_path.write_bytes(format_plan(plan))
    return TinySource(wheel, pin_of(wheel), plan_path)
