"""A small Qwen3-MoE-like model with random weights made on the spot, on any device.

For tests of steps on a GPU, real or pretended: experts, keys and values that need no kernels and
never wait for the device, and a mode that refuses whatever a graph could not capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from freetokend.kvcache.batch import KvBatch
from freetokend.models.registry import build_program
from freetokend.tensor.program import (
    AddRmsNorm,
    Embed,
    HeadNorm,
    Linear,
    Matrix,
    RouterProduct,
    StepProgram,
    Vector,
)

# What gives the host a number that only the device knows.
_WAITING: Final = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallShape:
    """Sizes of the model; every layer has routed experts."""

    layers: int = 2
    hidden: int = 64
    inter: int = 32
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    vocab: int = 96
    page_tokens: int = 4

    def program(self) -> StepProgram:
        """As the engine builds it from a config.json."""
        return build_program(
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "intermediate_size": 4 * self.hidden,
                "moe_intermediate_size": self.inter,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_size,
                "hidden_act": "silu",
                "max_position_embeddings": 4096,
                "tie_word_embeddings": False,
                "bos_token_id": None,
                "eos_token_id": None,
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
                "decoder_sparse_step": 1,
                "attention_bias": False,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e4,
                "use_sliding_window": False,
            }
        )


def random_weights(
    program: StepProgram, *, seed: int = 0, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Every tensor but the experts', bf16, scaled so that all parts of the model matter."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def matrix(one: Matrix, gain: float) -> None:
        if not one.shared:
            values = torch.randn(one.out_features, one.in_features, generator=random)
            tensors[one.name] = (values * gain * one.in_features**-0.5).bfloat16().to(device)

    def vector(one: Vector) -> None:
        values = 1.0 + 0.1 * torch.randn(one.size, generator=random)
        tensors[one.name] = values.bfloat16().to(device)

    for op in program.ops:
        match op:
            case Embed():
                matrix(op.table, op.table.in_features**0.5)
            case Linear():
                for product in op.products:
                    matrix(product.weight, 1.3)
            case RouterProduct():
                matrix(op.weight, 2.0)
            case AddRmsNorm() | HeadNorm():
                vector(op.weight)
            case _:
                pass
    return tensors


class DenseExperts:
    """ExpertDispatch over plain bf16 matrices: gathers those of every pair."""

    def __init__(
        self, shape: SmallShape, *, seed: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        random = torch.Generator().manual_seed(seed)

        def matrices(rows: int, columns: int) -> torch.Tensor:
            size = (shape.layers, shape.experts, rows, columns)
            values = torch.randn(size, generator=random) * (1.5 * columns**-0.5)
            placed: torch.Tensor = values.bfloat16().to(device)
            return placed

        self.gate = matrices(shape.inter, shape.hidden)
        self.up = matrices(shape.inter, shape.hidden)
        self.down = matrices(shape.hidden, shape.inter)

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """As of `ExpertDispatch`."""
        gate, up, down = (
            one.select(0, moe_layer_index)
            .index_select(0, expert_ids.flatten().long())
            .view(*expert_ids.shape, *one.shape[2:])
            .float()
            for one in (self.gate, self.up, self.down)
        )
        row = x.float().view(x.shape[0], 1, -1, 1)
        inner = torch.nn.functional.silu(gate @ row) * (up @ row)
        out: torch.Tensor = (down @ inner.bfloat16().float()).squeeze(-1) * weights.unsqueeze(-1)
        return out.sum(dim=1)


class DensePages:
    """A `KvStore` whose attention looks at every page of a sequence's table and masks."""

    def __init__(
        self, shape: SmallShape, pages_count: int, *, device: torch.device | str = "cpu"
    ) -> None:
        size = (shape.layers, pages_count, shape.kv_heads, shape.page_tokens, shape.head_size)
        self.keys = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.page_tokens: Final = shape.page_tokens

    def view(self, batch: KvBatch) -> DensePagesView:
        """Of a batch on the same device."""
        return DensePagesView(self, batch)


class DensePagesView:
    """One step's KvView over DensePages."""

    def __init__(self, store: DensePages, batch: KvBatch) -> None:
        self._store = store
        self.page_table = batch.page_table
        self.sequence_index = batch.sequence_index
        self.positions = batch.positions

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As of `KvView`."""
        page_tokens = self._store.page_tokens
        keys, values = (
            self._store.keys.select(0, layer_index),
            self._store.values.select(0, layer_index),
        )
        positions = self.positions.long()
        tables = self.page_table.long().index_select(0, self.sequence_index.long())
        pages = torch.gather(tables, 1, (positions // page_tokens).unsqueeze(1)).squeeze(1)
        for kept, new in ((keys, k), (values, v)):
            places = (pages, positions % page_tokens)
            kept.transpose(1, 2).index_put_(places, new.bfloat16())
        tokens, heads, size = q.shape
        # [T, P, Nkv, page, D] -> [T, Nkv, P * page, D]
        near_k, near_v = (
            one.index_select(0, tables.flatten())
            .view(*tables.shape, *one.shape[1:])
            .transpose(1, 2)
            .flatten(2, 3)
            .float()
            for one in (keys, values)
        )
        grouped = q.view(tokens, near_k.shape[1], -1, size)
        scores = torch.einsum("tngd,tnld->tngl", grouped, near_k) * scale
        columns = torch.arange(near_k.shape[2], device=q.device)
        hidden = (columns > positions.unsqueeze(1)).view(tokens, 1, 1, -1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        out = torch.einsum("tngl,tnld->tngd", weights, near_v)
        return out.reshape(tokens, heads * size).bfloat16()


class WaitsForDeviceError(AssertionError):
    """What a graph cannot capture was asked for."""


class OnlyOn(TorchDispatchMode):
    """Every operation inside takes and makes tensors of one device, and none waits for it."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.calls_count = 0
        self.names: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func.name().split(".")[0]
        self.calls_count += 1
        self.names.add(name)
        if name in _WAITING:
            raise WaitsForDeviceError(f"{name} waits for the device")
        self._check(name, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._check(name, result)
        return result

    def _check(self, name: str, values: object) -> None:
        for one in tree_leaves(values):
            if isinstance(one, torch.Tensor) and one.device.type != self._device_type:
                raise WaitsForDeviceError(f"{name} has a tensor {list(one.shape)} on {one.device}")


def decode_batch(
    lengths: Sequence[int], *, page_tokens: int, tokens: Callable[[int], int] = lambda _: 1
) -> KvBatch:
    """Sequence s has `lengths[s]` tokens, the last `tokens(s)` of which are this step's.

    Pages are handed out one after another, those of the first sequence first.
    """
    pages = [-(-length // page_tokens) for length in lengths]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    first = 0
    for row, count in enumerate(pages):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    index: list[int] = []
    positions: list[int] = []
    for row, length in enumerate(lengths):
        count = tokens(row)
        index += [row] * count
        positions += range(length - count, length)
    return KvBatch(
        page_table=table,
        sequence_index=torch.tensor(index, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
    )


def on_device(batch: KvBatch, device: torch.device | str) -> KvBatch:
    """Copies of its tensors there."""
    return KvBatch(
        page_table=batch.page_table.to(device),
        sequence_index=batch.sequence_index.to(device),
        positions=batch.positions.to(device),
    )
