"""Attention over pages on a GPU by FlashInfer, where that is installed.

FlashInfer plans a step on the host, from lengths that must be known there. So it serves the steps
that the host makes: prompts, and what comes with them. Steps that are captured in graphs have their
lengths on the device, and keep to the Triton kernels. Keys and values are stored by those in both
cases. Queries and the softmax's weights are rounded to bf16, so that results differ from those of
the Triton kernels by about 2^-9 of a row's norm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from freetokend.core.errors import ConfigError
from freetokend.kvcache.batch import BatchView, KvBatch, KvStore
from freetokend.kvcache.gpu.attention_ops import store_pages
from freetokend.kvcache.gpu.triton_store import TritonKvStore, batch_on, where_of
from freetokend.tensor.protocols import KvView

# What its documentation recommends.
_WORKSPACE_BYTES: Final = 128 << 20
# [pages, heads, tokens of a page, columns], in its words.
_LAYOUT: Final = "HND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """A step as FlashInfer has it, int32 on the host: where each sequence's queries begin [S + 1],
    where its pages begin [S + 1] in a list of all, and how full its last page is [S]."""

    query_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    last_page_tokens: torch.Tensor

    @classmethod
    def of(cls, batch: KvBatch, page_tokens: int) -> Spans:
        """Of a batch on the host; each sequence's tokens follow one another to its end."""
        sequences_count, width = batch.page_table.shape
        counts = torch.bincount(batch.sequence_index, minlength=sequences_count)
        ends = counts.cumsum(0)
        lengths = batch.positions[ends - 1] + 1
        pages_counts = (lengths + page_tokens - 1) // page_tokens
        held = torch.arange(width) < pages_counts.unsqueeze(1)
        return cls(
            query_starts=_starts(counts),
            page_starts=_starts(pages_counts),
            pages=batch.page_table[held],
            last_page_tokens=(lengths - 1) % page_tokens + 1,
        )


class FlashInferKvStore:
    """The pages of a TritonKvStore, attended by FlashInfer where the host knows the batch."""

    def __init__(self, store: TritonKvStore, *, q_heads_count: int, package: Any = None) -> None:
        """package: FlashInfer's module, imported when None. What it raises is not caught here."""
        self.triton: Final = store
        self.q_heads_count: Final = q_heads_count
        found = package or importlib.import_module("flashinfer")
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=store.pages.device)
        self.attention: Final = found.BatchPrefillWithPagedKVCacheWrapper(
            workspace, kv_layout=_LAYOUT
        )
        # The view and the scale that it is planned for.
        self.planned: tuple[KvView, float] | None = None

    @property
    def page_tokens(self) -> int:
        return self.triton.page_tokens

    def view(self, batch: KvBatch) -> KvView:
        """Of a batch on the host; of one on a GPU the Triton kernels' view."""
        if batch.positions.is_cuda:
            return self.triton.view(batch)
        return FlashInferKvView(self, batch)


class FlashInferKvView(BatchView):
    """One step's KvView over a FlashInferKvStore; it shows the batch it was made for.

    Views of a store may take turns: each plans anew what another has planned in between.
    """

    def __init__(self, store: FlashInferKvStore, batch: KvBatch) -> None:
        super().__init__(batch)
        self._store = store
        self._on_device: KvBatch | None = None

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As of `KvView`; bf16 [T, Nq * D]."""
        pages, layer = self._store.triton.pages, self._store.triton.pages.layers[layer_index]
        if self._on_device is None:
            self._on_device = batch_on(self._batch, pages.device)
        store_pages(k, v, layer.keys, layer.values, where_of(self._on_device))
        if self._store.planned != (self, scale):
            self._plan(scale)
        out: torch.Tensor = self._store.attention.run(
            q.to(torch.bfloat16), (layer.keys, layer.values)
        )
        return out.reshape(q.shape[0], -1)

    def _plan(self, scale: float) -> None:
        shape = self._store.triton.pages.shape
        spans = Spans.of(self._batch, shape.page_tokens)
        self._store.attention.plan(
            spans.query_starts,
            spans.page_starts,
            spans.pages,
            spans.last_page_tokens,
            self._store.q_heads_count,
            shape.kv_heads_count,
            shape.head_size,
            shape.page_tokens,
            causal=True,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            # A context in one piece: its length is all that the order of its sums depends on.
            disable_split_kv=True,
        )
        self._store.planned = (self, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """The store that serves, "flashinfer" or "triton", and why."""

    store: KvStore
    name: str
    reason: str


def choose_attention(
    asked: str,
    store: TritonKvStore,
    *,
    q_heads_count: int,
    make: Callable[..., FlashInferKvStore] = FlashInferKvStore,
) -> AttentionChoice:
    """asked: "auto", "flashinfer" or "triton". ConfigError for FlashInfer where it does not work,
    and for other names.

    "auto" is FlashInfer if a first step works, which also has it load or build what it needs before
    a request does. That step is written into page 0.
    """
    if asked == "triton":
        return AttentionChoice(store=store, name="triton", reason="engine.attention asks for it")
    if asked not in ("auto", "flashinfer"):
        raise ConfigError(
            f'engine.attention = "{asked}" is unknown; known are auto, flashinfer and triton.',
            param="engine.attention",
        )
    try:
        found = make(store, q_heads_count=q_heads_count)
        _prove(found)
    except Exception as error:  # whatever a package of others raises must not keep Triton off
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if asked == "flashinfer":
            raise ConfigError(
                f'engine.attention = "flashinfer" cannot be had ({problem}). Install freetokend '
                'with its extra [gpu], or set it to "auto".',
                param="engine.attention",
            ) from error
        return AttentionChoice(
            store=store, name="triton", reason=f"FlashInfer cannot be used here ({problem})"
        )
    reason = "it is installed and works" if asked == "auto" else "engine.attention asks for it"
    return AttentionChoice(store=found, name="flashinfer", reason=reason)


def _prove(store: FlashInferKvStore) -> None:
    """A step of one token; what is wrong with it is raised."""
    pages = store.triton.pages
    shape, device = pages.shape, pages.device
    one = torch.zeros(1, dtype=torch.int32)
    batch = KvBatch(page_table=one.view(1, 1), sequence_index=one, positions=one)
    q = torch.ones(1, store.q_heads_count, shape.head_size, device=device)
    k = torch.ones(1, shape.kv_heads_count, shape.head_size, device=device)
    out = store.view(batch).attend(0, q, k, k, shape.head_size**-0.5)
    if not bool((out == 1).all()):
        raise RuntimeError("FlashInfer's result of one token is not that token's value")


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]"""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
