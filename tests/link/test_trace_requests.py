"""Recordings as control sees them: one at a time, bounded, and over when the engine is."""

from __future__ import annotations

import asyncio

import pytest

from freetokend.core.errors import FreetokenError, Reason, UnavailableError
from freetokend.link.messages import EngineState
from freetokend.link.trace_messages import (
    RoutedRows,
    StartTrace,
    StopTrace,
    TraceCommand,
    TracedStep,
    TraceEnded,
    TraceStarted,
)
from freetokend.link.trace_requests import TraceRecording, TraceRequests
from tests.support.scripted import scripted_engine


class Wire:
    """What was sent; answers a start with `answer`, None: not at all."""

    def __init__(self, requests: TraceRequests, *, error: Reason | None = None) -> None:
        self.requests = requests
        self.sent: list[TraceCommand] = []
        self.error = error
        self.silent = False

    def __call__(self, command: TraceCommand) -> None:
        self.sent.append(command)
        if isinstance(command, StartTrace) and not self.silent:
            self.requests.told(
                TraceStarted(
                    trace_id=command.trace_id,
                    layers_count=3,
                    error_reason=self.error,
                    error_message="not here",
                )
            )

    async def start(self, timeout_s: float = 5.0) -> TraceRecording:
        started, recording = await self.requests.start(self, timeout_s)
        assert started.layers_count == 3
        return recording


def step(trace_id: str, size: int = 10) -> TracedStep:
    rows = RoutedRows(is_prefill=False, rows_count=1, expert_ids=bytes(size))
    return TracedStep(trace_id=trace_id, parts=(rows,))


async def test_steps_come_in_order_and_closing_stops_the_engine() -> None:
    requests = TraceRequests()
    wire = Wire(requests)
    recording = await wire.start()
    requests.told(step("trace-1", 1))
    requests.told(step("unheard-of", 2))
    requests.told(step("trace-1", 3))
    found = [await recording.next(), await recording.next()]
    assert [len(one.parts[0].expert_ids) for one in found if isinstance(one, TracedStep)] == [1, 3]
    waiting = asyncio.create_task(recording.next())
    await asyncio.sleep(0)
    requests.told(step("trace-1", 4))
    assert await waiting == step("trace-1", 4)
    recording.close()
    recording.close()
    requests.told(step("trace-1"))
    assert wire.sent == [StartTrace(trace_id="trace-1"), StopTrace(trace_id="trace-1")]


async def test_one_at_a_time() -> None:
    wire = Wire(TraceRequests())
    first = await wire.start()
    with pytest.raises(UnavailableError, match="one recording at a time") as caught:
        await wire.start()
    assert caught.value.reason is Reason.QUEUE_FULL
    first.close()
    assert (await wire.start()).trace_id == "trace-2"


async def test_a_slow_reader_gets_what_there_was_and_the_reason() -> None:
    requests = TraceRequests(queue_bytes=100)
    wire = Wire(requests)
    recording = await wire.start()
    requests.told(step("trace-1", 1000))  # one step is always taken
    requests.told(step("trace-1", 1))
    requests.told(step("trace-1", 1))
    assert wire.sent[-1] == StopTrace(trace_id="trace-1")
    assert isinstance(await recording.next(), TracedStep)
    ended = await recording.next()
    assert isinstance(ended, TraceEnded)
    assert ended.error_reason is Reason.QUEUE_FULL
    assert "1000 bytes" in ended.error_message
    assert await recording.next() == ended
    recording.close()
    assert len(wire.sent) == 2, "it was stopped already"
    await wire.start()


async def test_the_engine_ends_it_or_is_lost() -> None:
    requests = TraceRequests()
    wire = Wire(requests)
    recording = await wire.start()
    ended = TraceEnded(trace_id="trace-1", error_reason=Reason.HOST_MEMORY, error_message="big")
    requests.told(step("trace-1"))
    requests.told(ended)
    assert isinstance(await recording.next(), TracedStep)
    assert await recording.next() == ended
    recording = await wire.start()
    waiting = asyncio.create_task(recording.next())
    await asyncio.sleep(0)
    requests.fail(Reason.ENGINE_FAILED, "the engine died")
    lost = await waiting
    assert isinstance(lost, TraceEnded)
    assert (lost.error_reason, lost.error_message) == (Reason.ENGINE_FAILED, "the engine died")
    requests.fail(Reason.ENGINE_FAILED, "again")
    assert await recording.next() == lost


async def test_a_refusal_a_silence_and_a_death_meanwhile_leave_it_free() -> None:
    requests = TraceRequests()
    wire = Wire(requests, error=Reason.MODEL_UNSUPPORTED)
    with pytest.raises(FreetokenError, match="not here") as caught:
        await wire.start()
    assert caught.value.reason is Reason.MODEL_UNSUPPORTED
    wire.error, wire.silent = None, True
    with pytest.raises(UnavailableError, match=r"within 0\.01 s"):
        await wire.start(0.01)
    assert wire.sent[-1] == StopTrace(trace_id="trace-2"), "should the answer still come"
    starting = asyncio.create_task(wire.start())
    await asyncio.sleep(0)
    requests.fail(Reason.ENGINE_FAILED, "the engine died")
    with pytest.raises(FreetokenError, match="the engine died"):
        await starting
    starting = asyncio.create_task(wire.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert wire.sent[-1] == StopTrace(trace_id="trace-4")
    wire.silent = False
    await wire.start()


async def test_a_scripted_engine_says_that_it_cannot() -> None:
    async with scripted_engine({"tokens": {"kind": "cycle"}}) as harness:
        await harness.wait_state(EngineState.READY)
        for _ in range(2):
            with pytest.raises(FreetokenError, match="scripted") as caught:
                await harness.supervisor.record_trace()
            assert caught.value.reason is Reason.MODEL_UNSUPPORTED


async def test_an_engine_that_still_loads_records_nothing() -> None:
    async with scripted_engine({"faults": [{"at": "load", "action": "hang"}]}) as harness:
        await harness.wait_state(EngineState.LOADING)
        with pytest.raises(UnavailableError, match="not ready, so nothing can be recorded"):
            await harness.supervisor.record_trace()
