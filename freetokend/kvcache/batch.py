"""Where the tokens of one step belong: sequences, positions, pages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from freetokend.core.errors import InternalError
from freetokend.tensor.protocols import KvView


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """Consecutive tokens of one sequence in a step; `pages` is its page table, int32."""

    pages: array[int]
    first_position: int
    tokens_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBatch:
    """Spans of one step as tensors.

    page_table: int32 [S, P], rows padded with 0 (never read: the positions end before);
    sequence_index: int32 [T], row of the page table; positions: int32 [T].
    """

    page_table: torch.Tensor
    sequence_index: torch.Tensor
    positions: torch.Tensor


class BatchView:
    """What every KvView of a batch shows of it."""

    def __init__(self, batch: KvBatch) -> None:
        self._batch: Final = batch

    @property
    def page_table(self) -> torch.Tensor:
        return self._batch.page_table

    @property
    def sequence_index(self) -> torch.Tensor:
        return self._batch.sequence_index

    @property
    def positions(self) -> torch.Tensor:
        return self._batch.positions


class KvStore(Protocol):
    """The memory of all keys and values; a view of it serves one step."""

    @property
    def page_tokens(self) -> int: ...

    def view(self, batch: KvBatch) -> KvView: ...


def kv_batch(spans: Sequence[SequenceSpan], page_tokens: int) -> KvBatch:
    """Raises InternalError when a span reaches beyond its pages: it would write elsewhere."""
    width = max(len(span.pages) for span in spans)
    page_table = np.zeros((len(spans), width), dtype=np.int32)
    for row, span in enumerate(spans):
        end = span.first_position + span.tokens_count
        if end > len(span.pages) * page_tokens:
            raise InternalError(
                f"a span ends at position {end}, its {len(span.pages)} pages hold "
                f"{len(span.pages) * page_tokens}"
            )
        page_table[row, : len(span.pages)] = span.pages
    counts = [span.tokens_count for span in spans]
    positions = [
        np.arange(span.first_position, span.first_position + span.tokens_count, dtype=np.int32)
        for span in spans
    ]
    return KvBatch(
        page_table=torch.from_numpy(page_table),
        sequence_index=torch.from_numpy(np.repeat(np.arange(len(spans), dtype=np.int32), counts)),
        positions=torch.from_numpy(np.concatenate(positions)),
    )
