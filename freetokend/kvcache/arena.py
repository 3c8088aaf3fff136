"""Memory of the KV pages: address space reserved once, committed page by page as it is written."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final

import torch

from freetokend.core.errors import Reason, ResourceError
from freetokend.policy.kv_sizing import KvShape

_BF16_BYTES: Final = 2
_MAP_NORESERVE: Final = 0x4000  # of Linux; the mmap module has no name for it before 3.13


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """Keys and values of one layer, bf16 [pages, Nkv, page_tokens, D] each."""

    keys: torch.Tensor
    values: torch.Tensor


class KvArena:
    """bf16 pages of every layer in one private anonymous mapping.

    The kernel gives memory to a part of it at its first write, so a service that was sized for
    long contexts costs what its requests really use. Raises ResourceError when not even the
    address space can be had.
    """

    def __init__(self, shape: KvShape, pages_count: int) -> None:
        per_layer = (
            pages_count * shape.kv_heads_count * shape.page_tokens * shape.head_size * _BF16_BYTES
        )
        stride = -(-per_layer // mmap.PAGESIZE) * mmap.PAGESIZE
        self._length_bytes = 2 * shape.layers_count * stride
        try:
            self._mapping = mmap.mmap(
                -1,
                self._length_bytes,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            )
        except OSError as error:
            raise ResourceError(
                f"{self._length_bytes} bytes of address space for keys and values were refused: "
                f"{error.strerror}. Lower engine.kv_bytes.",
                reason=Reason.HOST_MEMORY,
            ) from error
        whole = torch.frombuffer(self._mapping, dtype=torch.bfloat16)
        size = (pages_count, shape.kv_heads_count, shape.page_tokens, shape.head_size)
        step = stride // _BF16_BYTES
        count = per_layer // _BF16_BYTES
        parts = [
            whole[index * step : index * step + count].view(size)
            for index in range(2 * shape.layers_count)
        ]
        self.layers: tuple[LayerPages, ...] = tuple(
            LayerPages(keys=parts[2 * index], values=parts[2 * index + 1])
            for index in range(shape.layers_count)
        )
        self.shape = shape
        self.pages_count = pages_count

    @property
    def length_bytes(self) -> int:
        """Reserved bytes; what is committed is the kernel's knowledge."""
        return self._length_bytes
