"""Attention over pages in plain torch, in any dtype: for reference runs and other devices."""

from __future__ import annotations

import torch

from freetokend.kvcache.batch import KvBatch
from freetokend.policy.kv_sizing import KvShape


class TorchKvStore:
    """Pages as ordinary tensors of `kv_dtype`; sums in `accumulator_dtype`."""

    def __init__(
        self,
        shape: KvShape,
        pages_count: int,
        *,
        kv_dtype: torch.dtype,
        activation_dtype: torch.dtype,
        accumulator_dtype: torch.dtype = torch.float32,
    ) -> None:
        size = (
            shape.layers_count,
            pages_count,
            shape.kv_heads_count,
            shape.page_tokens,
            shape.head_size,
        )
        self.keys = torch.zeros(size, dtype=kv_dtype)
        self.values = torch.zeros(size, dtype=kv_dtype)
        self.activation_dtype = activation_dtype
        self.accumulator_dtype = accumulator_dtype
        self._page_tokens = shape.page_tokens

    @property
    def page_tokens(self) -> int:
        return self._page_tokens

    def view(self, batch: KvBatch) -> TorchKvView:
        return TorchKvView(self, batch)


class TorchKvView:
    """One step's KvView over a TorchKvStore."""

    def __init__(self, store: TorchKvStore, batch: KvBatch) -> None:
        self._store = store
        positions = batch.positions.long()
        rows = batch.sequence_index.long()
        self._slots = positions % store.page_tokens
        self._pages = batch.page_table.long()[rows, positions // store.page_tokens]
        self._positions = positions
        self._page_table = batch.page_table.long()
        self._rows = rows

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """As KvView.attend; each sequence by itself, dense and slow."""
        keys, values = self._store.keys[layer_index], self._store.values[layer_index]
        keys[self._pages, :, self._slots] = k.to(keys.dtype)
        values[self._pages, :, self._slots] = v.to(values.dtype)
        tokens, q_heads, head_size = q.shape
        out = torch.empty((tokens, q_heads, head_size), dtype=self._store.accumulator_dtype)
        for row in torch.unique(self._rows).tolist():
            chosen = (self._rows == row).nonzero().flatten()
            out[chosen] = self._sequence(
                row, q[chosen], self._positions[chosen], keys, values, scale
            )
        return out.view(tokens, q_heads * head_size).to(self._store.activation_dtype)

    def _sequence(
        self,
        row: int,
        q: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """q [t, Nq, D] of one sequence -> [t, Nq, D] in the accumulator dtype."""
        dtype = self._store.accumulator_dtype
        length = int(positions.max()) + 1
        pages = self._page_table[row, : -(-length // self._store.page_tokens)]
        # [pages, Nkv, page_tokens, D] -> [Nkv, length, D]
        k = keys[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(dtype)
        v = values[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(dtype)
        group = q.shape[1] // k.shape[0]
        k = k.repeat_interleave(group, dim=0)
        v = v.repeat_interleave(group, dim=0)
        scores = torch.einsum("thd,hld->htl", q.to(dtype), k) * scale
        hidden = torch.arange(length)[None, :] > positions[:, None]
        weights = torch.softmax(scores.masked_fill(hidden[None], float("-inf")), dim=-1)
        return torch.einsum("htl,hld->thd", weights, v)
