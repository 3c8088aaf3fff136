"""Layers of decode steps through the real cache with a forced split, checked against the pool.

Both branches run for real; what they did is noted as a `LayerLoad`, to be charged by any clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.cached_bank import LayerRunner, RandomBank
from benchmarks.device_clock import LayerLoad
from benchmarks.routing_cases import recorded_trace
from freetokend.experts.cache import ExpertCache
from freetokend.native.executor import Executor
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.fill_table import token_bucket
from freetokend.traces.synthetic import Locality, Workload, synthetic_trace
from freetokend.traces.trace import Phase, RoutingTrace, TraceShape

# A layer of Qwen3.6-35B-A3B; few layers, for each is emptied before it is called.
COLD_SHAPE: Final = TraceShape(layers_count=2, experts_per_layer=256, experts_per_token=8)
_COLD_LOCALITY: Final = Locality(conversation_share=0.1, drift_share=0.55, drift_tokens=32.0)
RESIDENT_RATIO: Final = 0.37
WARM_STEPS: Final = 32
FillTable = Sequence[Sequence[int]]


class WrongResultError(Exception):
    """A split changed a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One layer's call. bucket: of tokens per expert, as the plan looks it up."""

    load: LayerLoad
    bucket: int


class SplitRunner:
    """Calls through a cache and, for comparison, in the pool."""

    def __init__(
        self, bank: RandomBank, executor: Executor, cache: ExpertCache, tokens_count: int
    ) -> None:
        self._cache = cache
        self._shape = bank.routing
        self._through = LayerRunner(bank, executor, cache.decode, tokens_count)
        self._in_pool = LayerRunner(bank, executor, bank.pool_only(), tokens_count)

    def set_table(self, table: FillTable | None) -> None:
        """Fill as the table says; None: the CPU takes every miss."""
        branch = LayerBranch.CPU if table is None else LayerBranch.SPLIT
        self._cache.set_branches([branch] * self._shape.layers_count)
        if table is not None:
            self._cache.set_fill_counts(table)

    def call(self, layer: int, ids: NDArray[np.integer]) -> Call:
        """Raises WrongResultError when the result is not the pool's, bit by bit."""
        used, tokens = np.unique(ids, return_counts=True)
        before = self._cache.residents(layer).numpy()
        got = self._through.run(layer, ids)
        after = self._cache.residents(layer).numpy()
        if not torch.equal(got, self._in_pool.run(layer, ids)):
            raise WrongResultError(f"layer {layer} differs from the pool's result")
        on_cpu = ~after[used]
        load = LayerLoad(
            hits_count=int(before[used].sum()),
            fills_count=int((~before[used] & after[used]).sum()),
            cpu_tokens=tuple(tokens[on_cpu].tolist()),
        )
        return Call(load=load, bucket=token_bucket(ids.size, len(used), 1 << 30))


def constant_table(fills_count: int, misses_capacity: int) -> list[list[int]]:
    """The same q whatever is missing."""
    return [[min(fills_count, misses) for misses in range(misses_capacity + 1)]]


def share_table(share: float, misses_capacity: int) -> list[list[int]]:
    """The same part of what is missing, at least one."""
    return [[max(round(share * misses), min(misses, 1)) for misses in range(misses_capacity + 1)]]


def cold_ids(tokens_count: int, calls_count: int) -> list[NDArray[np.uint16]]:
    """[T, k] of so many calls: tokens of as many conversations, drawn."""
    workload = Workload(
        conversations_count=tokens_count, turns_count=1, prompt_tokens=1, decode_tokens=calls_count
    )
    trace = synthetic_trace(COLD_SHAPE, _COLD_LOCALITY, workload, seed=4)
    steps = batches(_written(trace), calls_count)
    return [step[index % COLD_SHAPE.layers_count] for index, step in enumerate(steps)]


def recorded_steps(tokens_count: int, steps_count: int) -> list[NDArray[np.uint16]]:
    """[L, T, k] of so many steps: as many places of the recorded trace side by side."""
    written = _written(recorded_trace())
    parts_count = -(-tokens_count // len(written))
    length = len(written[0]) // parts_count
    streams = [
        steps[part * length : (part + 1) * length]
        for part in range(parts_count)
        for steps in written
    ]
    return batches(streams[:tokens_count], steps_count)


def batches(
    streams: Sequence[Sequence[NDArray[np.uint16]]], steps_count: int
) -> list[NDArray[np.uint16]]:
    """Step by step the tokens of all streams, [L, T, k]."""
    return [
        np.concatenate([stream[step] for stream in streams], axis=1) for step in range(steps_count)
    ]


def _written(trace: RoutingTrace) -> list[list[NDArray[np.uint16]]]:
    return [
        [step.ids for step in run]
        for phase, run in groupby(trace.steps, key=lambda step: step.phase)
        if phase is Phase.DECODE
    ]


def cold_calls(
    bank: RandomBank, executor: Executor, tokens_count: int, calls_count: int
) -> list[list[Call]]:
    """For each call what every q from 0 to its misses does, the layer's slots being empty."""
    ids = cold_ids(tokens_count, calls_count)
    cache = bank.cache(COLD_SHAPE.experts_count)
    try:
        runner = SplitRunner(bank, executor, cache, tokens_count)
        return [
            [
                _emptied(cache, runner, fills_count)(index % COLD_SHAPE.layers_count, one)
                for fills_count in range(len(np.unique(one)) + 1)
            ]
            for index, one in enumerate(ids)
        ]
    finally:
        cache.close()


def _emptied(
    cache: ExpertCache, runner: SplitRunner, fills_count: int
) -> Callable[[int, NDArray[np.integer]], Call]:
    cache.resize(0)
    cache.resize(COLD_SHAPE.experts_count)
    experts_count = COLD_SHAPE.experts_per_layer
    runner.set_table(constant_table(fills_count, experts_count) if fills_count else None)
    return runner.call


def replayed_calls(
    bank: RandomBank,
    executor: Executor,
    steps: Sequence[NDArray[np.uint16]],
    table: FillTable | None,
) -> list[Call]:
    """All calls of the steps but the first ones, in which every miss is filled."""
    shape = bank.routing
    cache = bank.cache(round(RESIDENT_RATIO * shape.experts_count))
    try:
        runner = SplitRunner(bank, executor, cache, steps[0].shape[1])
        for step in steps[:WARM_STEPS]:
            for layer, ids in enumerate(step):
                runner.call(layer, ids)
        runner.set_table(table)
        return [
            runner.call(layer, ids) for step in steps[WARM_STEPS:] for layer, ids in enumerate(step)
        ]
    finally:
        cache.close()
