"""What fills and the executor reach on this machine with the deployed experts: a short look before
anything is served, so that the first table is not a guess. Over the host's link or a GPU's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch

from freetokend.core.errors import InternalError
from freetokend.device.arena import Arena
from freetokend.device.copier import HostCopier
from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.experts.fill import FillLink
from freetokend.experts.slot_pool import SlotPool
from freetokend.native.executor import Executor, Numerics
from freetokend.policy.fill_table import FillRates

# Records that a burst fills or executes; slots that the fills take turns in.
BURST_COUNT: Final = 8
# Each figure is the median of at most so many bursts, and of fewer when time is up.
BURSTS_COUNT: Final = 5
# Tokens per expert of the buckets: 1, 2, 4, 8, 16.
BUCKET_TOKENS: Final = (1, 2, 4, 8, 16)
BUDGET_S: Final = 2.0
_LONGEST_BURST_S: Final = 0.25
# A line through two points says little about where it starts; a fixed cost is at most this share.
_MOST_FIXED_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """rates: both branches'. chunk_token_s: of one token in a chunk of many, one MoE layer.
    source: how they were found, for people."""

    rates: FillRates
    chunk_token_s: float
    source: str


class MeasuredLink(Protocol):
    """What fills slots; see `FillLink`."""

    def submit(self, fills: torch.Tensor, fills_count: int) -> int: ...

    def wait(self, ticket: int) -> None: ...

    def is_done(self, ticket: int) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileLimits:
    """layers_count: the first so many layers of the bank are filled and executed; slots_count: the
    first so many slots are filled, of any content; budget_s: about what it takes at most."""

    layers_count: int
    slots_count: int = BURST_COUNT
    budget_s: float = BUDGET_S


def measure_rates(
    mapped: MappedBank,
    executor: Executor,
    link: MeasuredLink,
    limits: ProfileLimits,
    *,
    numerics: Numerics = "exact",
    clock: Callable[[], float] = time.perf_counter,
) -> HostRates:
    """Fill and execute records of the pool, each alone and both at once: one burst of each kind at
    least. InternalError where there is nothing to fill or no slot."""
    if min(limits.layers_count, limits.slots_count, mapped.bank.experts_count) < 1:
        raise InternalError(f"nothing can be measured with {limits}")
    dispatch = CpuExpertDispatch(executor, mapped, numerics=numerics)
    return _Bursts(mapped, dispatch, link, clock, limits).measure()


def measure_host_rates(
    mapped: MappedBank,
    executor: Executor,
    arena: Arena,
    *,
    numerics: Numerics = "exact",
    rate_bytes_per_s: float | None = None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> HostRates:
    """Fill and execute records of the pool, each alone and both at once.

    arena: room for BURST_COUNT records; it is closed afterwards. rate_bytes_per_s: of the link that
    fills stand for. Takes about `budget_s` at most, and one burst of each kind at least.
    InternalError for a bank without experts.
    """
    bank = mapped.bank
    if not bank.experts_count:
        raise InternalError("a bank without experts has no rates")
    pool = SlotPool(
        arena,
        HostCopier(),
        record_bytes=bank.record_bytes,
        experts_count=bank.experts_count,
        slots_capacity=BURST_COUNT,
    )
    try:
        pool.resize(BURST_COUNT)
        link = FillLink(mapped, pool, rate_bytes_per_s=rate_bytes_per_s)
        try:
            limits = ProfileLimits(layers_count=bank.moe_layers_count, budget_s=budget_s)
            return measure_rates(mapped, executor, link, limits, numerics=numerics, clock=clock)
        finally:
            link.close()
    finally:
        pool.close()


class _Bursts:
    """Bursts that take turns over all records that count, so that most find them cold."""

    def __init__(
        self,
        mapped: MappedBank,
        dispatch: CpuExpertDispatch,
        link: MeasuredLink,
        clock: Callable[[], float],
        limits: ProfileLimits,
    ) -> None:
        self._bank = mapped.bank
        self._dispatch = dispatch
        self._link = link
        self._clock = clock
        self._deadline_s = clock() + limits.budget_s
        self._next = 0
        per_layer = self._bank.experts_per_layer_count
        self._experts_count = limits.layers_count * per_layer
        self._count = min(BURST_COUNT, limits.slots_count, per_layer)

    def measure(self) -> HostRates:
        record_bytes = self._bank.record_bytes
        burst_bytes = self._count * record_bytes
        one_s, burst_s = self._median(lambda: self._fill(1)), self._median(self._fill)
        cpu_one_s = self._median(lambda: self._execute(1, 1))
        cpu_s = [self._median(partial(self._execute, self._count, n)) for n in BUCKET_TOKENS]
        pairs = [self._both() for _ in range(BURSTS_COUNT if self._time_left else 1)]
        fill_both, cpu_both = (statistics.median(column) for column in zip(*pairs, strict=True))
        fill_fixed_s, fill_alone = cost_line(one_s, burst_s, self._count, record_bytes)
        cpu_fixed_s, cpu_alone = cost_line(cpu_one_s, cpu_s[0], self._count, record_bytes)
        slowest = 1.0
        ratios = [slowest := max(slowest, seconds / cpu_s[0]) for seconds in cpu_s]
        return HostRates(
            rates=FillRates(
                record_bytes=record_bytes,
                fill_bytes_per_s=min(burst_bytes / fill_both, fill_alone),
                fill_alone_bytes_per_s=fill_alone,
                cpu_bytes_per_s=min(burst_bytes / cpu_both, cpu_alone),
                cpu_alone_bytes_per_s=cpu_alone,
                fill_fixed_s=fill_fixed_s,
                cpu_fixed_s=cpu_fixed_s,
                cpu_slowdown_ratios=tuple(ratios),
            ),
            chunk_token_s=cpu_s[-1] / BUCKET_TOKENS[-1],
            source="measured with the deployed experts when the engine started",
        )

    @property
    def _time_left(self) -> bool:
        return self._clock() < self._deadline_s

    def _median(self, burst: Callable[[], float]) -> float:
        seconds = [burst()]
        while len(seconds) < BURSTS_COUNT and self._time_left:
            seconds.append(burst())
        return statistics.median(seconds)

    def _place(self, count: int) -> tuple[int, int]:
        """A layer and its first expert of `count` neighbours, the next of all that count."""
        per_layer = self._bank.experts_per_layer_count
        if self._next % per_layer + count > per_layer:
            self._next += per_layer - self._next % per_layer
        start = self._next % self._experts_count
        self._next += count
        return start // per_layer, start % per_layer

    def _fills(self, count: int) -> torch.Tensor:
        layer, first = self._place(count)
        base = self._bank.expert_id(layer, first)
        return torch.tensor([(base + i, i) for i in range(count)], dtype=torch.int32)

    def _fill(self, count: int | None = None) -> float:
        fills = self._fills(count or self._count)
        started_s = self._clock()
        self._link.wait(self._link.submit(fills, len(fills)))
        return self._clock() - started_s

    def _execute(self, experts_count: int, tokens_count: int) -> float:
        """Each of so many experts for the same so many tokens."""
        layer, first = self._place(experts_count)
        x = torch.ones((tokens_count, self._bank.hidden_size), dtype=torch.bfloat16)
        ids = torch.arange(first, first + experts_count, dtype=torch.int32)
        weights = torch.full((tokens_count, experts_count), 1.0 / experts_count)
        routed = ids.repeat(tokens_count, 1).contiguous()
        started_s = self._clock()
        self._dispatch.dispatch(layer, x, routed, weights)
        return self._clock() - started_s

    def _both(self) -> tuple[float, float]:
        """Seconds per burst of fills and of executions while the other goes on as long.

        Fills are queued ahead of the executions, as many as they last.
        """
        tickets = [self._link.submit(self._fills(self._count), self._count) for _ in range(2)]
        started_s = self._clock()
        cpu = [self._execute(self._count, 1)]
        while self._clock() - started_s < _LONGEST_BURST_S and not self._link.is_done(tickets[-1]):
            cpu.append(self._execute(self._count, 1))
        self._link.wait(tickets[-1])
        return (self._clock() - started_s) / len(tickets), statistics.median(cpu)


def cost_line(one_s: float, many_s: float, count: int, record_bytes: int) -> tuple[float, float]:
    """(fixed seconds, bytes per second) of a cost that takes one_s for one record and many_s for
    so many. Where something disturbed the one and the many took less, both stay possible ones."""
    if count < 2:
        return 0.0, record_bytes / one_s
    each_s = (many_s - one_s) / (count - 1)
    fixed_s = min(max(one_s - each_s, 0.0), _MOST_FIXED_SHARE * min(one_s, many_s))
    return fixed_s, count * record_bytes / max(many_s - fixed_s, 1e-9)
