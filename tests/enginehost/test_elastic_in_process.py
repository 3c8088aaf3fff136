"""The engine process on the host device: KV pages that come and go while streams run, sleep and
wake, with what the kernel shows of its memory."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from freetokend.core.errors import FreetokenError, Reason
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import (
    EngineSettings,
    EngineSnapshot,
    EngineState,
    FinishReason,
    ResizeCache,
    ResizeOutcome,
    SleepEngine,
    WakeEngine,
)
from tests.enginehost.engine_process import native_engine
from tests.enginehost.streams import each_alone, three_requests, three_streams

pytestmark = pytest.mark.slow

MIB = 1 << 20
TOKENS = 300
SLOTS, PAGES = 10, 64
SETTINGS = EngineSettings(
    model="tiny", max_running_count=4, device="host", backend="hybrid", slots_count=SLOTS
)

# Its KV pages can take hundreds of MiB.
LARGE = replace(SETTINGS, max_running_count=64)


@pytest.fixture(scope="module")
def expected(deep: FtwDirectory) -> list[list[int]]:
    return each_alone(deep, TOKENS)


def anonymous_bytes(snapshot: EngineSnapshot) -> int:
    """Of the engine process, as the kernel counts it."""
    for line in Path(f"/proc/{snapshot.pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel tells nothing of the engine's memory")


async def test_kv_pages_come_and_go_while_streams_run(
    deep: FtwDirectory, expected: list[list[int]]
) -> None:
    async with native_engine(deep, settings=SETTINGS) as harness:
        await harness.wait_state(EngineState.READY)
        await harness.supervisor.resize_cache(SLOTS, kv_pages_count=PAGES)
        streams = asyncio.create_task(three_streams(harness, TOKENS))
        outcomes = set()
        sizes = itertools.cycle((30, 200, 12, 64, 1, 40, 100, 10))
        while not streams.done():
            pages = next(sizes)
            slots = 1 + pages % 32
            answer = await harness.supervisor.resize_cache(slots, kv_pages_count=pages)
            outcomes.add(answer.outcome)
            if answer.outcome is ResizeOutcome.DEFERRED:
                assert answer.kv_pages_count > pages
                assert "may need" in answer.note or "are in use" in answer.note
            else:
                assert (answer.slots_count, answer.kv_pages_count) == (slots, pages)
        assert await streams == expected
        assert {ResizeOutcome.DONE, ResizeOutcome.DEFERRED} <= outcomes
        verified = await harness.supervisor.verify_cache()
        assert verified.differences == ()


async def test_a_deferred_shrink_is_done_when_it_comes_again(deep: FtwDirectory) -> None:
    async with native_engine(deep, settings=SETTINGS) as harness:
        await harness.wait_state(EngineState.READY)
        supervisor = harness.supervisor
        started = await supervisor.resize_cache(SLOTS, kv_pages_count=PAGES)
        stream = supervisor.generate(three_requests(TOKENS)[0])
        await anext(stream)
        command = ResizeCache(
            generation=started.generation + 1, slots_count=SLOTS + 5, kv_pages_count=2
        )
        first = await supervisor.carry_out(command)
        assert first.outcome is ResizeOutcome.DEFERRED
        assert first.slots_count == SLOTS, "nothing grows before what shrinks has shrunk"
        assert 2 < first.kv_pages_count < PAGES, "what nobody needs is given back at once"
        assert first.kv_bytes < first.kv_before_bytes
        async for _ in stream:
            pass
        again = await supervisor.carry_out(command)
        assert again.outcome is ResizeOutcome.DONE
        assert (again.slots_count, again.kv_pages_count) == (SLOTS + 5, 2)
        assert await supervisor.carry_out(command) == again
        seen = await harness.wait_until(lambda now: now.stats.kv_pages_total_count == 2)
        assert seen.stats.servable_context_tokens == 64
        assert seen.description is not None
        assert seen.description.servable_context_tokens == 64, "as clients are told it"
        assert seen.stats.kv_bytes == again.kv_bytes
        assert seen.stats.generation == command.generation
        # What is accepted now is what the smaller pool can finish.
        short = await harness.collect(replace(three_requests(TOKENS)[1], request_id="short"))
        assert short[-1].finish_reason is FinishReason.LENGTH
        assert short[-1].completion_tokens == 64 - 9


async def test_memory_of_pages_is_taken_and_given_back(deep: FtwDirectory) -> None:
    async with native_engine(deep, settings=LARGE) as harness:
        ready = await harness.wait_state(EngineState.READY)
        assert ready.description is not None
        memory = ready.description.memory
        assert memory is not None
        assert memory.on_host
        supervisor = harness.supervisor
        small = await supervisor.resize_cache(SLOTS, kv_pages_count=PAGES)
        pages = PAGES + -(-64 * MIB // memory.kv_page_bytes)
        seen = await harness.wait_until(lambda now: now.stats.kv_pages_capacity_count > 0)
        assert pages < seen.stats.kv_pages_capacity_count
        before_bytes = anonymous_bytes(harness.supervisor.snapshot())
        for _ in range(10):
            large = await supervisor.resize_cache(SLOTS, kv_pages_count=pages)
            assert large.kv_bytes - large.kv_before_bytes >= 64 * MIB - 2 * MIB
            grown_bytes = anonymous_bytes(supervisor.snapshot()) - before_bytes
            assert abs(grown_bytes - (large.kv_bytes - small.kv_bytes)) < 8 * MIB
            back = await supervisor.resize_cache(SLOTS, kv_pages_count=PAGES)
            assert back.kv_bytes == small.kv_bytes
            assert anonymous_bytes(supervisor.snapshot()) - before_bytes < 8 * MIB
        with pytest.raises(FreetokenError, match="KV pages of 32 tokens, not 0") as refused:
            await supervisor.resize_cache(SLOTS, kv_pages_count=0)
        assert refused.value.reason is Reason.INVALID_REQUEST


async def test_it_sleeps_and_wakes_and_loses_no_request(
    deep: FtwDirectory, expected: list[list[int]]
) -> None:
    async with native_engine(deep, settings=LARGE) as harness:
        await harness.wait_state(EngineState.READY)
        supervisor = harness.supervisor
        large = 2048
        awake = await supervisor.resize_cache(32, kv_pages_count=large)
        busy = supervisor.generate(three_requests(TOKENS)[0])
        await anext(busy)
        command = SleepEngine(generation=awake.generation + 1)
        refused = await supervisor.carry_out(command)
        assert refused.outcome is ResizeOutcome.DEFERRED
        assert refused.note == "1 requests run; the engine sleeps when none does."
        async for _ in busy:
            pass
        # After the steps, which allocate too.
        awake_bytes = anonymous_bytes(supervisor.snapshot())
        slept = await supervisor.carry_out(command)
        assert slept.outcome is ResizeOutcome.DONE
        assert (slept.slots_count, slept.kv_pages_count) == (0, 0)
        assert (slept.committed_bytes, slept.kv_bytes) == (0, 0)
        freed_bytes = awake_bytes - anonymous_bytes(supervisor.snapshot())
        assert freed_bytes > (awake.committed_bytes + awake.kv_bytes) - 4 * MIB
        asleep = await harness.wait_until(lambda now: now.stats.asleep)
        assert asleep.state is EngineState.READY
        assert asleep.stats.kv_bytes == asleep.stats.fixed_held_bytes == 0
        # Requests that come now wait, and are seen to wait.
        streams = asyncio.create_task(three_streams(harness, TOKENS))
        await harness.wait_until(lambda now: now.stats.waiting_count == 3)
        nothing = await supervisor.carry_out(
            ResizeCache(generation=command.generation + 1, slots_count=4)
        )
        assert nothing.outcome is ResizeOutcome.FAILED
        assert "asleep" in nothing.sentence
        too_much = await supervisor.carry_out(
            WakeEngine(generation=command.generation + 2, slots_count=4, kv_pages_count=1 << 40)
        )
        assert too_much.outcome is ResizeOutcome.FAILED
        assert supervisor.snapshot().stats.asleep
        assert not streams.done()
        woken = await supervisor.carry_out(
            WakeEngine(generation=command.generation + 3, slots_count=6, kv_pages_count=PAGES)
        )
        assert (woken.outcome, woken.slots_count) == (ResizeOutcome.DONE, 6)
        assert woken.kv_pages_count == PAGES
        assert await streams == expected
        await harness.wait_until(lambda now: not now.stats.asleep)


async def test_what_woke_smaller_refuses_what_it_cannot_hold(deep: FtwDirectory) -> None:
    async with native_engine(deep, settings=SETTINGS) as harness:
        await harness.wait_state(EngineState.READY)
        supervisor = harness.supervisor
        await supervisor.carry_out(SleepEngine(generation=1))
        large = asyncio.create_task(harness.collect(three_requests(TOKENS)[0]))
        small = asyncio.create_task(
            harness.collect(replace(three_requests(TOKENS)[1], max_new_tokens=20))
        )
        await harness.wait_until(lambda now: now.stats.waiting_count == 2)
        woken = await supervisor.carry_out(
            WakeEngine(generation=2, slots_count=4, kv_pages_count=2)
        )
        assert woken.outcome is ResizeOutcome.DONE
        (end,) = await large
        assert end.error_reason is Reason.ENGINE_UNAVAILABLE
        assert "64 tokens" in end.error_message
        assert (await small)[-1].completion_tokens == 20
