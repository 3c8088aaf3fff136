"""A GGUF model under the names of a Hugging Face checkpoint.

The configuration comes from config.json, as always; the metadata of the file must agree with it.
Routed experts lie in one tensor per layer and matrix, [E, N, K], expert after expert. Files of the
"llama" architecture, to which Mixtral belongs, have the rows of query and key heads reordered for
rotation in neighbouring pairs: row i of the first half of a head is its row 2 i, row i of the
second half its row 2 i + 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from freetokend.core.config_fields import ConfigFields
from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.formats import WeightFormat
from freetokend.ftw.gguf_header import GGML_TYPES
from freetokend.ftw.matrix import MatrixSource, QuantMatrix
from freetokend.ftw.safetensors import SourceTensor
from freetokend.ftw.schemes.gguf_blocks import ggml_format, read_blocks

_PLAIN: Final = ("F32", "F16", "BF16")
_BLOCKS: Final = MappingProxyType(
    {kind.name: (kind.block_elements, kind.block_bytes) for kind in GGML_TYPES.values()}
)
# The architecture that a file must have for a `model_type` of config.json.
_ARCHITECTURES: Final = MappingProxyType({"mixtral": "llama", "qwen3_moe": "qwen3moe"})
# Metadata (behind "<architecture>.") that must agree with a field of config.json.
_FACTS: Final = (
    ("block_count", "num_hidden_layers"),
    ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("expert_used_count", "num_experts_per_tok"),
)
_MODEL_NAMES: Final = MappingProxyType(
    {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
)
_LAYER_NAMES: Final = MappingProxyType(
    {
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
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
_EXPERT_NAMES: Final = MappingProxyType(
    {
        "gate_proj": "ffn_gate_exps",
        "up_proj": "ffn_up_exps",
        "down_proj": "ffn_down_exps",
        "w1": "ffn_gate_exps",
        "w3": "ffn_up_exps",
        "w2": "ffn_down_exps",
    }
)
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_PAIRED: Final = ("attn_q", "attn_k")
# Factors of rotary scaling, which follow from config.json.
_IGNORABLE: Final = re.compile(r"rope_freqs\.weight|blk\.\d+\.rope_freqs\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSource:
    """A `MatrixSource` over rows of a GGUF tensor; head_rows: rows of a reordered head, or 0."""

    name: str
    format: WeightFormat
    rows_count: int
    columns_count: int
    checkpoint: Checkpoint
    tensor: SourceTensor
    head_rows: int = 0

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`."""
        wanted = np.arange(first_row, first_row + count)
        if self.head_rows:
            half = self.head_rows // 2
            head, row = np.divmod(wanted, self.head_rows)
            wanted = head * self.head_rows + row % half * 2 + row // half
        first, last = int(wanted.min()), int(wanted.max())
        elements, length = _BLOCKS[self.tensor.dtype]
        row_bytes = self.columns_count // elements * length
        raw = self.checkpoint.read(self.tensor, first * row_bytes, (last - first + 1) * row_bytes)
        chosen = raw.reshape(-1, row_bytes)
        if self.head_rows:
            chosen = chosen[wanted - first]
        return read_blocks(self.tensor.dtype, chosen, self.columns_count)


class GgufScheme:
    """See `Scheme`. ModelDataError when metadata and config.json contradict each other."""

    name: str = "gguf"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.consumed: set[str] = set()
        values = checkpoint.gguf_values or {}
        architecture = values.get("general.architecture")
        _check_facts(checkpoint.config, values)
        self._is_paired = architecture == "llama"
        fields = ConfigFields(checkpoint.config, "config.json")
        heads = fields.integer("num_attention_heads")
        self._heads = {"attn_q": heads, "attn_k": fields.integer("num_key_value_heads", heads)}

    def has(self, name: str) -> bool:
        """See `Scheme`."""
        return self._find(name) is not None

    def tensor(self, name: str) -> SourceTensor | None:
        """See `Scheme`: F32, F16 and BF16 tensors."""
        return self._find(name)

    def matrix(self, name: str, rows: int, columns: int) -> MatrixSource | None:
        """See `Scheme`."""
        tensor = self._find(name)
        if tensor is None:
            return None
        head_rows = self._head_rows(name, rows)
        if tensor.dtype in _PLAIN and not head_rows:
            return None
        if tensor.shape != (rows, columns):
            raise ModelDataError(
                f"{tensor.file}: tensor {tensor.name} has the shape {list(tensor.shape)}; "
                f"config.json says {[rows, columns]}."
            )
        self.consumed.add(tensor.name)
        return GgufSource(
            name=tensor.name,
            format=ggml_format(tensor.dtype),
            rows_count=rows,
            columns_count=columns,
            checkpoint=self._checkpoint,
            tensor=tensor,
            head_rows=head_rows,
        )

    def ignorable(self, name: str) -> bool:
        """See `Scheme`."""
        return _IGNORABLE.fullmatch(name) is not None

    def _find(self, name: str) -> SourceTensor | None:
        tensors = self._checkpoint.tensors
        whole = _MODEL_NAMES.get(name)
        if whole is not None:
            return tensors.get(whole)
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        layer, module, part = match.groups()
        ours = _LAYER_NAMES.get(module)
        if ours is not None:
            return tensors.get(f"blk.{layer}.{ours}.{part}")
        inner = _EXPERT.fullmatch(module)
        if inner is None or part != "weight" or inner[2] not in _EXPERT_NAMES:
            return None
        stacked = tensors.get(f"blk.{layer}.{_EXPERT_NAMES[inner[2]]}.weight")
        return None if stacked is None else self._expert(stacked, int(inner[1]))

    def _expert(self, stacked: SourceTensor, expert: int) -> SourceTensor:
        if len(stacked.shape) != 3 or expert >= stacked.shape[0]:
            raise ModelDataError(
                f"{stacked.file}: tensor {stacked.name} has the shape {list(stacked.shape)}, and "
                f"config.json has an expert {expert} in it."
            )
        length_bytes = stacked.length_bytes // stacked.shape[0]
        return replace(
            stacked,
            shape=stacked.shape[1:],
            offset_bytes=stacked.offset_bytes + expert * length_bytes,
            length_bytes=length_bytes,
        )

    def _head_rows(self, name: str, rows: int) -> int:
        match = _LAYER.fullmatch(name)
        ours = _LAYER_NAMES.get(match[2]) if match else None
        if not self._is_paired or ours not in _PAIRED:
            return 0
        return rows // self._heads[ours]


def _check_facts(config: Mapping[str, object], values: Mapping[str, object]) -> None:
    found = values.get("general.architecture")
    kind = config.get("model_type")
    wanted = _ARCHITECTURES.get(str(kind))
    if wanted is None or found != wanted:
        raise ModelDataError(
            f"the GGUF model is of the architecture {found!r:.80} and config.json of the type "
            f"{kind!r:.80}; "
            + (
                f"it should be {wanted!r}."
                if wanted
                else f"GGUF models are read for {', '.join(_ARCHITECTURES)}."
            ),
            reason=Reason.MODEL_UNSUPPORTED,
        )
    experts = "num_local_experts" if config.get("num_local_experts") else "num_experts"
    for key, field in (*_FACTS, ("expert_count", experts)):
        said, asked = values.get(f"{found}.{key}"), config.get(field)
        if said is not None and asked is not None and said != asked:
            raise ModelDataError(
                f"the GGUF model says {found}.{key} = {said!r:.80}, and config.json says {field} = "
                f"{asked!r:.80}. The two do not belong together."
            )
