"""Recordings of real engines say what an observer of every op sees, and change no token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from freetokend.core.errors import Reason
from freetokend.engine.step import Engine
from freetokend.engine.work import StepWork, SweepEngine
from freetokend.enginehost.build import PAGE_TOKENS, build_engine
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.probe import TokenProbe
from freetokend.enginehost.routed_steps import routed_steps
from freetokend.enginehost.trace_control import STEP_CAPACITY_IDS
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.reader import FtwDirectory
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.link.messages import EngineSettings, EngineState, GenerateRequest
from freetokend.link.trace_messages import TracedStep, TraceEnded
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.program import Experts, Op
from freetokend.traces.trace import SKIPPED, Phase, TraceShape
from tests.enginehost.engine_process import native_engine
from tests.enginehost.local_engine import PLENTY, ask, attach, new_pool
from tests.support.scripted import DEADLINE_S, EngineHarness

SHAPE = TraceShape(layers_count=4, experts_per_layer=8, experts_per_token=2)
HOST = {"device": "host", "backend": "hybrid", "slots_count": 10}
SWEEPS: dict[str, int | str] = {"device": "host", "backend": "offload", "slots_count": 20}
Ids = NDArray[np.uint16]


def requests() -> list[GenerateRequest]:
    return [ask(f"r{one}", range(7 * one, 7 * one + 5 + 40 * one), 9) for one in range(4)]


class Observer:
    """The routing of the step in progress, op by op."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, NDArray[np.int32]]] = []

    def __call__(self, op: Op, buffer: Callable[[int], torch.Tensor]) -> None:
        if isinstance(op, Experts):
            self.layers.append((op.moe_layer_index, buffer(op.ids).numpy().copy()))

    def expected(self, work: StepWork) -> dict[Phase, Ids]:
        """Row by row: [layers, rows, k] by phase."""
        layers, self.layers = self.layers, []
        assert [layer for layer, _ in layers] == list(range(SHAPE.layers_count))
        rows: dict[Phase, list[list[list[int]]]] = {phase: [] for phase in Phase}
        token = output = 0
        for one in work.sequences:
            writes = bool(one.draw_index) and len(one.token_ids) == 1
            for offset in range(len(one.token_ids)):
                last = offset + 1 == len(one.token_ids) and one.draw_index is not None
                row = [ids[token].tolist() for _, ids in layers[:-1]]
                row.append(layers[-1][1][output].tolist() if last else [SKIPPED] * 2)
                rows[Phase.DECODE if writes else Phase.PREFILL].append(row)
                token, output = token + 1, output + last
        return {
            phase: np.array(found, dtype=np.uint16).swapaxes(0, 1)
            for phase, found in rows.items()
            if found
        }


@contextmanager
def engines(
    directory: FtwDirectory, observer: Observer, **settings: int | str
) -> Iterator[tuple[BuiltEngine, Engine]]:
    """The engine that serves, and one over the same weights that is observed."""
    index = directory.index
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    with new_pool(directory) as pool, attach(pool, directory).mapping as mapping:
        built = build_engine(
            directory,
            mapping.region_address,
            EngineSettings(model="tiny", **settings),  # type: ignore[arg-type]
            cpus,
            PLENTY,
        )
        executor = Executor(cpus)
        try:
            facts = built.facts
            shape = KvShape(
                layers_count=facts.layers_count,
                kv_heads_count=facts.kv_heads_count,
                head_size=facts.head_size,
                element_bytes=2,
                page_tokens=PAGE_TOKENS,
            )
            program = NativeProgram(
                build_program(directory.model_config()),
                PoolWeights(mapping.region_address, index),
                executor,
                bank_experts(index.expert_bank, mapping.region_address),
                observer=observer,
            )
            arena = KvArena(shape, built.kv_plan.pages_count)
            yield built, Engine(program, NativeKvStore(executor, arena))
        finally:
            executor.close()
            if built.cache is not None:
                built.cache.close()


@pytest.mark.parametrize("settings", [{"backend": "cpu"}, HOST], ids=["cpu", "host"])
def test_every_step_is_told_as_an_observer_sees_it(
    deep: FtwDirectory, settings: dict[str, int | str]
) -> None:
    observer = Observer()
    with engines(deep, observer, step_tokens=80, kv_bytes=4 << 20, **settings) as (built, observed):
        assert built.taps is not None
        built.taps.steps.start(STEP_CAPACITY_IDS)
        kinds = set()
        for one in requests():
            built.scheduler.submit(one)
        while (work := built.scheduler.plan()) is not None:
            outcome = built.engine.run(work)
            assert observed.run(work) == outcome
            steps = routed_steps(work, built.taps.steps.take(), SHAPE)
            expected = observer.expected(work)
            assert [one.phase for one in steps] == [phase for phase in Phase if phase in expected]
            for step in steps:
                assert np.array_equal(step.ids, expected[step.phase])
            kinds.add(tuple(step.phase for step in steps))
            built.scheduler.commit(outcome)
        assert kinds == {(Phase.PREFILL,), (Phase.PREFILL, Phase.DECODE), (Phase.DECODE,)}


def test_a_sweep_is_told_as_an_observer_sees_it_whatever_is_computed_between_its_layers(
    deep: FtwDirectory,
) -> None:
    observer = Observer()
    with engines(deep, observer, **SWEEPS) as (built, observed):
        taps = built.taps
        assert taps is not None
        assert taps.sweeps is not None
        assert isinstance(built.engine, SweepEngine)
        probe = TokenProbe(built.engine, built.allocator, 1)
        built.scheduler.submit(requests()[3])
        work = built.scheduler.plan()
        assert work is not None
        for tap in taps.all:
            tap.start(STEP_CAPACITY_IDS)
        sweep = built.engine.begin_sweep(work)
        while (outcome := sweep.advance()) is None:
            taps.steps.clear()
            probe.run()
        assert observed.run(work) == outcome
        (step,) = routed_steps(work, taps.sweeps.take(), SHAPE)
        assert np.array_equal(step.ids, observer.expected(work)[Phase.PREFILL])
        assert len(taps.steps.take().layers) == SHAPE.layers_count


def observed_alone(directory: FtwDirectory, request: GenerateRequest) -> list[Ids]:
    """The whole request: of prompt and answer."""
    observer = Observer()
    found: dict[Phase, list[Ids]] = {phase: [] for phase in Phase}
    with engines(directory, observer, backend="cpu") as (built, observed):
        built.scheduler.submit(request)
        while (work := built.scheduler.plan()) is not None:
            built.scheduler.commit(observed.run(work))
            for phase, ids in observer.expected(work).items():
                found[phase].append(ids)
    return [np.concatenate(parts, axis=1) for parts in found.values()]


def ids_of(steps: list[TracedStep]) -> list[Ids]:
    """Of the prompts' rows and of those that write, in the order in which they came."""
    rows: dict[bool, list[Ids]] = {True: [], False: []}
    for step in steps:
        for part in step.parts:
            ids = np.frombuffer(part.expert_ids, dtype="<u2")
            rows[part.is_prefill].append(ids.reshape(4, part.rows_count, 2))
    return [np.concatenate(rows[is_prefill], axis=1) for is_prefill in (True, False)]


async def tokens(harness: EngineHarness, request: GenerateRequest) -> list[int]:
    return [token for one in await harness.collect(request) for token in one.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"backend": "cpu"}, HOST, SWEEPS], ids=["cpu", "host", "sweeps"]
)
async def test_what_control_gets_is_what_the_model_chose(
    deep: FtwDirectory, settings: dict[str, int | str]
) -> None:
    request = requests()[3]
    expected = observed_alone(deep, request)
    asked = EngineSettings(model="tiny", **settings)  # type: ignore[arg-type]
    async with native_engine(deep, settings=asked) as harness:
        await harness.wait_state(EngineState.READY)
        before = await tokens(harness, request)
        started, recording = await harness.supervisor.record_trace()
        assert (started.layers_count, started.experts_per_layer_count) == (4, 8)
        assert started.experts_per_token_count == 2
        assert await tokens(harness, request) == before
        found: list[TracedStep] = []
        async with asyncio.timeout(DEADLINE_S):
            while sum(part.rows_count for step in found for part in step.parts) < 125 + 8:
                step = await recording.next()
                assert isinstance(step, TracedStep)
                found.append(step)
        recording.close()
        for told, seen in zip(ids_of(found), expected, strict=True):
            assert np.array_equal(told, seen)
        # Once more: nothing of the first recording is left.
        _, recording = await harness.supervisor.record_trace()
        assert await tokens(harness, request) == before
        first = await recording.next()
        assert isinstance(first, TracedStep)
        assert first.parts[0].is_prefill
        recording.close()


@pytest.mark.slow
async def test_an_engine_that_is_killed_ends_the_recording_and_the_next_one_can_begin(
    deep: FtwDirectory,
) -> None:
    async with native_engine(deep) as harness:
        ready = await harness.wait_state(EngineState.READY)
        _, recording = await harness.supervisor.record_trace()
        stream = asyncio.create_task(harness.collect(ask("long", range(9), 4000)))
        async with asyncio.timeout(DEADLINE_S):
            first = await recording.next()
            assert isinstance(first, TracedStep)
            assert ready.pid is not None
            os.kill(ready.pid, signal.SIGKILL)
            while isinstance(last := await recording.next(), TracedStep):
                assert last.ids_bytes == 4 * 2 * 2, "whole, whenever it was killed"
            assert isinstance(last, TraceEnded)
            assert last.error_reason is Reason.ENGINE_FAILED
            assert "SIGKILL" in last.error_message
        await stream
        await harness.wait_until(
            lambda now: now.state is EngineState.READY and now.pid != ready.pid
        )
        _, again = await harness.supervisor.record_trace()
        await harness.collect(ask("next", range(9), 2))
        assert isinstance(await again.next(), TracedStep)
        again.close()
