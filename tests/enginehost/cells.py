"""The shapes that an expert cache can have, and one run of requests through each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from freetokend.core.cache_stats import LayerCounters
from freetokend.engine.work import SweepEngine
from freetokend.enginehost.built import BuiltEngine
from freetokend.experts.cache import ExpertCache
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import GenerateRequest
from freetokend.policy.backend_choice import LayerBranch
from tests.enginehost.local_engine import Served, local_engine, step

SHRINK_AT, GROW_AT = 0.3, 0.7  # of the tokens


class Pinned(StrEnum):
    """Which layers can be filled."""

    ALL = "pinned"
    HALF = "half pinned"
    NONE = "pageable"


class Split(StrEnum):
    """Who takes the misses of the layers that can be filled."""

    FILL = "fill only"
    CPU = "CPU only"
    BOTH = "split"


class Slots(StrEnum):
    """How many there are at first."""

    TOP_K = "top_k"
    TOP_K_AND_ONE = "top_k + 1"
    HALF = "half"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape; swept: prompts stream whole layers."""

    pinned: Pinned
    split: Split
    slots: Slots
    swept: bool

    @property
    def name(self) -> str:
        return f"{self.pinned}, {self.split}, {self.slots} slots" + ", swept" * self.swept


def all_cells() -> Iterator[Cell]:
    """Every combination."""
    for pinned in Pinned:
        for split in Split:
            for slots in Slots:
                for swept in (False, True):
                    yield Cell(pinned=pinned, split=split, slots=slots, swept=swept)


NO_ROOM: Final = "a sweep needs room for two layers, so prompts go on demand as in the cell without"
VOID_SLOTS: Final = (Slots.TOP_K, Slots.TOP_K_AND_ONE)
# Cells that there is nothing to run for, and why.
VOID: Final = {
    cell.name: NO_ROOM for cell in all_cells() if cell.swept and cell.slots in VOID_SLOTS
}


@dataclass(slots=True, kw_only=True)
class Shaped:
    """An engine of one pinning and one split, for all numbers of slots."""

    built: BuiltEngine
    cache: ExpertCache
    pinned: Pinned
    split: Split
    before: tuple[LayerCounters, ...] = field(default=())

    def slots_count(self, slots: Slots) -> int:
        top_k = self.built.facts.experts_per_token_count
        match slots:
            case Slots.TOP_K:
                return top_k
            case Slots.TOP_K_AND_ONE:
                return top_k + 1
            case Slots.HALF:
                return self.cache.slots_capacity // 2
            case Slots.ALL:
                return self.cache.slots_capacity

    def start(self, slots: Slots) -> None:
        """Nothing resident, so many slots; where the CPU takes all misses, slots are filled
        before, for without hits nothing would be computed there."""
        self.cache.resize(0)
        self.cache.resize(self.slots_count(slots))
        layers = self.cache.counters().layers
        if self.split is Split.CPU:
            fillable = layers_that_fill(self.pinned, len(layers))
            self.cache.set_branches(
                [LayerBranch.FILL if one else LayerBranch.CPU for one in fillable]
            )
            self.cache.preload()
            self.cache.set_branches([LayerBranch.CPU] * len(layers))
        self.before = self.cache.counters().layers

    def resizes(self, slots: Slots) -> tuple[int, int]:
        """What it shrinks to in the middle, and grows to again: more than before if it can."""
        count = self.slots_count(slots)
        return max(count // 2, 1), min(2 * count, self.cache.slots_capacity)

    def check(self) -> None:
        """The cache is whole, and misses went where the cell says."""
        self.cache.check_integrity()
        assert self.cache.verify().differences == ()
        now = self.cache.counters()
        fillable = layers_that_fill(self.pinned, len(now.layers))
        fills = [new.fills_count - old.fills_count for new, old in self._layers(now.layers)]
        cpu = [new.cpu_count - old.cpu_count for new, old in self._layers(now.layers)]
        misses = [new.misses_count - old.misses_count for new, old in self._layers(now.layers)]
        hits = [new.hits_count - old.hits_count for new, old in self._layers(now.layers)]
        assert misses == [a + b for a, b in zip(fills, cpu, strict=True)]
        for layer, can_fill in enumerate(fillable):
            if not can_fill or self.split is Split.CPU:
                assert fills[layer] == 0
            elif self.split is Split.FILL:
                assert cpu[layer] == 0
        if self.pinned is not Pinned.NONE:
            assert sum(hits) > 0
            assert (sum(fills) > 0) is (self.split is not Split.CPU)
        if self.split is not Split.FILL or self.pinned is not Pinned.ALL:
            assert sum(cpu) > 0

    def _layers(
        self, now: tuple[LayerCounters, ...]
    ) -> Iterable[tuple[LayerCounters, LayerCounters]]:
        return zip(now, self.before, strict=True)


def layers_that_fill(pinned: Pinned, count: int) -> list[bool]:
    """By MoE layer: the first half is pageable where half is pinned."""
    match pinned:
        case Pinned.ALL:
            return [True] * count
        case Pinned.HALF:
            return [layer >= count // 2 for layer in range(count)]
        case Pinned.NONE:
            return [False] * count


@contextmanager
def shaped_engine(directory: FtwDirectory, pinned: Pinned, split: Split) -> Iterator[Shaped]:
    """An engine whose cache takes any number of slots; half of several misses are filled where
    both take them, so that no measurement decides what a test runs."""
    count = directory.index.expert_bank.moe_layers_count
    experts_count = directory.index.expert_bank.experts_per_layer_count
    pageable = [n for n, fills in enumerate(layers_that_fill(pinned, count)) if not fills]
    with local_engine(
        directory,
        device="host",
        backend="offload" if split is Split.FILL else "hybrid",
        layers=",".join(f"{layer}=cpu" for layer in pageable),
    ) as built:
        assert isinstance(built.cache, ExpertCache)
        built.cache.set_fill_counts([[misses // 2 for misses in range(experts_count + 1)]])
        yield Shaped(built=built, cache=built.cache, pinned=pinned, split=split)


def serve_resized(shaped: Shaped, request: GenerateRequest, slots: Slots) -> list[int]:
    """The tokens of one request, with a live resize down and one up on the way."""
    built = shaped.built
    smaller, larger = shaped.resizes(slots)
    count = request.max_new_tokens
    at = {int(SHRINK_AT * count): smaller, int(GROW_AT * count): larger}
    served = Served()
    built.scheduler.submit(request)
    steps = 0
    while step(built, served):
        steps += 1
        if steps in at:
            assert shaped.cache.resize(at.pop(steps)).slots_count in (smaller, larger)
            shaped.cache.check_integrity()
    served.take(built.scheduler.take_updates())
    assert not at
    return served.tokens[request.request_id]


def serve_swept(
    built: BuiltEngine,
    running: list[GenerateRequest],
    prompts: list[GenerateRequest],
    *,
    between: Callable[[int], None] = lambda _: None,
    steps_between: int = 1,
) -> tuple[Served, int]:
    """`running` decode while all of `prompts` are prefilled in sweeps; what all got, and the
    number of sweeps. between: called with the number of the layer that was computed last."""
    engine = built.engine
    assert isinstance(engine, SweepEngine)
    served = Served()
    for request in running:
        built.scheduler.submit(request)
    for _ in range(len(running) and 4):
        step(built, served)
    for request in prompts:
        built.scheduler.submit(request)
    built.scheduler.set_sweep_from(2)
    sweeps = 0
    while (work := built.scheduler.plan_sweep()) is not None:
        sweeps += 1
        sweep = engine.begin_sweep(work)
        layer = 0
        while (outcome := sweep.advance()) is None:
            between(layer)
            layer += 1
            for _ in range(steps_between):
                step(built, served)
        built.scheduler.commit_sweep(outcome)
        built.scheduler.check_integrity()
        served.take(built.scheduler.take_updates())
    while step(built, served):
        pass
    served.take(built.scheduler.take_updates())
    return served, sweeps
