"""Which experts the steps of a GPU choose, copied to the host behind them.

The copies are queued like everything else and wait for nothing: who takes them has waited for the
step. While a tap is off it costs nothing on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from freetokend.core.errors import InternalError
from freetokend.native.routing_tap import Tapped, TappedLayer


class DeviceTap:
    """A `Tap` of steps or of sweeps; see `native.routing_tap.RoutingTap`, which is the CPU's."""

    def __init__(self, *, pinned: bool) -> None:
        """pinned: as copies that do not wait need their memory; for which torch needs a GPU."""
        self._pinned = pinned
        self._memory: torch.Tensor | None = None
        self._layers: list[TappedLayer] = []
        self._ids_count = 0
        self._overflowed = False

    def start(self, capacity_ids: int) -> None:
        """Keep what comes from now on, at most so many ids until `take` or `clear`."""
        self._memory = torch.empty(capacity_ids, dtype=torch.int32, pin_memory=self._pinned)
        self.clear()

    def stop(self) -> None:
        """Keep nothing any more, and give the memory back."""
        self._memory = None
        self.clear()

    def clear(self) -> None:
        """Forget what was kept: another step begins."""
        self._layers, self._ids_count, self._overflowed = [], 0, False

    @property
    def is_on(self) -> bool:
        return self._memory is not None

    def keep(self, moe_layer_index: int, expert_ids: torch.Tensor) -> None:
        """expert_ids: int32 [t, k] of one layer, contiguous; nothing while the tap is off."""
        if self._memory is None:
            return
        end = self._ids_count + expert_ids.numel()
        if end > self._memory.shape[0]:
            self._overflowed = True
            return
        there = self._memory.narrow(0, self._ids_count, expert_ids.numel())
        there.copy_(expert_ids.flatten(), non_blocking=True)
        self._ids_count = end
        self._layers.append(
            TappedLayer(
                moe_layer_index=moe_layer_index,
                tokens_count=expert_ids.shape[0],
                experts_per_token=expert_ids.shape[1],
            )
        )

    def take(self) -> Tapped:
        """What was kept since the last `clear` or `take`, forgotten here; when the device has been
        waited for. InternalError when the tap is off."""
        if self._memory is None:
            raise InternalError("nothing is kept by a tap that is off")
        ids = self._memory.narrow(0, 0, self._ids_count).numpy().astype(np.dtype("<u2")).tobytes()
        taken = Tapped(layers=tuple(self._layers), ids=ids, overflowed=self._overflowed)
        self.clear()
        return taken
