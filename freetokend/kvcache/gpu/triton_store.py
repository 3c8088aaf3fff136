"""Attention over pages on a GPU by Triton kernels."""

from __future__ import annotations

from typing import Final

import torch

from freetokend.kvcache.batch import BatchView, KvBatch
from freetokend.kvcache.gpu.attention_ops import attend_in_parts, attend_in_tiles, store_pages
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.policy.kv_sizing import pages_for

# Positions of a part: few enough that a short context keeps a GPU busy.
_LEAST_PART_TOKENS: Final = 256
# What parts leave behind takes memory for as many tokens as a sequence may ever have.
_MOST_PARTS: Final = 128


class TritonKvStore:
    """Pages of a device, and the parts that contexts over them are cut into."""

    def __init__(
        self, pages: DevicePages, *, context_tokens: int, interpreted: bool = False
    ) -> None:
        """context_tokens: the most a sequence can have; it decides where parts end, for good.

        interpreted: under Triton's interpreter, on the device "cpu".
        """
        self.pages: Final = pages
        self.part_tokens: Final = part_tokens_of(context_tokens, pages.shape.page_tokens)
        self.interpreted: Final = interpreted

    @property
    def page_tokens(self) -> int:
        return self.pages.shape.page_tokens

    def view(self, batch: KvBatch) -> TritonKvView:
        """Of a batch anywhere; one on the device is read when it is attended, and may change."""
        return TritonKvView(self, batch)


class TritonKvView(BatchView):
    """One step's KvView over a TritonKvStore; it shows the batch it was made for.

    A token's result depends on its query and its own context only: not on the other sequences,
    nor on how many tokens of its own come in the step. Nothing waits for the device.
    """

    def __init__(self, store: TritonKvStore, batch: KvBatch) -> None:
        super().__init__(batch)
        self._store = store
        self._on_device: KvBatch | None = None

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As of `KvView`; bf16 [T, Nq * D]. InternalError for tensors that do not fit the pages."""
        store, batch = self._store, self._moved()
        layer = store.pages.layers[layer_index]
        where = where_of(batch)
        store_pages(k, v, layer.keys, layer.values, where)
        single = batch.page_table.shape[0] == batch.positions.shape[0]
        attend = attend_in_parts if single else attend_in_tiles
        out: torch.Tensor = attend(
            q, layer.keys, layer.values, where, scale, store.part_tokens, store.interpreted
        )
        return out

    def _moved(self) -> KvBatch:
        if self._on_device is None:
            self._on_device = batch_on(self._batch, self._store.pages.device)
        return self._on_device


def batch_on(batch: KvBatch, device: torch.device) -> KvBatch:
    """The batch there; the same tensors where they are there already."""
    return KvBatch(
        page_table=batch.page_table.to(device),
        sequence_index=batch.sequence_index.to(device),
        positions=batch.positions.to(device),
    )


def where_of(batch: KvBatch) -> list[torch.Tensor]:
    """The batch as the operations take it."""
    return [batch.page_table, batch.sequence_index, batch.positions]


def part_tokens_of(context_tokens: int, page_tokens: int) -> int:
    """Positions of a part, by the longest context: whole pages, the least number of them times a
    power of two."""
    least_pages = pages_for(_LEAST_PART_TOKENS, page_tokens)
    part_pages = least_pages
    while part_pages * page_tokens * _MOST_PARTS < context_tokens:
        part_pages *= 2
    return part_pages * page_tokens
