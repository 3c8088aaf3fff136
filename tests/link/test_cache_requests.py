"""Commands to the expert cache, from control to a real scripted engine and back."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from freetokend.core.errors import FreetokenError, Reason, UnavailableError
from freetokend.link.cache_requests import CacheRequests
from freetokend.link.messages import (
    CacheCommand,
    CacheResized,
    CacheVerified,
    EngineState,
    ResizeCache,
    ResizeOutcome,
    SlotDifference,
    VerifyCache,
)
from freetokend.policy.restart import RestartBudget
from tests.support.scripted import DEADLINE_S, greedy, scripted_engine


async def test_an_engine_that_still_loads_has_no_cache() -> None:
    script = {"faults": [{"at": "load", "action": "hang"}], "cache": {}}
    async with scripted_engine(script) as harness:
        await harness.wait_state(EngineState.LOADING)
        with pytest.raises(UnavailableError, match="not ready"):
            await harness.supervisor.verify_cache()


async def test_damaged_slots_are_named() -> None:
    script = {"cache": {"damaged": [[1, 5, 3, 4096]]}}
    async with scripted_engine(script) as harness:
        await harness.wait_state(EngineState.READY)
        answer = await harness.supervisor.verify_cache()
        assert answer.differences == (
            SlotDifference(layer_index=1, expert_index=5, slot_index=3, offset_bytes=4096),
        )


async def test_a_refusal_of_the_engine_is_raised_with_its_reason() -> None:
    script = {"cache": {"resize_refusal": "no memory: 3 GiB are needed, 1 GiB is free"}}
    async with scripted_engine(script) as harness:
        await harness.wait_state(EngineState.READY)
        with pytest.raises(FreetokenError, match="3 GiB are needed") as refusal:
            await harness.supervisor.resize_cache(9)
        assert refusal.value.reason is Reason.INVALID_REQUEST


async def test_an_engine_that_dies_meanwhile_is_told() -> None:
    script: dict[str, Any] = {
        "tokens": {"kind": "cycle"},
        "cache": {},
        "faults": [{"at": "step", "step_index": 2, "action": "hang", "once": True}],
    }
    budget = RestartBudget(restarts_count=2, first_delay_s=0.01, delay_factor=1.0)
    async with scripted_engine(script, budget=budget) as harness:
        ready = await harness.wait_state(EngineState.READY)
        stream = harness.supervisor.generate(greedy("r"))
        async with asyncio.timeout(DEADLINE_S):
            await anext(stream)
            # It hangs in its second step now, and takes no message any more.
            call = asyncio.create_task(harness.supervisor.verify_cache())
            await asyncio.sleep(0)
            assert ready.pid is not None
            os.kill(ready.pid, signal.SIGKILL)
            with pytest.raises(UnavailableError, match=r"SIGKILL.*try again when it is ready"):
                await call
        await harness.wait_until(
            lambda now: now.state is EngineState.READY and now.pid != ready.pid
        )
        assert (await harness.supervisor.resize_cache(5)).slots_count == 5


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[CacheCommand] = []

    def __call__(self, command: CacheCommand) -> None:
        self.sent.append(command)


async def test_answers_find_their_calls_in_any_order() -> None:
    requests, wire = CacheRequests(), Wire()
    calls = [
        asyncio.create_task(requests.resize(wire, 7, 5.0)),
        asyncio.create_task(requests.resize(wire, 3, 5.0)),
    ]
    check = asyncio.create_task(requests.verify(wire, 5.0))
    await asyncio.sleep(0)
    first, second, third = wire.sent
    assert isinstance(first, ResizeCache)
    assert isinstance(second, ResizeCache)
    assert isinstance(third, VerifyCache)
    assert first.generation < second.generation
    requests.answered(CacheVerified(request_id=third.request_id, compared_count=4))
    requests.answered(CacheResized(generation=second.generation, outcome=ResizeOutcome.DONE))
    requests.answered(CacheResized(generation=first.generation, outcome=ResizeOutcome.SUPERSEDED))
    assert [(await call).outcome for call in calls] == [
        ResizeOutcome.SUPERSEDED,
        ResizeOutcome.DONE,
    ]
    assert (await check).compared_count == 4
    # Repeated answers, and those to calls that are over, hurt nobody.
    requests.answered(CacheResized(generation=first.generation, outcome=ResizeOutcome.DONE))
    requests.answered(CacheVerified(request_id="unheard-of"))


async def test_a_silent_engine_is_not_waited_for_for_ever() -> None:
    with pytest.raises(UnavailableError, match=r"did not answer within 0\.01 s"):
        await CacheRequests().verify(Wire(), 0.01)
