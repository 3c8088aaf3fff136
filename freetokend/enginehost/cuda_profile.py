"""A short look at a GPU's slots before anything is served: do fills arrive, and how fast is what.

Everything happens in slots in which nothing lies yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from freetokend.core.errors import Reason, ResourceError
from freetokend.enginehost.cuda_platform import CudaPlatform, SlotOps
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.device_link import DeviceLink
from freetokend.experts.gpu.transfers import Transfers
from freetokend.experts.host_rates import BURST_COUNT, ProfileLimits, measure_rates
from freetokend.experts.slot_checks import SAMPLE_COUNT, spread
from freetokend.experts.slot_pool import SlotPool
from freetokend.native.executor import Executor
from freetokend.policy.fill_table import FillRates

_TIMES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRates:
    """source: how they were found, for people."""

    rates: FillRates
    source: str


class SlotProfile:
    """Of a pool whose slots hold nothing."""

    def __init__(
        self,
        mapped: MappedBank,
        pool: SlotPool,
        platform: CudaPlatform,
        ops: SlotOps,
        *,
        layers_count: int,
    ) -> None:
        """layers_count: the first so many layers can be filled."""
        self._mapped = mapped
        self._pool = pool
        self._platform = platform
        self._ops = ops
        self.layers_count: Final = layers_count

    def check_fills(self) -> None:
        """Fill slots with experts from all over the pool and compare them: a copy can report
        success and move nothing. ResourceError where they differ."""
        bank = self._mapped.bank
        experts_count = self.layers_count * bank.experts_per_layer_count
        count = min(SAMPLE_COUNT, self._pool.slots_count, experts_count)
        if not count:
            return
        chosen = spread(experts_count, count)
        self._fill([(expert, slot) for slot, expert in enumerate(chosen)])
        self._platform.synchronize()
        for slot, expert in enumerate(chosen):
            offset_bytes = self._platform.copier.first_difference(
                self._pool.slot_address(slot),
                self._mapped.region_address + bank.record_offset_bytes(expert),
                bank.record_bytes,
            )
            if offset_bytes is not None:
                raise ResourceError(
                    f"{self._platform.name} does not hold what is copied to it: expert {expert}, "
                    f"copied for a check, differs from the pool from byte {offset_bytes} on. Set "
                    'engine.device to "none" to serve without it, and check the driver.',
                    reason=Reason.DEVICE_UNUSABLE,
                    param="engine.device",
                )

    def measured(self, executor: Executor, transfers: Transfers) -> SlotRates | None:
        """What fills and the CPU reach, alone and beside each other. None where nothing can be
        filled."""
        bank = self._mapped.bank
        slots_count = min(BURST_COUNT, self._pool.slots_count, bank.experts_per_layer_count)
        if not self.layers_count or not slots_count:
            return None
        rates = measure_rates(
            self._mapped,
            executor,
            DeviceLink(self._ops.fill, transfers, self._platform.device),
            ProfileLimits(layers_count=self.layers_count, slots_count=slots_count),
        ).rates
        return SlotRates(
            rates=rates,
            source=(
                "measured with the deployed experts when the engine started: fills "
                f"{rates.fill_alone_bytes_per_s / 1e9:.1f} GB/s alone and "
                f"{rates.fill_bytes_per_s / 1e9:.1f} beside the CPU, the CPU "
                f"{rates.cpu_alone_bytes_per_s / 1e9:.1f} alone and "
                f"{rates.cpu_bytes_per_s / 1e9:.1f} beside fills"
            ),
        )

    def token_s(self, *, rows: int, top_k: int) -> float:
        """Seconds of one token's experts, of one layer, in a step of so many rows."""
        bank, device = self._mapped.bank, self._platform.device
        pairs = torch.arange(rows * top_k, dtype=torch.int32, device=device)
        slots = min(self._pool.slots_count, bank.experts_per_layer_count)
        places = pairs.remainder(slots).view(rows, top_k)
        x = torch.zeros(rows, bank.hidden_size, dtype=torch.bfloat16, device=device)
        weights = torch.zeros(rows, top_k, device=device)
        y = torch.zeros(rows, top_k, bank.hidden_size, device=device)
        return self._best_s(lambda: self._ops.slots(x, places, weights, y)) / rows

    def _fill(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue a fill of these (expert, slot)."""
        device = self._platform.device
        fills = torch.tensor(pairs, dtype=torch.int32).view(-1, 2).to(device)
        self._ops.fill(fills, torch.full((1,), len(pairs), dtype=torch.int32, device=device))

    def _best_s(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest of a few, after one that may have to compile."""
        run()
        best_s = float("inf")
        for _ in range(_TIMES):
            self._platform.synchronize()
            began_s = time.perf_counter()
            run()
            self._platform.synchronize()
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s
