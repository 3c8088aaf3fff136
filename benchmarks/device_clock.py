"""A declared device: what the branches of a layer would take on it, as arithmetic.

The host device's slots, link and executor share the same cores, so its wall clock cannot judge a
split between them. Here the device executes hits while fills are on their way and what was filled
when all fills have arrived; the CPU executes the other misses meanwhile; the layer ends with the
later of both. With contention the link and the CPU share the memory's rate, of which the link takes
first, and only as long as both move bytes: the CPU has all of it before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.policy.fill_table import FillRates

# Tokens per expert up to which a CPU expert takes so many times as long as with one; what the
# executor shows for 4-bit experts: reading weights hides the work of a few tokens.
SLOWDOWN_RATIOS: Final = (1.0, 1.0, 1.15, 1.6, 2.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """What one call of a layer did: experts that had a slot, those filled, and of those that the
    CPU executed the tokens of each."""

    hits_count: int
    fills_count: int
    cpu_tokens: tuple[int, ...]

    @property
    def misses_count(self) -> int:
        return self.fills_count + len(self.cpu_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClock:
    """Rates and fixed costs. cpu_bytes_per_s is the memory's rate, which the link takes from where
    there is contention; slot_bytes_per_s: records executed from slots."""

    record_bytes: int
    link_bytes_per_s: float
    cpu_bytes_per_s: float
    slot_bytes_per_s: float
    fill_fixed_s: float
    cpu_fixed_s: float
    contention: bool
    slowdown_ratios: tuple[float, ...] = SLOWDOWN_RATIOS

    @property
    def usable_link_bytes_per_s(self) -> float:
        """With contention no more than the memory gives."""
        if self.contention:
            return min(self.link_bytes_per_s, self.cpu_bytes_per_s)
        return self.link_bytes_per_s

    @property
    def cpu_beside_bytes_per_s(self) -> float:
        """The CPU's rate while the link runs; 0 where the link takes all."""
        if self.contention:
            return self.cpu_bytes_per_s - self.usable_link_bytes_per_s
        return self.cpu_bytes_per_s

    def rates(self) -> FillRates:
        """What one would measure on this device, for the policy."""
        return FillRates(
            record_bytes=self.record_bytes,
            fill_bytes_per_s=self.usable_link_bytes_per_s,
            fill_alone_bytes_per_s=self.usable_link_bytes_per_s,
            cpu_bytes_per_s=self.cpu_beside_bytes_per_s,
            cpu_alone_bytes_per_s=self.cpu_bytes_per_s,
            fill_fixed_s=self.fill_fixed_s,
            cpu_fixed_s=self.cpu_fixed_s,
            cpu_slowdown_ratios=self.slowdown_ratios,
            slot_bytes_per_s=self.slot_bytes_per_s,
        )

    def layer_s(self, load: LayerLoad) -> float:
        """Seconds of the later branch."""
        return max(self.device_s(load), self.cpu_s(load))

    def device_s(self, load: LayerLoad) -> float:
        """Hits beside the fills, then what was filled."""
        slot_s = self.record_bytes / self.slot_bytes_per_s
        return max(load.hits_count * slot_s, self.filled_s(load)) + load.fills_count * slot_s

    def cpu_s(self, load: LayerLoad) -> float:
        """The CPU's part, slower while the link moves bytes."""
        if not load.cpu_tokens:
            return 0.0
        slowdown = sum(self._slowdown_ratio(tokens) for tokens in load.cpu_tokens)
        left_bytes = self.record_bytes * slowdown
        now_s = self.cpu_fixed_s
        link_from_s = max(self.fill_fixed_s, now_s)
        link_until_s = self.filled_s(load)
        if link_until_s > link_from_s:
            before_bytes = (link_from_s - now_s) * self.cpu_bytes_per_s
            if before_bytes >= left_bytes:
                return now_s + left_bytes / self.cpu_bytes_per_s
            left_bytes -= before_bytes
            beside_bytes = (link_until_s - link_from_s) * self.cpu_beside_bytes_per_s
            if beside_bytes >= left_bytes:
                return link_from_s + left_bytes / self.cpu_beside_bytes_per_s
            left_bytes -= beside_bytes
            now_s = link_until_s
        return now_s + left_bytes / self.cpu_bytes_per_s

    def filled_s(self, load: LayerLoad) -> float:
        """When all fills have arrived."""
        if not load.fills_count:
            return 0.0
        bytes_count = load.fills_count * self.record_bytes
        return self.fill_fixed_s + bytes_count / self.usable_link_bytes_per_s

    def _slowdown_ratio(self, tokens_count: int) -> float:
        bucket = min((tokens_count - 1).bit_length(), len(self.slowdown_ratios) - 1)
        return self.slowdown_ratios[bucket]
