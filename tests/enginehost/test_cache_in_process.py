"""The engine process on the host device: live resizes while streams run, and a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from freetokend.core.errors import FreetokenError, Reason
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import (
    EngineSettings,
    EngineState,
    ResizeOutcome,
)
from tests.enginehost.engine_process import native_engine
from tests.enginehost.streams import each_alone, stream_tokens, three_requests, three_streams

pytestmark = pytest.mark.slow

EXPERTS = 32
SETTINGS = EngineSettings(
    model="tiny", max_running_count=4, device="host", backend="hybrid", slots_count=10
)
TOKENS = 400
LONG_TOKENS = 2500


@pytest.fixture(scope="module")
def expected(deep: FtwDirectory) -> list[list[int]]:
    return each_alone(deep, TOKENS)


async def test_resizes_while_streams_run_lose_nothing(
    deep: FtwDirectory, expected: list[list[int]]
) -> None:
    async with native_engine(deep, settings=SETTINGS) as harness:
        await harness.wait_state(EngineState.READY)
        streams = asyncio.create_task(three_streams(harness, TOKENS))
        sizes = (EXPERTS, 1, 16, 3, 24, 10)
        while not streams.done():
            for size in sizes:
                answer = await harness.supervisor.resize_cache(size)
                assert answer.outcome in (ResizeOutcome.DONE, ResizeOutcome.UNCHANGED)
                assert answer.slots_count == size
        assert await streams == expected
        verified = await harness.supervisor.verify_cache()
        assert verified.compared_count > 0
        assert verified.differences == ()


async def test_a_resize_holds_up_one_step_at_most(deep: FtwDirectory) -> None:
    """Counted in steps, not in time: however close resizes follow each other, a step is computed
    between any two. Answers and reports come in the order in which the engine made them."""
    asked = [replace(one, max_new_tokens=LONG_TOKENS) for one in three_requests(TOKENS)]
    async with native_engine(deep, settings=SETTINGS) as harness:
        await harness.wait_state(EngineState.READY)
        streams = asyncio.gather(*(stream_tokens(harness, request) for request in asked))
        before = (await harness.wait_until(lambda now: now.stats.running_count > 0)).stats
        resizes_count = 0
        while True:
            await harness.supervisor.resize_cache(1 + resizes_count % EXPERTS)
            now = harness.supervisor.snapshot().stats
            if now.running_count == 0:
                break
            resizes_count += 1
            assert now.steps_count - before.steps_count >= resizes_count - 1
        assert [len(one) for one in await streams] == [LONG_TOKENS] * len(asked)
        assert resizes_count > 5


async def test_two_resizes_at_once_and_bad_values_are_answered_truly(deep: FtwDirectory) -> None:
    async with native_engine(deep, settings=SETTINGS) as harness:
        await harness.wait_state(EngineState.READY)
        answers = await asyncio.gather(
            harness.supervisor.resize_cache(4), harness.supervisor.resize_cache(20)
        )
        assert answers[1].outcome is ResizeOutcome.DONE
        assert answers[1].slots_count == 20
        assert answers[0].outcome in (ResizeOutcome.DONE, ResizeOutcome.SUPERSEDED)
        beyond = EXPERTS + 1
        with pytest.raises(FreetokenError, match=f"0 to {EXPERTS} slots, not {beyond}") as caught:
            await harness.supervisor.resize_cache(beyond)
        assert caught.value.reason is Reason.INVALID_REQUEST
        again = await harness.supervisor.resize_cache(20)
        assert (again.outcome, again.slots_count) == (ResizeOutcome.UNCHANGED, 20)


async def test_a_killed_engine_comes_back_with_the_same_cache(
    deep: FtwDirectory, expected: list[list[int]]
) -> None:
    async with native_engine(deep, settings=SETTINGS) as harness:
        first = await harness.wait_state(EngineState.READY)
        assert first.description is not None
        assert first.description.cache is not None
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        second = await harness.wait_until(
            lambda now: now.state is EngineState.READY and now.pid != first.pid
        )
        assert second.description is not None
        assert second.description.cache is not None
        assert second.description.cache.slots_count == first.description.cache.slots_count == 10
        assert second.description.backend == "hybrid"
        assert second.description.device == "host"
        assert await three_streams(harness, TOKENS) == expected
