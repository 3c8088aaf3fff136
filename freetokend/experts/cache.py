"""The expert cache of the host device: slots in ordinary memory, filled by a thread, and the same
plans, resizes and counters as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from freetokend.core.cache_stats import CacheCounters, CallTimes
from freetokend.core.errors import InternalError
from freetokend.device.arena import Arena
from freetokend.device.copier import HostCopier
from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import bank_experts
from freetokend.experts.fill import FillLink
from freetokend.experts.plan.contract import KernelOrder, order_ticks
from freetokend.experts.plan.native import cache_arrays
from freetokend.experts.residency import NOT_RESIDENT
from freetokend.experts.shrink_plan import LayerTerm
from freetokend.experts.slot_checks import SAMPLE_COUNT, VerifyReport, spread
from freetokend.experts.slot_pool import ResizeOutcome, ResizeResult, SlotPool
from freetokend.native.cache_plan import CacheShape
from freetokend.native.executor import Numerics
from freetokend.native.expert_cache import CacheDispatch, FillTables, NativeExperts
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.eviction import default_order
from freetokend.policy.fill_table import fill_all_table
from freetokend.tensor.memory import address_of

# Buckets of tokens per expert that the tables have: 1, 2, 3-4, 5-8, and more.
BUCKETS_COUNT: Final = 5
# A sweep streams so many layers ahead of the one that it computes, and needs room for all of them.
LAYERS_AHEAD_COUNT: Final = 1
# Of a layer's fair share of slots a sweep leaves so much to the experts it found most used: twice
# the share of the experts that have slots, at most all of it. The rest stays with those that decode
# steps have shown to be wanted. Measured with benchmarks.prefill_residents and by replays of the
# traces of benchmarks.miss_rate at 7 to 75 %: a fixed quarter makes whole traces miss 0.1 (11 % of
# the experts resident) to 1.2 points (60 %) more; a whole share at 11 % leaves a new stream worse
# off than an empty cache would.
KEPT_PER_RESIDENT: Final = 2.0

_SPLIT_TABLE: Final = 0
_FILL_TABLE: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What an expert cache is made for.

    slots_capacity: the most slots there can ever be. fill_misses: every miss is filled, in rounds
    where slots are short (offload); otherwise the table splits them between fills and the CPU.
    rate_bytes_per_s: of the link that the copies stand for, None for as fast as memory copies.
    order: None for the default order of eviction. kept_share (None: `default_kept_share`) and
    layers_ahead_count differ from what is served with only to be compared with it.
    """

    slots_capacity: int
    fill_misses: bool
    rate_bytes_per_s: float | None = None
    order: KernelOrder | None = None
    numerics: Numerics = "exact"
    kept_share: float | None = None
    layers_ahead_count: int = LAYERS_AHEAD_COUNT


def default_kept_share(slots_count: int, experts_count: int) -> float:
    """Of a layer's fair share of slots, what a sweep leaves to the experts it found most used."""
    return min(1.0, KEPT_PER_RESIDENT * slots_count / experts_count)


class ExpertCache:
    """Slots, what lies in them, and the two ways of a step through them.

    Owns the arena. All is called between steps, except where it says "from any thread".
    `decode` runs the experts of decode steps; `sweep` those of a prefill, whose layers it streams.
    """

    def __init__(self, mapped: MappedBank, arena: Arena, spec: CacheSpec) -> None:
        """No slots yet; every layer can be filled, and every miss is until `set_fill_counts`."""
        bank = mapped.bank
        self._mapped = mapped
        self._layers_count = bank.moe_layers_count
        self._experts_count = bank.experts_per_layer_count
        order = spec.order or default_order(self._layers_count)
        half_life_ticks, ticks_per_layer = order_ticks(order)
        self._pool = SlotPool(
            arena,
            HostCopier(),
            record_bytes=bank.record_bytes,
            experts_count=bank.experts_count,
            slots_capacity=spec.slots_capacity,
            layer_term=LayerTerm(
                experts_per_layer_count=self._experts_count, ticks_per_layer=ticks_per_layer
            ),
        )
        self._link = FillLink(mapped, self._pool, rate_bytes_per_s=spec.rate_bytes_per_s)
        self._fillable = torch.ones(self._layers_count, dtype=torch.int32)
        self._table_of_layer = torch.full((self._layers_count,), _SPLIT_TABLE, dtype=torch.int32)
        fill_all = torch.tensor(fill_all_table(self._experts_count)[0], dtype=torch.int32)
        self._fill_count = fill_all.repeat(_FILL_TABLE + 1, BUCKETS_COUNT, 1).contiguous()
        self._dispatch = CacheDispatch(
            bank_experts(bank, mapped.region_address, numerics=spec.numerics),
            self._link.native,
            slots=self._pool.base_address,
            arrays=cache_arrays(self._pool.state),
            shape=CacheShape(
                layers_count=self._layers_count,
                experts_per_layer_count=self._experts_count,
                cpu_kernel=not spec.fill_misses,
                half_life_ticks=half_life_ticks,
                ticks_per_layer=ticks_per_layer,
            ),
            tables=FillTables(
                fillable=address_of(self._fillable, torch.int32),
                table_of_layer=address_of(self._table_of_layer, torch.int32),
                fill_count=address_of(self._fill_count, torch.int32),
                buckets_count=BUCKETS_COUNT,
                misses_capacity=self._experts_count,
            ),
        )
        self._dispatch.set_ahead_count(spec.layers_ahead_count)
        self._swept_layers_count = 1 + spec.layers_ahead_count
        self._fill_misses = spec.fill_misses
        self._kept_share = spec.kept_share
        self._resident_base_count = 0

    @property
    def decode(self) -> NativeExperts:
        """For the program of decode steps."""
        return self._dispatch.decode

    @property
    def sweep(self) -> NativeExperts:
        """For the program of prefills that stream whole layers."""
        return self._dispatch.sweep

    @property
    def experts_per_layer_count(self) -> int:
        """The most that can be missing in a call."""
        return self._experts_count

    @property
    def slots_count(self) -> int:
        """Slots that exist."""
        return self._pool.slots_count

    @property
    def slots_capacity(self) -> int:
        """The most slots there can be."""
        return self._pool.slots_capacity

    @property
    def can_sweep(self) -> bool:
        """Whether there is room for two layers, without which nothing is streamed ahead."""
        return self.slots_count >= self._swept_layers_count * self._experts_count

    def set_fill_counts(self, table: Sequence[Sequence[int]]) -> None:
        """Split misses by this table, [buckets][misses + 1] from one or more buckets up.

        A table with fewer buckets repeats its last one. InternalError for other shapes.
        """
        misses_count = self._experts_count + 1
        if not 1 <= len(table) <= BUCKETS_COUNT or any(len(row) != misses_count for row in table):
            raise InternalError(
                f"a table of {[len(row) for row in table]} fills per bucket; the cache has "
                f"{BUCKETS_COUNT} buckets of {misses_count}"
            )
        rows = [*table, *[table[-1]] * (BUCKETS_COUNT - len(table))]
        self._fill_count[_SPLIT_TABLE].copy_(torch.tensor(rows, dtype=torch.int32))

    def set_branches(self, branches: Sequence[LayerBranch]) -> None:
        """What happens to each layer's misses. RESIDENT is filled like FILL until it is."""
        if len(branches) != self._layers_count:
            raise InternalError(f"branches of {len(branches)} layers for {self._layers_count}")
        fillable = [branch is not LayerBranch.CPU for branch in branches]
        by_table = [branch is LayerBranch.SPLIT for branch in branches]
        self._fillable.copy_(torch.tensor(fillable, dtype=torch.int32))
        self._table_of_layer.copy_(
            torch.where(torch.tensor(by_table), _SPLIT_TABLE, _FILL_TABLE).to(torch.int32)
        )

    def take_call_times(self) -> tuple[CallTimes, ...]:
        """Of the decode calls with misses since this was asked last."""
        return self._dispatch.take_call_times()

    def prefetch(self, moe_layer_index: int, *, wanted: torch.Tensor | None = None) -> None:
        """Start streaming a layer that a sweep will come to.

        wanted: int32 [experts per layer], not 0 for experts that are known to be needed (routing by
        token id); None for all.
        """
        if wanted is not None and wanted.shape != (self._experts_count,):
            raise InternalError(
                f"wanted experts of shape {list(wanted.shape)}; a layer has {self._experts_count}"
            )
        address = 0 if wanted is None else address_of(wanted, torch.int32)
        self._dispatch.prefetch(moe_layer_index, wanted=address)

    def preload(self) -> None:
        """Fill the slots with experts, layer by layer, as far as they go."""
        for layer in range(self._layers_count):
            if self._resident_count() >= self.slots_count:
                return
            self._dispatch.prefetch(layer)
            self._dispatch.let_go()

    def let_go(self) -> None:
        """Free what a sweep holds; for one that was given up."""
        self._dispatch.let_go()

    def residents(self, moe_layer_index: int) -> torch.Tensor:
        """bool [experts per layer]: those with a slot, also while it is being filled."""
        first = moe_layer_index * self._experts_count
        return self._pool.state.slot_of_expert[first : first + self._experts_count] != NOT_RESIDENT

    def set_rate_bytes_per_s(self, rate_bytes_per_s: float | None) -> None:
        """Change the rate of the link, from the next record on."""
        self._link.set_rate_bytes_per_s(rate_bytes_per_s)

    def prepare_growth(self, slots_count: int) -> None:
        """As of `SlotPool`: commit memory ahead, in a thread beside steps."""
        self._pool.prepare_growth(slots_count)

    def resize(self, slots_count: int) -> ResizeResult:
        """Have exactly this many slots; errors as of `SlotPool.resize`.

        Also between two layers of a sweep: what is on its way is waited for, and its slots become
        the first to go.
        """
        self._dispatch.let_go()
        self._link.drain()
        try:
            result = self._pool.resize(slots_count)
        finally:
            self._count_residents()
        if result.outcome is ResizeOutcome.DEFERRED:
            raise InternalError(f"slots are held although nothing uses them: {result.note}")
        share = self._kept_share
        if share is None:
            share = default_kept_share(self.slots_count, self._layers_count * self._experts_count)
        self._dispatch.set_kept_count(int(share * self.slots_count / self._layers_count))
        return result

    def empty(self) -> None:
        """Give all slots back."""
        self.resize(0)

    def verify(self, progress: Callable[[], None] = lambda: None) -> VerifyReport:
        """Compare every resident slot with the pool; progress: called after each."""
        self._link.drain()
        return self._pool.verify(self._mapped, progress)

    def fill_sample(self) -> VerifyReport:
        """Fill a few slots with experts from all over the pool, and compare what came.

        Copies can report success and move nothing: before anything is served this says so.
        """
        count = min(SAMPLE_COUNT, self.slots_count, self._layers_count)
        layers, experts = spread(self._layers_count, count), spread(self._experts_count, count)
        for layer, expert in zip(layers, experts, strict=True):
            wanted = torch.zeros(self._experts_count, dtype=torch.int32)
            wanted[expert] = 1
            self.prefetch(layer, wanted=wanted)
            self._dispatch.let_go()
        return self.verify()

    def check_integrity(self) -> None:
        """Every invariant of slots, state, memory and counts; InternalError names what breaks."""
        self._link.drain()
        self._pool.check_integrity()
        resident_count = int((self._pool.state.slot_of_expert != NOT_RESIDENT).sum())
        if resident_count != self._resident_count():
            raise InternalError(
                f"{resident_count} experts have a slot and {self._resident_count()} are counted"
            )

    def counters(self) -> CacheCounters:
        """From any thread; layers may be a call apart while a step is computed."""
        totals = self._link.totals()
        return CacheCounters(
            slots_count=self.slots_count,
            slots_capacity=self.slots_capacity,
            resident_count=self._resident_count(),
            slot_bytes=self._pool.record_bytes,
            committed_bytes=self._pool.committed_bytes,
            generation=self._pool.generation,
            layers=self._dispatch.layer_counters(),
            fill_counts=tuple(tuple(row) for row in self._used_table().tolist()),
            fills_count=totals.fills_count,
            fill_bytes=totals.bytes,
            fill_busy_s=totals.busy_s,
            streamed_count=self._dispatch.streamed_count,
        )

    @property
    def executions_count(self) -> int:
        """(token, expert) pairs, wherever they were computed; from any thread."""
        return self._dispatch.executions_count

    def claimed_bytes(self) -> int:
        """Memory of the slots as the kernel shows it."""
        return self._pool.claimed_bytes()

    def close(self) -> None:
        """End the thread that fills and give the memory back; no step may run any more."""
        self._link.close()
        self._pool.close()

    def _used_table(self) -> torch.Tensor:
        """int32 [buckets, E + 1]: of m missing experts so many are filled, in the layers that are
        split by the rates; where none is, in those that fill; where none does either, nothing."""
        fillable = self._fillable != 0
        if self._fill_misses or not bool(fillable.any()):
            return self._fill_count[_FILL_TABLE] * int(fillable.any())
        is_split = bool((self._table_of_layer[fillable] == _SPLIT_TABLE).any())
        return self._fill_count[_SPLIT_TABLE if is_split else _FILL_TABLE]

    def _resident_count(self) -> int:
        return self._resident_base_count + self._dispatch.gained_count

    def _count_residents(self) -> None:
        """A resize drops experts behind the planner's back."""
        resident_count = int((self._pool.state.slot_of_expert != NOT_RESIDENT).sum())
        self._resident_base_count = resident_count - self._dispatch.gained_count
