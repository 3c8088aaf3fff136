"""Keys and values of all layers in the memory of a device, at addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetokend.core.errors import Reason, ResourceError
from freetokend.kvcache.arena import LayerPages
from freetokend.policy.kv_sizing import KvShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePages:
    """bf16 pages [pages, Nkv, page_tokens, D] of every layer, taken at once and for good."""

    shape: KvShape
    pages_count: int
    layers: tuple[LayerPages, ...]

    @classmethod
    def take(cls, shape: KvShape, pages_count: int, device: torch.device) -> DevicePages:
        """Pages of zeros. ResourceError when the device has no room for them."""
        size = (pages_count, shape.kv_heads_count, shape.page_tokens, shape.head_size)

        def pages() -> torch.Tensor:
            return torch.zeros(size, dtype=torch.bfloat16, device=device)

        try:
            layers = tuple(
                LayerPages(keys=pages(), values=pages()) for _ in range(shape.layers_count)
            )
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{pages_count} pages of keys and values, {pages_count * shape.page_bytes} bytes, "
                f"do not fit into the memory of {device}. Lower engine.kv_bytes.",
                reason=Reason.DEVICE_MEMORY,
            ) from error
        return cls(shape=shape, pages_count=pages_count, layers=layers)

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device
