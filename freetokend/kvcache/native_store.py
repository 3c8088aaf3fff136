"""Attention over bf16 pages by the native executor."""

from __future__ import annotations

import torch

from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.batch import BatchView, KvBatch
from freetokend.native.executor import Executor
from freetokend.native.program import KvPages
from freetokend.tensor.memory import address_of


class NativeKvStore:
    """Pages in a KvArena, kernels of an Executor."""

    def __init__(self, executor: Executor, arena: KvArena) -> None:
        self.executor = executor
        self.arena = arena
        self.pages = KvPages(
            [
                (address_of(one.keys, torch.bfloat16), address_of(one.values, torch.bfloat16))
                for one in arena.layers
            ],
            pages_count=arena.capacity_count,
            kv_heads_count=arena.shape.kv_heads_count,
            page_tokens=arena.shape.page_tokens,
            head_size=arena.shape.head_size,
        )

    @property
    def page_tokens(self) -> int:
        return self.arena.shape.page_tokens

    def view(self, batch: KvBatch) -> NativeKvView:
        return NativeKvView(self, batch)


class NativeKvView(BatchView):
    """One step's KvView over a NativeKvStore; results do not depend on the batch.

    A native program reads the pages and the batch itself and calls no `attend`.
    """

    def __init__(self, store: NativeKvStore, batch: KvBatch) -> None:
        self._store = store
        super().__init__(batch)  # which keeps the tensors behind the addresses alive

    @property
    def pages(self) -> KvPages:
        return self._store.pages

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """q fp32 [T, Nq, D], k, v fp32 [T, Nkv, D], contiguous -> bf16 [T, Nq * D]."""
        store, batch = self._store, self._batch
        shape, pages = store.arena.shape, store.arena.layers[layer_index]
        tokens, q_heads, head_size = q.shape
        k_pages = address_of(pages.keys, torch.bfloat16)
        v_pages = address_of(pages.values, torch.bfloat16)
        page_table = address_of(batch.page_table, torch.int32)
        sequence_index = address_of(batch.sequence_index, torch.int32)
        positions = address_of(batch.positions, torch.int32)
        sequences_count, max_pages = batch.page_table.shape
        store.executor.store_kv(
            address_of(k, torch.float32),
            address_of(v, torch.float32),
            k_pages,
            v_pages,
            page_table,
            sequence_index,
            positions,
            tokens=tokens,
            kv_heads=shape.kv_heads_count,
            head_size=head_size,
            page_tokens=shape.page_tokens,
            max_pages=max_pages,
            sequences_count=sequences_count,
            pages_count=store.arena.capacity_count,
        )
        out = torch.empty((tokens, q_heads * head_size), dtype=torch.bfloat16)
        store.executor.paged_attention(
            address_of(q, torch.float32),
            k_pages,
            v_pages,
            page_table,
            sequence_index,
            positions,
            out.data_ptr(),
            tokens=tokens,
            q_heads=q_heads,
            kv_heads=shape.kv_heads_count,
            head_size=head_size,
            page_tokens=shape.page_tokens,
            max_pages=max_pages,
            sequences_count=sequences_count,
            pages_count=store.arena.capacity_count,
            scale=scale,
        )
        return out
