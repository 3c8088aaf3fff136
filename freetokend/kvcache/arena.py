"""Memory of the KV pages: address space reserved once, committed as pages come and go."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from freetokend.core.errors import InternalError, Reason, ResourceError
from freetokend.device.arena import ArenaError, rounded_up
from freetokend.device.host_arena import host_available_bytes
from freetokend.native.host import mapping_pages
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.memory import address_of

_BF16_BYTES: Final = 2
# Of Linux; the mmap module has no names for them before 3.13.
_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_WRITE: Final = 23
# Kernels before 5.14 do not know it: there memory comes with the first write.
_NOT_KNOWN: Final = (errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """Keys and values of one layer, bf16 [pages, Nkv, page_tokens, D] each."""

    keys: torch.Tensor
    values: torch.Tensor


class KvMemory(Protocol):
    """Memory of pages that can come and go at the end; addresses never change.

    Called when no step is under way.
    """

    @property
    def committed_bytes(self) -> int: ...

    def claimed_bytes(self) -> int:
        """As the kernel or the driver shows it."""
        ...

    def grow_to(self, pages_count: int) -> None:
        """Have memory for so many pages: all of it, or nothing has changed and `ArenaError` is
        raised. Fewer than there are change nothing."""
        ...

    def shrink_to(self, pages_count: int) -> None:
        """Give the memory behind so many pages back. ResourceError when it is not taken back."""
        ...


class KvArena:
    """bf16 pages of every layer in one private anonymous mapping, room for capacity_count of them.

    Unless `populated`, the kernel gives memory to a part at its first write, so that a service
    that was sized for long contexts costs what its requests really use. `populated` memory stands
    for a device's: all of it is there, or is missing when it is asked for and not in a step.
    """

    def __init__(
        self,
        shape: KvShape,
        pages_count: int,
        *,
        capacity_count: int | None = None,
        populated: bool = False,
        available_bytes: Callable[[], int] = host_available_bytes,
    ) -> None:
        """available_bytes: is asked just before memory is. ResourceError when there is no address
        space for the capacity (None: pages_count), or no memory."""
        capacity = self.capacity_count = pages_count if capacity_count is None else capacity_count
        self._page_bytes = shape.kv_heads_count * shape.page_tokens * shape.head_size * _BF16_BYTES
        per_layer = capacity * self._page_bytes
        self._stride_bytes = rounded_up(per_layer, mmap.PAGESIZE)
        self._parts_count = 2 * shape.layers_count
        self._length_bytes = self._parts_count * self._stride_bytes
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
        # Also keeps the kernel from joining it with a neighbour, whose pages smaps would count too.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        whole = torch.frombuffer(self._mapping, dtype=torch.bfloat16)
        size = (capacity, shape.kv_heads_count, shape.page_tokens, shape.head_size)
        step = self._stride_bytes // _BF16_BYTES
        count = per_layer // _BF16_BYTES
        parts = [
            whole[index * step : index * step + count].view(size)
            for index in range(self._parts_count)
        ]
        self.layers: tuple[LayerPages, ...] = tuple(
            LayerPages(keys=parts[2 * index], values=parts[2 * index + 1])
            for index in range(shape.layers_count)
        )
        self._address = address_of(whole, torch.bfloat16)
        self.shape = shape
        self._populated = populated
        self._available_bytes = available_bytes
        self._part_bytes = 0  # of each part, committed
        if populated:
            self.grow_to(pages_count)
        else:
            self._part_bytes = self._needed_bytes(pages_count)

    @property
    def length_bytes(self) -> int:
        """Reserved bytes."""
        return self._length_bytes

    @property
    def committed_bytes(self) -> int:
        """Of the pages there are; without `populated`, what is really there is less."""
        return self._parts_count * self._part_bytes

    def claimed_bytes(self) -> int:
        """Resident bytes of the mapping in /proc/self/smaps (milliseconds)."""
        return mapping_pages(self._address, self._length_bytes).resident_bytes

    def grow_to(self, pages_count: int) -> None:
        """See `KvMemory.grow_to`."""
        part_bytes = self._needed_bytes(pages_count)
        missing_bytes = self._parts_count * (part_bytes - self._part_bytes)
        if missing_bytes <= 0:
            return
        available_bytes = self._available_bytes()
        if missing_bytes > available_bytes:
            raise self._refused(missing_bytes, available_bytes, "that much is not available")
        if self._populated:
            try:
                self._advise(_MADV_POPULATE_WRITE, self._part_bytes, part_bytes)
            except OSError as error:
                if error.errno not in _NOT_KNOWN:
                    self._advise(mmap.MADV_DONTNEED, self._part_bytes, part_bytes)
                    why = os.strerror(error.errno or 0)
                    raise self._refused(missing_bytes, available_bytes, why) from error
        self._part_bytes = part_bytes

    def shrink_to(self, pages_count: int) -> None:
        """See `KvMemory.shrink_to`."""
        part_bytes = self._needed_bytes(pages_count)
        if part_bytes >= self._part_bytes:
            return
        try:
            self._advise(mmap.MADV_DONTNEED, part_bytes, self._part_bytes)
        except OSError as error:
            raise ResourceError(
                f"the kernel did not take memory of keys and values back: {error.strerror}. It "
                "stays claimed until the engine is restarted.",
                reason=Reason.HOST_MEMORY,
            ) from error
        self._part_bytes = part_bytes

    def _needed_bytes(self, pages_count: int) -> int:
        """Of each part."""
        if not 0 <= pages_count <= self.capacity_count:
            raise InternalError(f"{pages_count} KV pages of {self.capacity_count} were asked for")
        return rounded_up(pages_count * self._page_bytes, mmap.PAGESIZE)

    def _advise(self, advice: int, from_bytes: int, to_bytes: int) -> None:
        """Of the same range in each part."""
        for part in range(self._parts_count):
            start = part * self._stride_bytes + from_bytes
            self._mapping.madvise(advice, start, to_bytes - from_bytes)

    def _refused(self, asked_bytes: int, available_bytes: int, why: str) -> ArenaError:
        return ArenaError(
            f"keys and values were to have {asked_bytes} more bytes, and {available_bytes} are "
            f"available ({why}); they keep their {self.committed_bytes}. Ask for less KV, or free "
            "memory.",
            asked_bytes=asked_bytes,
            available_bytes=available_bytes,
        )
