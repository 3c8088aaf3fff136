"""What every engine behind the link must do, whatever computes its tokens.

A test class takes `LinkContract` as base and provides a class-scoped `harness` fixture with a
running engine, and `prompt`, token ids that the engine's vocabulary has.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time

import pytest

from freetokend.core.errors import FreetokenError, Reason, UnavailableError
from freetokend.link.messages import (
    EngineState,
    FinishReason,
    GenerateRequest,
    ResizeOutcome,
    SequenceUpdate,
)
from tests.support.scripted import DEADLINE_S, EngineHarness, greedy


def token_ids(updates: list[SequenceUpdate]) -> tuple[int, ...]:
    """All tokens of one request."""
    return tuple(token for update in updates for token in update.token_ids)


class LinkContract:
    """The contract; every test leaves the engine ready and idle."""

    prompt: tuple[int, ...] = (11, 12, 13)

    def request(self, name: str, max_new_tokens: int = 8) -> GenerateRequest:
        """A request that runs to its token limit."""
        return greedy(name, self.prompt, max_new_tokens, ignore_eos=True)

    def endless(self, harness: EngineHarness, name: str) -> GenerateRequest:
        """A request as long as the engine allows: it is never finished when a test acts on it."""
        description = harness.supervisor.snapshot().description
        assert description is not None
        return self.request(name, description.servable_context_tokens - len(self.prompt))

    async def test_ready_engine_describes_itself(self, harness: EngineHarness) -> None:
        description = harness.supervisor.snapshot().description
        assert description is not None
        assert description.model
        assert description.device
        assert description.backend_reason
        assert description.servable_context_tokens > 0
        assert description.max_running_count > 0

    async def test_request_ends_once_with_true_counts(self, harness: EngineHarness) -> None:
        updates = await harness.collect(self.request("counts"))
        assert [u.finish_reason for u in updates[:-1]] == [None] * (len(updates) - 1)
        last = updates[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert len(token_ids(updates)) == 8
        assert last.completion_tokens == 8
        assert last.prompt_tokens == len(self.prompt)
        assert {u.request_id for u in updates} == {"counts"}

    async def test_one_token(self, harness: EngineHarness) -> None:
        updates = await harness.collect(self.request("one", max_new_tokens=1))
        assert len(token_ids(updates)) == 1
        assert updates[-1].finish_reason is FinishReason.LENGTH

    async def test_stop_token_is_counted_but_not_emitted(self, harness: EngineHarness) -> None:
        emitted = token_ids(await harness.collect(self.request("reference")))
        stop = emitted[2]
        request = greedy("stop", self.prompt, 8, stop_token_ids=(stop,))
        updates = await harness.collect(request)
        assert updates[-1].finish_reason is FinishReason.STOP
        assert token_ids(updates) == emitted[: emitted.index(stop)]
        assert updates[-1].completion_tokens == emitted.index(stop) + 1

    async def test_64_streams_equal_a_solo_run(self, harness: EngineHarness) -> None:
        solo = token_ids(await harness.collect(self.request("solo", 16)))
        streams = await asyncio.gather(
            *(harness.collect(self.request(f"stream-{index}", 16)) for index in range(64))
        )
        assert [token_ids(updates) for updates in streams] == [solo] * 64

    async def test_slow_reader_gets_everything_and_delays_nobody(
        self, harness: EngineHarness
    ) -> None:
        slow = harness.supervisor.generate(self.request("slow", 32))
        quick = token_ids(await harness.collect(self.request("quick", 32)))
        async with asyncio.timeout(DEADLINE_S):
            while harness.supervisor.in_flight_count:
                await harness.collect(self.request("filler", 1))
            updates = [update async for update in slow]
        assert token_ids(updates) == quick
        assert len(updates) == 1, "what was not read yet must be one merged update"

    async def test_cancel_frees_the_sequence(self, harness: EngineHarness) -> None:
        before = harness.supervisor.snapshot().stats.decode_tokens_count
        request = self.endless(harness, "cancelled")
        stream = harness.supervisor.generate(request)
        async with asyncio.timeout(DEADLINE_S):
            await anext(stream)
            await stream.aclose()
        assert harness.supervisor.in_flight_count == 0
        snapshot = await harness.wait_until(
            lambda s: not s.busy and s.stats.running_count == 0 and s.stats.waiting_count == 0
        )
        assert before < snapshot.stats.decode_tokens_count < before + request.max_new_tokens
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    async def test_dropped_stream_is_cancelled(self, harness: EngineHarness) -> None:
        stream = harness.supervisor.generate(self.endless(harness, "dropped"))
        async with asyncio.timeout(DEADLINE_S):
            await anext(stream)
        del stream
        await harness.wait_until(lambda s: not s.busy and s.stats.running_count == 0)

    async def test_cache_commands_are_answered(self, harness: EngineHarness) -> None:
        description = harness.supervisor.snapshot().description
        assert description is not None
        if description.cache is None:
            for call in (harness.supervisor.verify_cache(), harness.supervisor.resize_cache(1)):
                with pytest.raises(FreetokenError, match="no expert cache: backend") as refusal:
                    await call
                assert refusal.value.reason is Reason.DEVICE_UNUSABLE
            assert harness.supervisor.snapshot().cache is None
            return
        layers_count = sum(run.layers_count for run in description.cache.layer_runs)
        assert layers_count == description.moe_layers_count
        seen = (await harness.wait_until(lambda now: now.cache is not None)).cache
        assert seen is not None
        assert len(seen.layers) == layers_count
        assert seen.slots_capacity == description.cache.slots_capacity
        await harness.collect(self.request("cached"))
        verified = await harness.supervisor.verify_cache()
        assert verified.differences == ()
        assert 0 < verified.compared_count <= seen.slots_count
        same = await harness.supervisor.resize_cache(seen.slots_count)
        assert same.outcome is ResizeOutcome.UNCHANGED
        with pytest.raises(FreetokenError, match="can have 0 to"):
            await harness.supervisor.resize_cache(seen.slots_capacity + 1)

    async def test_a_resize_while_requests_run(self, harness: EngineHarness) -> None:
        now = harness.supervisor.snapshot().cache
        if now is None:
            return
        solo = token_ids(await harness.collect(self.request("before", 32)))
        stream = harness.supervisor.generate(self.request("resized", 32))
        smaller = now.slots_count // 2
        async with asyncio.timeout(DEADLINE_S):
            first = await anext(stream)
            answer = await harness.supervisor.resize_cache(smaller)
            rest = [update async for update in stream]
        assert (answer.outcome, answer.slots_count) == (ResizeOutcome.DONE, smaller)
        assert token_ids([first, *rest]) == solo
        await harness.wait_until(
            lambda seen: seen.cache is not None and seen.cache.slots_count == smaller
        )
        again = await harness.supervisor.resize_cache(now.slots_count)
        assert again.outcome is ResizeOutcome.DONE

    async def test_killed_engine_ends_requests_and_comes_back(self, harness: EngineHarness) -> None:
        before = harness.supervisor.snapshot()
        assert before.pid is not None
        streams = [
            harness.supervisor.generate(self.endless(harness, f"lost-{index}"))
            for index in range(3)
        ]
        async with asyncio.timeout(DEADLINE_S):
            for stream in streams:
                await anext(stream)
        os.kill(before.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            lasts = [[update async for update in stream][-1] for stream in streams]
        assert time.monotonic() - killed_s < 2.0
        for last in lasts:
            assert last.finish_reason is FinishReason.ERROR
            assert last.error_reason is Reason.ENGINE_FAILED
            assert "SIGKILL" in last.error_message
        with pytest.raises(UnavailableError) as refusal:
            harness.supervisor.generate(self.request("too-early"))
        assert refusal.value.reason is Reason.ENGINE_UNAVAILABLE
        assert refusal.value.retry_after_s is not None
        after = await harness.wait_state(EngineState.READY)
        assert after.restarts_count == before.restarts_count + 1
        assert after.pid != before.pid
        assert "SIGKILL" in after.cause
        await harness.collect(self.request("again"))

    async def test_stop_ends_the_engine(self, harness: EngineHarness) -> None:
        pid = harness.supervisor.snapshot().pid
        assert pid is not None
        watch = os.pidfd_open(pid)
        try:
            await harness.supervisor.stop(drain_timeout_s=1.0)
            assert select.select([watch], [], [], 0) == ([watch], [], [])
        finally:
            os.close(watch)
        assert harness.supervisor.snapshot().state is EngineState.STOPPED
        with pytest.raises(UnavailableError):
            harness.supervisor.generate(self.request("after-stop"))
