"""Random queries, keys and values of whole sequences, for stores of any device, and float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freetokend.kvcache.batch import KvBatch, KvStore
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.policy.kv_sizing import KvShape

SCALE = 0.2
LAYER = 1
CONTEXT = 96
SEQUENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, key heads, and columns of each."""

    queries: int
    keys: int
    size: int

    def shape(self, page_tokens: int) -> KvShape:
        return KvShape(
            layers_count=2,
            kv_heads_count=self.keys,
            head_size=self.size,
            element_bytes=2,
            page_tokens=page_tokens,
        )


class Contexts:
    """Whole sequences made at once, fed to stores in whatever steps."""

    def __init__(self, heads: Heads, lengths: Sequence[int], seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def drawn(count: int, of: int) -> torch.Tensor:
            return torch.randn(count, of, heads.size, generator=random)

        self.heads = heads
        self.context = max(CONTEXT, *lengths)
        self.q = [drawn(length, heads.queries) for length in lengths]
        self.k = [drawn(length, heads.keys) for length in lengths]
        self.v = [drawn(length, heads.keys) for length in lengths]

    def pages(self, page_tokens: int, device: torch.device) -> DevicePages:
        """Room for every sequence."""
        count = SEQUENCES * -(-self.context // page_tokens)
        return DevicePages.take(self.heads.shape(page_tokens), count, device)

    def feed(
        self,
        store: KvStore,
        spans: Sequence[tuple[int, int, int]],
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """One step of (sequence, first position, end); every fourth page is a sequence's.

        device: where the tensors of the step are; its batch is on the host.
        """
        per_page = store.page_tokens
        width = max(-(-end // per_page) for _, _, end in spans)
        table = torch.zeros((len(spans), width), dtype=torch.int32)
        for row, (sequence, _, end) in enumerate(spans):
            count = -(-end // per_page)
            table[row, :count] = torch.arange(count, dtype=torch.int32) * SEQUENCES + sequence
        index = [row for row, (_, first, end) in enumerate(spans) for _ in range(first, end)]
        positions = [at for _, first, end in spans for at in range(first, end)]
        batch = KvBatch(
            page_table=table,
            sequence_index=torch.tensor(index, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
        )
        q, k, v = (
            torch.cat([one[sequence][first:end] for sequence, first, end in spans]).to(device)
            for one in (self.q, self.k, self.v)
        )
        return store.view(batch).attend(LAYER, q, k, v, SCALE)

    def exact(self, sequence: int, first: int, end: int) -> torch.Tensor:
        """float64 over bf16 keys and values."""
        heads = self.heads
        k, v = (
            one[sequence][:end]
            .bfloat16()
            .double()
            .repeat_interleave(heads.queries // heads.keys, dim=1)
            for one in (self.k, self.v)
        )
        q = self.q[sequence][first:end].double()
        scores = torch.einsum("thd,shd->hts", q, k) * SCALE
        seen = torch.arange(end)[None, :] <= torch.arange(first, end)[:, None]
        weights = scores.masked_fill(~seen[None], float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, v).flatten(1)


def units_off(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The worst number's distance in units of the last place of bf16; half of one is the least."""
    unit = exact.abs() * 2.0**-7 + exact.abs().max() * 2.0**-14
    return float(((got.double() - exact).abs() / unit).max())


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The worst row's ||a - b|| / ||b||."""
    return float(((got.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())
