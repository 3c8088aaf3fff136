"""The expert cache's way through a step: typed face of the `_exec` extension module.

`freetokend.experts.cache` puts it together; everything behind an address must outlive it.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.cache_stats import CallTimes, LayerCounters
from freetokend.native import _exec
from freetokend.native.cache_plan import CacheArrays, CacheShape
from freetokend.native.executor import faults
from freetokend.native.program import BankExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTables:
    """Addresses. fillable: int32 [L], layers whose misses can be filled; table_of_layer: int32 [L],
    the table it goes by; fill_count: int32 [tables, buckets_count, misses_capacity + 1], how many
    of m misses are filled."""

    fillable: int
    table_of_layer: int
    fill_count: int
    buckets_count: int
    misses_capacity: int


class NativeExperts:
    """Whoever runs the experts of a native program."""

    def __init__(self, native: _exec.ExpertDispatch) -> None:
        self.native = native


class CacheDispatch:
    """Plans, fills and executes; counts what it did. One step at a time.

    decode: the experts of a decode step. sweep: those of a prefill that streams whole layers.
    """

    def __init__(
        self,
        bank: BankExperts,
        link: _exec.FillLink,
        *,
        slots: int,
        arrays: CacheArrays,
        shape: CacheShape,
        tables: FillTables,
    ) -> None:
        """bank: the pool's records. `shape` has to be the bank's."""
        with faults():
            self._native = _exec.ExpertCache(
                bank=bank.native,
                link=link,
                slots=slots,
                slot_of_expert=arrays.slot_of_expert,
                expert_of_slot=arrays.expert_of_slot,
                slot_key=arrays.slot_key,
                demanded_at=arrays.demanded_at,
                score=arrays.score,
                clock=arrays.clock,
                slots_count=arrays.slots_count,
                slots_capacity=arrays.slots_capacity,
                cpu_kernel=shape.cpu_kernel,
                half_life_ticks=shape.half_life_ticks,
                ticks_per_layer=shape.ticks_per_layer,
                fillable=tables.fillable,
                table_of_layer=tables.table_of_layer,
                fill_count=tables.fill_count,
                buckets_count=tables.buckets_count,
                misses_capacity=tables.misses_capacity,
            )
            self.decode = NativeExperts(_exec.DecodeExperts(self._native))
            self.sweep = NativeExperts(_exec.SweepExperts(self._native))
        self._layers_count = shape.layers_count

    def prefetch(self, moe_layer_index: int, *, wanted: int = 0) -> None:
        """Start streaming a layer that a sweep will come to.

        wanted: address of int32 [experts per layer], not 0 for the experts that are known to be
        needed; 0 for all.
        """
        with faults():
            self._native.prefetch(moe_layer_index, wanted=wanted)

    def let_go(self) -> None:
        """Wait for what is being streamed and free its slots; a sweep that goes on asks again."""
        with faults():
            self._native.let_go()

    def set_kept_count(self, kept_count: int) -> None:
        """How many of a layer's experts, the most routed ones, a sweep leaves for decode."""
        self._native.set_kept_count(kept_count)

    def set_ahead_count(self, ahead_count: int) -> None:
        """How many layers a sweep streams ahead of the one it computes."""
        self._native.set_ahead_count(ahead_count)

    def layer_counters(self) -> tuple[LayerCounters, ...]:
        """By MoE layer; from any thread."""
        return tuple(self._layer(index) for index in range(self._layers_count))

    def take_call_times(self) -> tuple[CallTimes, ...]:
        """Of the decode calls with misses since this was asked last; between steps."""
        return tuple(
            CallTimes(
                bucket=bucket,
                misses_count=misses,
                fills_count=fills,
                cpu_count=cpu,
                fill_s=fill_s,
                cpu_s=cpu_s,
                layer_s=layer_s,
            )
            for _, bucket, misses, fills, cpu, fill_s, cpu_s, layer_s in (
                self._native.take_call_times()
            )
        )

    @property
    def executions_count(self) -> int:
        """(token, expert) pairs; from any thread."""
        return self._native.executions_count

    @property
    def streamed_count(self) -> int:
        """Experts that sweeps filled; from any thread."""
        return self._native.streamed_count

    @property
    def gained_count(self) -> int:
        """Resident experts that plans brought, less those they took away; from any thread."""
        return self._native.gained_count

    def _layer(self, moe_layer_index: int) -> LayerCounters:
        hits, misses, fills, cpu, evictions = self._native.layer_counts(moe_layer_index)
        return LayerCounters(
            hits_count=hits,
            misses_count=misses,
            fills_count=fills,
            cpu_count=cpu,
            evictions_count=evictions,
        )
