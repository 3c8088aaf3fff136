"""Plain torch implementations of the engine's contracts, for checking models in any dtype.

They are written for clarity and share no code with what serves: experts as one loop over tokens'
choices, keys and values as growing tensors per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """ExpertDispatch over plain gate, up and down matrices.

    `gate_up` and `down`: one tensor per MoE layer, [E, 2I, H] (gate rows first) and [E, H, I].
    Activations are in `dtype`, sums in fp32 (fp64 in a fp64 run).
    """

    gate_up: Sequence[torch.Tensor]
    down: Sequence[torch.Tensor]
    dtype: torch.dtype

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        accumulator = torch.float64 if self.dtype is torch.float64 else torch.float32
        outputs = torch.zeros(*expert_ids.shape, x.shape[1], dtype=accumulator)
        for expert in sorted(set(expert_ids.flatten().tolist())):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            gate_up = self.gate_up[moe_layer_index][expert].to(accumulator)
            down = self.down[moe_layer_index][expert].to(accumulator)
            gate, up = (x[token].to(accumulator) @ gate_up.T).chunk(2, dim=-1)
            inner = (torch.nn.functional.silu(gate) * up).to(self.dtype).to(accumulator)
            outputs[token, choice] = inner @ down.T
        return (outputs * weights.to(accumulator)[..., None]).sum(dim=1)


class ReferenceKv:
    """Keys and values of several sequences; `view` is the KvView of one step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def view(self, sequences: Sequence[int]) -> ReferenceKvView:
        """`sequences[t]`: the sequence of the token t; a sequence's tokens are in order."""
        return ReferenceKvView(self._kept, torch.tensor(sequences), self._dtype)


class ReferenceKvView:
    """Softmax attention of each token over its sequence up to itself."""

    def __init__(
        self,
        kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]],
        sequences: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._kept = kept
        self._sequences = sequences
        self._dtype = dtype

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        tokens, q_heads, head_size = q.shape
        out = torch.empty(tokens, q_heads * head_size, dtype=self._dtype)
        for sequence in sorted(set(self._sequences.tolist())):
            mine = (self._sequences == sequence).nonzero()[:, 0]
            keys, values = self._append(layer_index, sequence, k[mine], v[mine])
            heads = q[mine].view(len(mine), k.shape[1], -1, head_size)
            scores = torch.einsum("tngd,snd->ngts", heads, keys.to(q.dtype)) * scale
            start = keys.shape[0] - len(mine)
            later = torch.ones(len(mine), keys.shape[0], dtype=torch.bool).triu(start + 1)
            scores = scores.masked_fill(later, float("-inf"))
            mixed = torch.einsum("ngts,snd->tngd", scores.softmax(-1), values.to(q.dtype))
            out[mine] = mixed.reshape(len(mine), -1).to(self._dtype)
        return out

    def _append(
        self, layer_index: int, sequence: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = k.to(self._dtype), v.to(self._dtype)
        before = self._kept.get((layer_index, sequence))
        if before is not None:
            k, v = torch.cat((before[0], k)), torch.cat((before[1], v))
        self._kept[layer_index, sequence] = (k, v)
        return k, v


def split_experts(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Checkpoint tensors -> (non-expert tensors, gate_up per MoE layer, down per MoE layer)."""
    plain: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        module, found, rest = name.partition(".experts.")
        if not found:
            plain[name] = tensor
            continue
        expert, matrix, _ = rest.split(".")
        parts.setdefault(module, {}).setdefault(int(expert), {})[matrix] = tensor
    gate_up: list[torch.Tensor] = []
    down: list[torch.Tensor] = []
    for module in sorted(parts, key=lambda name: int(name.split(".")[2])):
        experts = [parts[module][index] for index in range(len(parts[module]))]
        names = ("w1", "w3", "w2") if "w1" in experts[0] else ("gate_proj", "up_proj", "down_proj")
        gate_up.append(
            torch.stack([torch.cat((expert[names[0]], expert[names[1]])) for expert in experts])
        )
        down.append(torch.stack([expert[names[2]] for expert in experts]))
    return plain, gate_up, down
