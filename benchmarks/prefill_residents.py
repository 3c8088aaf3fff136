"""What a streamed prefill leaves in the cache, for its own decode steps and for another stream's.

Nothing is timed: traces are replayed through the real cache (with the smallest experts there can
be), so the figures are the same on every machine. A trace's first conversation is the neighbour,
its second one the prompt that is streamed while the neighbour decodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.cached_bank import LayerRunner, RandomBank
from benchmarks.result import Row
from benchmarks.routing_cases import CONVERSATION_SHARE, DRIFT_TOKENS, SYNTHETIC, recorded_trace
from freetokend.experts.cache import ExpertCache
from freetokend.native.executor import Executor
from freetokend.traces.synthetic import Locality, Workload, synthetic_trace
from freetokend.traces.trace import SKIPPED, Phase, RoutingTrace, TraceShape

LOOKED_AT_STEPS: Final = 32
SETTLED_STEPS: Final = 128
MOST_LOST: Final = 0.05
_WORKLOAD: Final = Workload(
    conversations_count=2,
    turns_count=1,
    prompt_tokens=256,
    decode_tokens=SETTLED_STEPS + 2 * LOOKED_AT_STEPS,
)
_HIDDEN_SIZE: Final = 64
_INTERMEDIATE_SIZE: Final = 32
_WEIGHT_FORMAT: Final = "int4_g32_f16"
_SEED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """ids of a prompt, [L, T, k], and of the steps that follow, [L, 1, k] each."""

    prompt: NDArray[np.uint16]
    written: Sequence[NDArray[np.uint16]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two conversations of one model and how many of its experts have slots."""

    name: str
    shape: TraceShape
    resident_ratio: float
    neighbour: Talk
    newcomer: Talk

    @property
    def slots_count(self) -> int:
        return max(
            round(self.resident_ratio * self.shape.experts_count), 2 * self.shape.experts_per_layer
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Misses by needed experts: of the newcomer's first steps, from an empty cache and after its
    prefill; of the neighbour's steps during that prefill and after, without it and with it. narrow:
    during, without it, in a cache without the two layers that the prefill streams through."""

    cold: float
    warm: float
    alone: tuple[float, float]
    beside: tuple[float, float]
    narrow: float


def talks(trace: RoutingTrace) -> list[Talk]:
    """A prompt and what follows it, for each of the trace's prompts."""
    runs = [list(run) for _, run in groupby(trace.steps, key=lambda step: step.phase)]
    return [
        Talk(prompt=_computed(read[0].ids), written=[step.ids for step in written])
        for read, written in zip(runs[::2], runs[1::2], strict=True)
        if read[0].phase is Phase.PREFILL
    ]


def _computed(ids: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Where a layer computed the last token only, all its tokens choose as that one does: the
    layers here are computed for the same number of tokens."""
    return np.where(ids == SKIPPED, ids[:, -1:], ids)


def cases(*, quick: bool) -> list[Case]:
    """The recorded trace at 37 %, and the drawn ones where something was published."""
    recorded = recorded_trace()
    found = [_case("demo model, recorded", recorded, 0.37)]
    for one in SYNTHETIC[: 1 if quick else None]:
        locality = Locality(
            conversation_share=CONVERSATION_SHARE,
            drift_share=one.drift_share,
            drift_tokens=DRIFT_TOKENS,
        )
        drawn = synthetic_trace(one.shape, locality, _WORKLOAD, seed=_SEED)
        found.append(_case(f"{one.name}, drawn", drawn, one.published.capacity_ratio))
    return found


def _case(name: str, trace: RoutingTrace, resident_ratio: float) -> Case:
    neighbour, newcomer = talks(trace)[:2]
    return Case(
        name=name,
        shape=trace.shape,
        resident_ratio=resident_ratio,
        neighbour=neighbour,
        newcomer=newcomer,
    )


class Replay:
    """A case's steps through the cache; every replay begins with an empty one."""

    def __init__(
        self, case: Case, bank: RandomBank, executor: Executor, kept_share: float | None
    ) -> None:
        self._case = case
        self._bank = bank
        self._executor = executor
        self._kept_share = kept_share

    def found(self) -> Found:
        newcomer = self._case.newcomer
        first = newcomer.written[:LOOKED_AT_STEPS]
        with _Streams(self._cache(self._case.slots_count), self._bank, self._executor) as streams:
            cold = streams.decode(first)
        with _Streams(self._cache(self._case.slots_count), self._bank, self._executor) as streams:
            streams.sweep(newcomer.prompt, beside=())
            warm = streams.decode(first)
        slots_count = self._case.slots_count
        windows_count = 2 * self._case.shape.experts_per_layer
        return Found(
            cold=cold,
            warm=warm,
            alone=self._neighbour(None, slots_count),
            beside=self._neighbour(newcomer, slots_count),
            narrow=self._neighbour(None, max(slots_count - windows_count, windows_count))[0],
        )

    def _neighbour(self, newcomer: Talk | None, slots_count: int) -> tuple[float, float]:
        neighbour = self._case.neighbour
        during = neighbour.written[SETTLED_STEPS : SETTLED_STEPS + LOOKED_AT_STEPS]
        after = neighbour.written[SETTLED_STEPS + LOOKED_AT_STEPS :][:LOOKED_AT_STEPS]
        with _Streams(self._cache(slots_count), self._bank, self._executor) as streams:
            streams.sweep(neighbour.prompt, beside=())
            streams.decode(neighbour.written[:SETTLED_STEPS])
            if newcomer is None:
                missed = streams.decode(during)
            else:
                missed = streams.sweep(newcomer.prompt, beside=during)
            return missed, streams.decode(after)

    def _cache(self, slots_count: int) -> ExpertCache:
        return self._bank.cache(slots_count, kept_share=self._kept_share)


class _Streams:
    """Decode steps and sweeps through one cache; closes it."""

    def __init__(self, cache: ExpertCache, bank: RandomBank, executor: Executor) -> None:
        self._cache = cache
        self._bank = bank
        self._executor = executor
        self._decode = LayerRunner(bank, executor, cache.decode, 1)

    def decode(self, steps: Sequence[NDArray[np.uint16]]) -> float:
        """Misses by needed experts of these steps."""
        before = self._counts()
        for ids in steps:
            self._decode.run_layers(list(ids))
        return _missed(before, self._counts())

    def sweep(self, prompt: NDArray[np.uint16], *, beside: Sequence[NDArray[np.uint16]]) -> float:
        """Stream a prompt, with these decode steps spread between its layers; their misses."""
        runner = LayerRunner(self._bank, self._executor, self._cache.sweep, prompt.shape[1])
        before = self._counts()
        self._cache.prefetch(0)
        done_count = 0
        for layer, ids in enumerate(prompt):
            runner.run(layer, ids)
            due_count = len(beside) * (layer + 1) // len(prompt)
            for step in beside[done_count:due_count]:
                self._decode.run_layers(list(step))
            done_count = due_count
        return _missed(before, self._counts())

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.close()

    def _counts(self) -> tuple[int, int]:
        layers = self._cache.counters().layers
        return sum(one.hits_count for one in layers), sum(one.misses_count for one in layers)


def _missed(before: tuple[int, int], after: tuple[int, int]) -> float:
    hits, misses = after[0] - before[0], after[1] - before[1]
    return misses / (hits + misses) if hits + misses else 0.0


def found(case: Case, kept_share: float | None = None) -> Found:
    """Replay a case."""
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    with (
        Executor(cpus) as executor,
        RandomBank(
            case.shape,
            hidden_size=_HIDDEN_SIZE,
            intermediate_size=_INTERMEDIATE_SIZE,
            weight_format=_WEIGHT_FORMAT,
        ) as bank,
    ):
        return Replay(case, bank, executor, kept_share).found()


def resident_rows(*, quick: bool) -> list[Row]:
    """What is judged, for all cases."""
    return [row for case in cases(quick=quick) for row in rows_of(case, found(case))]


def rows_of(case: Case, one: Found) -> list[Row]:
    """The newcomer's gate and the neighbour's: at most 5 points below what it is undisturbed.

    While a prefill is under way its two layers take slots from everybody, whoever they are left to.
    Where that alone costs a neighbour more, its gate is what it loses beyond them, and the row that
    compares with the undisturbed one says why it is not judged.
    """
    where = f"{case.name}, {case.slots_count} slots"
    first = Row(
        case=f"{where}: first {LOOKED_AT_STEPS} steps after a prefill",
        ours=100 * one.warm,
        rival="from empty",
        rival_value=100 * one.cold,
        unit="% missing",
        ratio=one.cold / one.warm if one.warm else 1e9,
        goal=1.0,
        verdict="pass" if one.warm < one.cold else "miss",
    )
    taken = one.narrow - one.alone[0]
    why = f", of which the slots of two layers {-100 * taken:+.1f}" if taken > MOST_LOST else ""
    compared = (
        ("during", why, "undisturbed", one.beside[0], one.alone[0], 1.0 if why else MOST_LOST),
        ("during", "", "without it and its windows", one.beside[0], one.narrow, MOST_LOST),
        ("after", "", "undisturbed", one.beside[1], one.alone[1], MOST_LOST),
    )
    neighbour = [
        Row(
            case=f"{where}: neighbour {when} a prefill, {100 * (alone - beside):+.1f} points{told}",
            ours=100 * (1 - beside),
            rival=rival,
            rival_value=100 * (1 - alone),
            unit="% hit",
            ratio=(1 - beside) / (1 - alone) if alone < 1 else 1.0,
            goal=0.0,
            verdict="reported" if most == 1.0 else "pass" if beside - alone <= most else "miss",
        )
        for when, told, rival, beside, alone, most in compared
    ]
    return [first, *neighbour]
