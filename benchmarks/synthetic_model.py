"""Writes a random Qwen3-MoE at full width as a checkpoint and, bit-aligned, as GGUF.

usage: python -m benchmarks.synthetic_model DIRECTORY [--experts mxfp4] [--dense q8_0] [--layers 4]

hidden 2048, 128 experts of 768, 8 per token, 32/4 heads of 128, vocabulary 8192. The checkpoint is
bf16; its numbers are such that the types asked for hold them without error (`exact_weights`), so
quantising it gives the GGUF file's codes. Experts repeat after the first eight of a layer. The
embedding is bf16 in both, norms and routers are fp32 in the GGUF file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.exact_weights import KINDS, ExactMatrix, bf16_bits, exact_matrix
from tests.support.tiny_tokenizer import special_token_ids, write_tiny_tokenizer

HIDDEN: Final = 2048
EXPERTS: Final = 128
TOP_K: Final = 8
EXPERT_SIZE: Final = 768
HEADS: Final = 32
KV_HEADS: Final = 4
HEAD_SIZE: Final = 128
VOCAB: Final = 8192
CONTEXT: Final = 4096
EPS: Final = 1e-6
ROPE_THETA: Final = 1e6
DISTINCT_EXPERTS: Final = 8
_GGUF_TYPE: Final = {name: gguf.GGMLQuantizationType[name.upper()] for name in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticModel:
    """Where it is written, and what it is. The GGUF file has a directory with a text side too."""

    checkpoint: Path
    gguf_path: Path
    experts: str
    dense: str
    layers_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor under both of its names; `kind` as ggml calls it, "f32" for norms and routers."""

    name: str
    gguf_name: str
    kind: str
    shape: tuple[int, ...]
    parts: tuple[ExactMatrix, ...]
    repeats: int = 1


def synthetic_model(
    directory: Path, *, experts: str = "bf16", dense: str = "bf16", layers_count: int = 4
) -> SyntheticModel:
    """Write both forms unless they are there already."""
    name = f"qwen3moe-{layers_count}l-{experts}-{dense}"
    model = SyntheticModel(
        checkpoint=directory / name,
        gguf_path=directory / f"{name}-gguf" / "model.gguf",
        experts=experts,
        dense=dense,
        layers_count=layers_count,
    )
    done = model.checkpoint / "complete"
    if done.exists():
        return model
    for part in (model.checkpoint, model.gguf_path.parent):
        part.mkdir(parents=True, exist_ok=True)
        _write_text_side(model, part)
    stream = _SafetensorsFile(model.checkpoint / "model.safetensors", _header(model))
    writer = gguf.GGUFWriter(model.gguf_path, "qwen3moe")
    _write_facts(writer, model)
    with stream:
        for tensor in _tensors(model):
            stream.write(tensor)
            _add_to_gguf(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done.touch()
    return model


def _tensors(model: SyntheticModel) -> Iterator[_Tensor]:
    rng = np.random.default_rng(17)

    def matrix(name: str, gguf_name: str, kind: str, rows: int, columns: int) -> _Tensor:
        part = exact_matrix(kind, rows, columns, rng)
        return _Tensor(
            name=name, gguf_name=gguf_name, kind=kind, shape=(rows, columns), parts=(part,)
        )

    def norm(name: str, gguf_name: str, size: int) -> _Tensor:
        ones = bf16_bits(np.ones((1, size), np.float32))
        part = ExactMatrix(values=ones, blocks=np.empty(0, np.uint8))
        return _Tensor(name=name, gguf_name=gguf_name, kind="f32", shape=(size,), parts=(part,))

    yield matrix("model.embed_tokens.weight", "token_embd.weight", "bf16", VOCAB, HIDDEN)
    for layer in range(model.layers_count):
        hf, gg = f"model.layers.{layer}.", f"blk.{layer}."
        yield norm(f"{hf}input_layernorm.weight", f"{gg}attn_norm.weight", HIDDEN)
        yield norm(f"{hf}self_attn.q_norm.weight", f"{gg}attn_q_norm.weight", HEAD_SIZE)
        yield norm(f"{hf}self_attn.k_norm.weight", f"{gg}attn_k_norm.weight", HEAD_SIZE)
        for hf_name, gg_name, rows, columns in (
            ("q_proj", "attn_q", HEADS * HEAD_SIZE, HIDDEN),
            ("k_proj", "attn_k", KV_HEADS * HEAD_SIZE, HIDDEN),
            ("v_proj", "attn_v", KV_HEADS * HEAD_SIZE, HIDDEN),
            ("o_proj", "attn_output", HIDDEN, HEADS * HEAD_SIZE),
        ):
            hf_full = f"{hf}self_attn.{hf_name}.weight"
            yield matrix(hf_full, f"{gg}{gg_name}.weight", model.dense, rows, columns)
        yield norm(f"{hf}post_attention_layernorm.weight", f"{gg}ffn_norm.weight", HIDDEN)
        router = exact_matrix("bf16", EXPERTS, HIDDEN, rng)
        yield _Tensor(
            name=f"{hf}mlp.gate.weight",
            gguf_name=f"{gg}ffn_gate_inp.weight",
            kind="f32",
            shape=(EXPERTS, HIDDEN),
            parts=(router,),
        )
        for hf_name, gg_name, rows, columns in (
            ("gate_proj", "ffn_gate_exps", EXPERT_SIZE, HIDDEN),
            ("up_proj", "ffn_up_exps", EXPERT_SIZE, HIDDEN),
            ("down_proj", "ffn_down_exps", HIDDEN, EXPERT_SIZE),
        ):
            yield _Tensor(
                name=f"{hf}mlp.experts.{{}}.{hf_name}.weight",
                gguf_name=f"{gg}{gg_name}.weight",
                kind=model.experts,
                shape=(rows, columns),
                parts=tuple(
                    exact_matrix(model.experts, rows, columns, rng) for _ in range(DISTINCT_EXPERTS)
                ),
                repeats=EXPERTS // DISTINCT_EXPERTS,
            )
    yield norm("model.norm.weight", "output_norm.weight", HIDDEN)
    yield matrix("lm_head.weight", "output.weight", model.dense, VOCAB, HIDDEN)


def _names(tensor: _Tensor) -> list[str]:
    """Names in the checkpoint, in the order of the parts, repeated."""
    if "{}" not in tensor.name:
        return [tensor.name]
    return [tensor.name.format(index) for index in range(len(tensor.parts) * tensor.repeats)]


def _header(model: SyntheticModel) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint, without drawing any number."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCAB, HIDDEN))]
    for layer in range(model.layers_count):
        hf = f"model.layers.{layer}."
        shapes += [
            (f"{hf}input_layernorm.weight", (HIDDEN,)),
            (f"{hf}self_attn.q_norm.weight", (HEAD_SIZE,)),
            (f"{hf}self_attn.k_norm.weight", (HEAD_SIZE,)),
            (f"{hf}self_attn.q_proj.weight", (HEADS * HEAD_SIZE, HIDDEN)),
            (f"{hf}self_attn.k_proj.weight", (KV_HEADS * HEAD_SIZE, HIDDEN)),
            (f"{hf}self_attn.v_proj.weight", (KV_HEADS * HEAD_SIZE, HIDDEN)),
            (f"{hf}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_SIZE)),
            (f"{hf}post_attention_layernorm.weight", (HIDDEN,)),
            (f"{hf}mlp.gate.weight", (EXPERTS, HIDDEN)),
        ]
        for name, shape in (
            ("gate_proj", (EXPERT_SIZE, HIDDEN)),
            ("up_proj", (EXPERT_SIZE, HIDDEN)),
            ("down_proj", (HIDDEN, EXPERT_SIZE)),
        ):
            shapes += [(f"{hf}mlp.experts.{e}.{name}.weight", shape) for e in range(EXPERTS)]
    return [*shapes, ("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCAB, HIDDEN))]


class _SafetensorsFile:
    """A bf16 safetensors file written in the order of its header."""

    def __init__(self, path: Path, shapes: list[tuple[str, tuple[int, ...]]]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in shapes:
            end = offset + 2 * math.prod(shape)
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        body = json.dumps(entries).encode()
        body += b" " * (-len(body) % 8)
        self._left = [name for name, _ in reversed(shapes)]
        self._file = path.open("wb")
        self._file.write(len(body).to_bytes(8, "little") + body)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if error is None and self._left:
            raise ValueError(f"no data was written for {self._left[-1]}")

    def write(self, tensor: _Tensor) -> None:
        """The next tensors of the header."""
        for index, name in enumerate(_names(tensor)):
            wanted = self._left.pop()
            if wanted != name:
                raise ValueError(f"the header has {wanted} where {name} is written")
            self._file.write(tensor.parts[index % len(tensor.parts)].values.data)


def _add_to_gguf(writer: gguf.GGUFWriter, tensor: _Tensor) -> None:
    if tensor.kind == "f32":
        values = (tensor.parts[0].values.astype(np.uint32) << 16).view(np.float32)
        writer.add_tensor(tensor.gguf_name, values.reshape(tensor.shape))
        return
    blocks: NDArray[np.uint8] = tensor.parts[0].blocks
    if "{}" in tensor.name:
        blocks = np.concatenate(tensor.repeats * [np.stack([one.blocks for one in tensor.parts])])
    writer.add_tensor(tensor.gguf_name, blocks, raw_dtype=_GGUF_TYPE[tensor.kind])


def _write_text_side(model: SyntheticModel, directory: Path) -> None:
    write_tiny_tokenizer(directory, VOCAB)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": EXPERT_SIZE,
        "num_hidden_layers": model.layers_count,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": special_token_ids(VOCAB)["<|im_end|>"],
    }
    text = json.dumps(config, indent=1)
    (directory / "config.json").write_text(text, encoding="utf-8")


def _write_facts(writer: gguf.GGUFWriter, model: SyntheticModel) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(model.layers_count)
    writer.add_feed_forward_length(4 * HIDDEN)
    writer.add_expert_feed_forward_length(EXPERT_SIZE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(ROPE_THETA)
    document = json.loads((model.checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    special = sorted(document["added_tokens"], key=lambda entry: entry["id"])
    tokens += [entry["content"] for entry in special]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(special))
    kinds += [gguf.TokenType.CONTROL] * len(special)
    kinds += [gguf.TokenType.UNUSED] * (VOCAB - len(tokens))
    tokens += [f"[unused{index}]" for index in range(len(tokens), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_eos_token_id(special_token_ids(VOCAB)["<|im_end|>"])


def main() -> None:
    """Write one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--experts", choices=KINDS, default="bf16")
    parser.add_argument("--dense", choices=KINDS[:4], default="bf16")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    model = synthetic_model(
        options.directory,
        experts=options.experts,
        dense=options.dense,
        layers_count=options.layers,
    )
    print(f"{model.checkpoint}\n{model.gguf_path}")


if __name__ == "__main__":
    main()
