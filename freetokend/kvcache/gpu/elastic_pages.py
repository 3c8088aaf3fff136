"""Pages of keys and values in memory of a device that comes and goes at the end of each layer's
ranges, while addresses, and what was captured with them, stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from freetokend.device.arena import Arena, ArenaError
from freetokend.kvcache.arena import LayerPages
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.policy.kv_sizing import KvShape


class ElasticPages:
    """A `KvMemory` of two arenas a layer, and the tensors over them."""

    def __init__(
        self,
        shape: KvShape,
        pages_count: int,
        *,
        capacity_count: int,
        new_arena: Callable[[int], Arena],
        tensor_at: Callable[[int, tuple[int, ...]], torch.Tensor],
    ) -> None:
        """new_arena: of so many reserved bytes; tensor_at: bf16 over an address, of which only the
        beginning may have memory. Raises what they raise, and gives all back then."""
        parts_count = 2 * shape.layers_count
        self._part_bytes = shape.page_bytes // parts_count
        self._pages_count = 0
        self._arenas: list[Arena] = []
        try:
            for _ in range(parts_count):
                self._arenas.append(new_arena(capacity_count * self._part_bytes))
            self.grow_to(pages_count)
            size = (capacity_count, shape.kv_heads_count, shape.page_tokens, shape.head_size)
            parts = [tensor_at(arena.base_address, size) for arena in self._arenas]
            for part in parts:
                part[:pages_count].zero_()
        except BaseException:
            self.close()
            raise
        self.pages = DevicePages(
            shape=shape,
            pages_count=capacity_count,
            layers=tuple(
                LayerPages(keys=keys, values=values)
                for keys, values in zip(parts[::2], parts[1::2], strict=True)
            ),
        )

    @property
    def committed_bytes(self) -> int:
        """Of all layers, in whole granules."""
        return sum(arena.committed_bytes for arena in self._arenas)

    def claimed_bytes(self) -> int:
        """As the driver shows it."""
        return sum(arena.claimed_bytes() for arena in self._arenas)

    def grow_to(self, pages_count: int) -> None:
        """See `KvMemory.grow_to`."""
        if pages_count <= self._pages_count:
            return
        before_bytes = self.committed_bytes
        length_bytes = pages_count * self._part_bytes
        try:
            for arena in self._arenas:
                arena.grow_to(length_bytes)
        except ArenaError as error:
            taken_bytes = self.committed_bytes - before_bytes
            self._shrink(self._pages_count)
            raise ArenaError(
                f"{pages_count} KV pages instead of {self._pages_count} need {error.asked_bytes} "
                f"more bytes in each of {len(self._arenas)} ranges; {taken_bytes} could be had, "
                f"then {error.available_bytes} were free. All as before: {before_bytes} bytes. Ask "
                "for less KV, or end other programs on the GPU.",
                asked_bytes=error.asked_bytes * len(self._arenas),
                available_bytes=error.available_bytes + taken_bytes,
            ) from error
        except BaseException:
            with suppress(Exception):  # what went wrong first is what is told
                self._shrink(self._pages_count)
            raise
        self._pages_count = pages_count

    def shrink_to(self, pages_count: int) -> None:
        """See `KvMemory.shrink_to`."""
        if pages_count < self._pages_count:
            self._pages_count = pages_count
            self._shrink(pages_count)

    def close(self) -> None:
        """Give memory and addresses back; may be called twice."""
        for arena in self._arenas:
            arena.close()

    def _shrink(self, pages_count: int) -> None:
        for arena in self._arenas:
            arena.shrink_to(pages_count * self._part_bytes)
