"""The expert cache of a GPU as control steers and watches it: slots, plans, pinned layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from freetokend.core.cache_stats import CacheCounters, LayerCounters
from freetokend.core.errors import Reason, ResourceError
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.dispatch import CudaExpertDispatch
from freetokend.experts.gpu.sweeps import SlotSweeps
from freetokend.experts.plan.contract import Stat
from freetokend.experts.residency import NOT_RESIDENT
from freetokend.experts.slot_checks import VerifyReport
from freetokend.experts.slot_pool import ResizeResult, SlotPool
from freetokend.ftw.layout import ExpertBank
from freetokend.native.executor import Executor
from freetokend.policy.backend_choice import LayerBranch
from freetokend.tensor.protocols import KvView, StepInput, StepRunner
from freetokend.tensor.sampling import ChosenTokens, sample_logits


class Registration(Protocol):
    """Host memory that a GPU may read, from its beginning on."""

    @property
    def registered_bytes(self) -> int: ...

    @property
    def note(self) -> str: ...

    def step(self) -> bool: ...

    def close(self) -> None: ...


def fillable_layers(bank: ExpertBank, registered_bytes: int) -> list[bool]:
    """By layer: whether every record lies in what is registered of the pool, from its beginning."""
    layer_bytes = bank.experts_per_layer_count * bank.record_bytes
    return [
        bank.offset_bytes + (layer + 1) * layer_bytes <= registered_bytes
        for layer in range(bank.moe_layers_count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the last step left, on the host."""

    totals: tuple[tuple[int, ...], ...]
    resident_count: int
    streamed_count: int = 0


class DeviceCache:
    """Owns slots and registration; `dispatch` and `sweeps` work with them. Called between steps,
    which may be two layers of a sweep, but for `counters`."""

    def __init__(
        self,
        mapped: MappedBank,
        pool: SlotPool,
        dispatch: CudaExpertDispatch,
        sweeps: SlotSweeps,
        registration: Registration,
        *,
        least_slots: int,
        synchronize: Callable[[], None],
        close_first: Callable[[], None] = lambda: None,
    ) -> None:
        """least_slots: below which no step can be computed; synchronize: waits for the device;
        close_first: ends what else uses the pool, when the cache is closed."""
        self._mapped = mapped
        self._pool = pool
        self._dispatch = dispatch
        self._sweeps = sweeps
        self._registration = registration
        self._least_slots: Final = least_slots
        self._synchronize = synchronize
        self._close_first = close_first
        layers = mapped.bank.moe_layers_count
        self._to_fill = (True,) * layers
        self._table: tuple[tuple[int, ...], ...] = ()
        self._seen = _Seen(totals=((0,) * len(Stat),) * layers, resident_count=0)

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
        return self._sweeps.can_sweep

    def prefetch(self, moe_layer_index: int, *, wanted: torch.Tensor | None = None) -> None:
        """Start streaming a layer that a sweep will come to; see `SlotSweeps.prefetch`."""
        self._sweeps.prefetch(moe_layer_index, wanted=wanted)

    def let_go(self) -> None:
        """Free what is held for a sweep."""
        self._sweeps.let_go()

    def pin(self) -> bool:
        """Between two steps: register the next part of the pool; False when nothing is left to do.

        A layer whose records all are registered can be filled from the next step on. Nothing is
        done while layers of a sweep are held, which count on what could be filled before.
        """
        if self._sweeps.is_held:
            return True
        more = self._registration.step()
        self._set_fillable()
        return more

    @property
    def fillable(self) -> tuple[bool, ...]:
        """By layer: whether its misses can be filled now."""
        return self._dispatch.fillable_layers

    @property
    def pinned_bytes(self) -> int:
        """Of the pool, what is registered; from any thread."""
        return self._registration.registered_bytes

    @property
    def pin_note(self) -> str:
        """Why the rest stays pageable, and how many layers that are; empty while all is well. From
        any thread."""
        if not self._registration.note:
            return ""
        pinned = fillable_layers(self._mapped.bank, self._registration.registered_bytes)
        return (
            f"{sum(pinned)} of {len(pinned)} layers are pinned, and the CPU executes the others: "
            f"{self._registration.note}"
        )

    def set_branches(
        self, branches: Sequence[LayerBranch], split: Sequence[Sequence[int]] | None
    ) -> None:
        """What happens to each layer's misses; split: the table of those that are split, of
        [buckets][misses + 1] fills, where there are any."""
        self._to_fill = tuple(branch is not LayerBranch.CPU for branch in branches)
        self._set_fillable()
        fill_all = self._dispatch.fill_counts.select(0, 0)
        table = fill_all if any(self._to_fill) else torch.zeros_like(fill_all)
        told: Sequence[Sequence[int]] = table.tolist()
        for layer, branch in enumerate(branches):
            if branch is LayerBranch.SPLIT and split is not None:
                self._dispatch.set_fill_counts(layer, split)
                told = split
        self._table = tuple(map(tuple, told))

    def preload(self) -> None:
        """Fill the slots with experts, layer by layer, as far as whole layers have room."""
        layers_count = self.slots_count // self._mapped.bank.experts_per_layer_count
        for layer in range(min(layers_count, self._mapped.bank.moe_layers_count)):
            self._sweeps.load(layer)
            self._synchronize()
        self.note_step()

    def resize(self, slots_count: int) -> ResizeResult:
        """Have exactly this many slots; errors as of `SlotPool.resize`, and ResourceError for fewer
        than a step needs.

        Also between two layers of a sweep: what is on its way is waited for, and its slots become
        the first to go.
        """
        if slots_count < self._least_slots:
            raise ResourceError(
                f"a cache whose misses are all filled needs {self._least_slots} slots or more, "
                f"not {slots_count}: one token's experts.",
                reason=Reason.DEVICE_MEMORY,
            )
        return self._resized(slots_count)

    def empty(self) -> None:
        """Give all slots back; no step may run until `resize`."""
        self._resized(0)

    def _resized(self, slots_count: int) -> ResizeResult:
        self._sweeps.let_go()
        self._synchronize()
        try:
            result = self._pool.resize(slots_count)
        finally:
            self._sweeps.set_slots(self._pool.slots_count)
        self.note_step()
        return result

    def verify(self, progress: Callable[[], None] = lambda: None) -> VerifyReport:
        """Compare every resident slot with the pool; progress: called after each."""
        self._synchronize()
        return self._pool.verify(self._mapped, progress)

    def check_integrity(self) -> None:
        """Every invariant of slots, state and memory; InternalError names what breaks."""
        self._synchronize()
        self._pool.check_integrity()

    def note_step(self) -> None:
        """After a step or a sweep: InternalError when it is void; else keep what it counted."""
        self._dispatch.check()
        resident = (self._pool.state.slot_of_expert != NOT_RESIDENT).sum().view(1)
        counted = (self._dispatch.totals, self._sweeps.totals)
        told = torch.cat((*(one.flatten() for one in counted), resident)).cpu()
        steps_count = self._dispatch.totals.numel()
        swept = told[steps_count:-1].view(self._sweeps.totals.shape).tolist()
        stepped = told[:steps_count].view(self._dispatch.totals.shape).tolist()
        self._sweeps.check(swept)
        self._seen = _Seen(
            totals=tuple(map(tuple, stepped)),
            resident_count=int(told[-1]),
            streamed_count=sum(row[Stat.FILLS] for row in swept),
        )

    def counters(self) -> CacheCounters:
        """From any thread: as of the last step."""
        seen, record_bytes = self._seen, self._pool.record_bytes
        fills_count = seen.streamed_count + sum(row[Stat.FILLS] for row in seen.totals)
        return CacheCounters(
            slots_count=self.slots_count,
            slots_capacity=self.slots_capacity,
            resident_count=seen.resident_count,
            slot_bytes=record_bytes,
            committed_bytes=self._pool.committed_bytes,
            generation=self._pool.generation,
            fill_counts=self._table,
            layers=tuple(
                LayerCounters(
                    hits_count=row[Stat.HITS],
                    misses_count=row[Stat.MISSES],
                    fills_count=row[Stat.FILLS],
                    cpu_count=row[Stat.CPU],
                    evictions_count=row[Stat.EVICTIONS],
                )
                for row in seen.totals
            ),
            fills_count=fills_count,
            fill_bytes=fills_count * record_bytes,
            streamed_count=seen.streamed_count,
        )

    @property
    def executions_count(self) -> int:
        """(token, expert) pairs, wherever they were computed; as of the last step."""
        return self._sweeps.pairs_count + sum(row[Stat.PAIRS] for row in self._seen.totals)

    def _set_fillable(self) -> None:
        pinned = fillable_layers(self._mapped.bank, self._registration.registered_bytes)
        self._dispatch.set_fillable(
            [wanted and there for wanted, there in zip(self._to_fill, pinned, strict=True)]
        )

    def close(self) -> None:
        """Give slots and registration back; no step may run any more."""
        self._synchronize()
        self._close_first()
        self._registration.close()
        self._pool.close()


class NotingRunner:
    """A TokenRunner over logits of a device: `executor` chooses, after the cache has noted the
    step."""

    def __init__(
        self,
        program: StepRunner,
        cache: DeviceCache,
        executor: Executor,
        *,
        queued: Callable[[], None] = lambda: None,
    ) -> None:
        """queued: is called when a step is queued, before it is waited for."""
        self._program = program
        self._cache = cache
        self._executor = executor
        self._queued = queued
        self._finished_count = 0

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def finished_count(self) -> int:
        """Steps; from any thread."""
        return self._finished_count

    def choose(self, step: StepInput, kv: KvView) -> ChosenTokens:
        """As of `TokenRunner`. InternalError for a step that is void."""
        chosen = sample_logits(self._executor, self.logits(step, kv), step.sampling)
        self._finished_count += 1
        return chosen

    def logits(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """Of a step that was computed and noted: fp32 [S', vocab] on the host. As of `choose`."""
        there = self._program.forward(step, kv)
        self._queued()
        logits = there.cpu()
        self._cache.note_step()
        return logits
