"""The controller's services over real sockets, with an engine and a card under the test's hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.api.control.v1 import control_pb2_grpc as pb_grpc
from freetokend.control import ControlPlane
from freetokend.control.elastic import EventKind, EventRing
from freetokend.control.elastic.engine_view import EngineView
from freetokend.control.elastic.wants import Wants
from freetokend.control.probes.ports import ProbeError
from freetokend.core.errors import UnavailableError
from freetokend.link.messages import CacheResized, EngineSnapshot, EngineState, ResizeOutcome
from freetokend.policy.controller import Reason, ReasonCode, Resize
from tests.control.fakes import (
    CACHE,
    CACHED,
    CACHED_STATS,
    MEMORY,
    FakeGateway,
    FakeOperations,
    config,
)
from tests.fakes.nvml import GIB, FakeGpu
from tests.fakes.probes import ScriptedGpu

CUDA = replace(CACHED, device=f"cuda:{FakeGpu().uuid}", memory=replace(MEMORY, on_host=False))
DEADLINE_S = 30.0


def have_cache(gateway: FakeGateway, gpu: ScriptedGpu, *, used: int = 2 * GIB) -> None:
    """An engine with a cache, on a card that can be read."""
    gpu.error, gpu.gpus = None, [FakeGpu(used=used)]
    gateway.set(description=CUDA, cache=CACHE, stats=CACHED_STATS)


async def looked(
    plane: ControlPlane, gpu: ScriptedGpu, until: Callable[[], object] = lambda: True
) -> None:
    """Look until it is so; the scripted card's time goes on."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            gpu.now_s = time.monotonic()
            await plane.machine.look()
            await plane.elastic.next_tick()
            if until():
                return
            await asyncio.sleep(0.02)


@pytest.fixture
async def looking(plane: ControlPlane, gpu: ScriptedGpu):  # type: ignore[no-untyped-def]
    """The card is looked at all the time."""
    task = asyncio.create_task(looked(plane, gpu, lambda: False))
    yield task
    task.cancel()


async def ask(admin: grpc.aio.Channel, **fields: object) -> pb.ResizeResponse:
    request = pb.ResizeRequest(**{"wait": True, **fields})  # type: ignore[arg-type]
    return await pb_grpc.AdminStub(admin).Resize(request, timeout=DEADLINE_S)


async def test_a_resize_tells_what_happened(
    plane: ControlPlane,
    gateway: FakeGateway,
    gpu: ScriptedGpu,
    operations: FakeOperations,
    admin: grpc.aio.Channel,
    looking: object,
) -> None:
    have_cache(gateway, gpu)
    reply = await ask(admin, slots_count=20)
    assert reply.outcome == pb.RESIZE_OUTCOME_DONE
    assert (reply.before.slots_count, reply.after.slots_count) == (12, 20)
    # KV goes to what is best for the room, too.
    assert reply.after.size_bytes - reply.before.size_bytes == (40 << 20) + (1 << 30)
    assert reply.safe_point_wait_s == 0.25
    assert reply.stall_s == 0.0125
    assert reply.reason_code == "operator"
    (command,) = operations.commands
    assert (command.generation, command.slots_count) == (reply.generation, 20)
    events = plane.elastic.events.after(0)
    assert [(e.kind, e.generation) for e in events if e.generation] == [
        (EventKind.RESIZE, reply.generation),
        (EventKind.RESIZED, reply.generation),
    ]
    assert (await ask(admin, slots_count=20)).outcome == pb.RESIZE_OUTCOME_UNCHANGED
    assert len(operations.commands) == 1
    half = await ask(admin, slots_ratio=0.5)
    assert (half.before.slots_count, half.after.slots_count) == (20, 12)


@pytest.mark.parametrize(
    ("fields", "told", "param"),
    [
        ({"slots_count": 0}, "slots_count = 0 is out of range; it must be from 1 to 24", ""),
        ({"slots_count": 25}, "from 1 to 24", "slots_count"),
        ({"slots_ratio": 0.0}, "slots_ratio = 0 is out of range", "slots_ratio"),
        ({"slots_ratio": float("nan")}, "slots_ratio = nan", "slots_ratio"),
        ({"slots_ratio": 1.01}, "to 1", "slots_ratio"),
        ({"vram_bytes": 1}, "vram_bytes = 1 is out of range", "vram_bytes"),
        ({"kv_tokens": 31}, "from 32 to 65536", "kv_tokens"),
        ({"kv_tokens": 65537}, "from 32 to 65536", "kv_tokens"),
        ({"preset": "turbo"}, 'preset = "turbo" is unknown', "preset"),
        ({}, "nothing was asked for", "size"),
    ],
)
async def test_what_cannot_be_is_refused_with_field_and_range(
    plane: ControlPlane,
    gateway: FakeGateway,
    gpu: ScriptedGpu,
    operations: FakeOperations,
    admin: grpc.aio.Channel,
    fields: dict[str, object],
    told: str,
    param: str,
) -> None:
    have_cache(gateway, gpu)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(admin, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert told in (refused.value.details() or "")
    metadata = dict(refused.value.trailing_metadata() or ())
    assert metadata["freetoken-param"] == (param or "slots_count")
    assert operations.commands == []


async def test_without_a_cache_or_an_engine_nothing_is_resized(
    plane: ControlPlane, gateway: FakeGateway, admin: grpc.aio.Channel
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no expert cache, so") as refused:
        await ask(admin, slots_count=1)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    gateway.set(state=EngineState.LOADING, description=None)
    with pytest.raises(grpc.aio.AioRpcError, match="not ready") as refused:
        await ask(admin, slots_count=1)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_card_that_cannot_be_read_leaves_a_wish_pending(
    plane: ControlPlane,
    gateway: FakeGateway,
    gpu: ScriptedGpu,
    operations: FakeOperations,
    admin: grpc.aio.Channel,
) -> None:
    have_cache(gateway, gpu)
    gpu.error = ProbeError("the driver says Unknown Error")
    await plane.machine.look()
    reply = await ask(admin, slots_count=20, wait=False)
    assert reply.outcome == pb.RESIZE_OUTCOME_PENDING
    assert reply.reason_code == "gpu-unknown"
    assert (reply.after.slots_count, operations.commands) == (12, [])
    gpu.error = None
    await looked(plane, gpu, lambda: operations.commands)
    assert operations.commands[0].slots_count == 20


async def test_an_answer_that_does_not_come_is_asked_for_again(
    plane: ControlPlane,
    gateway: FakeGateway,
    gpu: ScriptedGpu,
    operations: FakeOperations,
    admin: grpc.aio.Channel,
    looking: object,
) -> None:
    have_cache(gateway, gpu)
    operations.command_error = UnavailableError("no answer")
    asked = asyncio.create_task(ask(admin, slots_count=20))
    async with asyncio.timeout(DEADLINE_S):
        while len(operations.commands) < 2:
            await plane.elastic.next_tick()
    operations.command_error = None
    reply = await asked
    assert reply.outcome == pb.RESIZE_OUTCOME_DONE
    assert {command.generation for command in operations.commands} == {reply.generation}


async def test_a_refusal_of_the_engine_is_told(
    plane: ControlPlane,
    gateway: FakeGateway,
    gpu: ScriptedGpu,
    operations: FakeOperations,
    admin: grpc.aio.Channel,
    looking: object,
) -> None:
    have_cache(gateway, gpu)
    operations.outcome, operations.note = ResizeOutcome.FAILED, "the driver has no memory"
    reply = await ask(admin, slots_count=20)
    assert reply.outcome == pb.RESIZE_OUTCOME_FAILED
    assert "the driver has no memory" in reply.reason
    assert reply.after.slots_count == 12


async def test_a_grab_shrinks_the_cache_and_says_why(
    plane: ControlPlane,
    gateway: FakeGateway,
    gpu: ScriptedGpu,
    operations: FakeOperations,
    monitor: grpc.aio.Channel,
) -> None:
    have_cache(gateway, gpu)
    await looked(plane, gpu, lambda: plane.elastic.state.budget_bytes)
    assert operations.commands == []
    free = FakeGpu().total - FakeGpu().reserved
    gpu.gpus = [FakeGpu(used=free - (3 << 29) + (30 << 20))]  # 30 MiB of the cushion
    await looked(plane, gpu, lambda: operations.commands)
    assert 2 <= operations.commands[0].slots_count < 12
    call = pb_grpc.MonitorStub(monitor).WatchEvents(pb.WatchEventsRequest())
    told = [reply.event async for reply in call]
    decided = next(event for event in told if event.kind == pb.EVENT_KIND_RESIZE)
    assert decided.code == "vram-taken"
    assert "cushion" in decided.text
    assert decided.before.slots_count == 12
    status = (await pb_grpc.MonitorStub(monitor).GetStatus(pb.GetStatusRequest())).status
    assert status.elastic.actual.slots_count == operations.commands[0].slots_count


async def test_a_hold_lasts_as_long_as_its_call(
    plane: ControlPlane,
    gateway: FakeGateway,
    gpu: ScriptedGpu,
    admin: grpc.aio.Channel,
    monitor: grpc.aio.Channel,
    looking: object,
) -> None:
    have_cache(gateway, gpu)
    request = pb.HoldRequest(vram_bytes=8 * GIB, reason=" a  game ", pids=[777])
    call = pb_grpc.AdminStub(admin).Hold(request)
    async with asyncio.timeout(DEADLINE_S):
        while not (reply := await call.read()).granted:
            pass
    assert reply.hold.reason == "a game"
    listed = await pb_grpc.MonitorStub(monitor).ListHolds(pb.ListHoldsRequest())
    assert [(hold.vram_bytes, list(hold.pids)) for hold in listed.holds] == [(8 * GIB, [777])]
    assert (plane.elastic.state.required_free_bytes or 0) >= 8 * GIB
    call.cancel()
    async with asyncio.timeout(DEADLINE_S):
        while plane.elastic.wants.holds:
            await plane.elastic.next_tick()
    kinds = [event.kind for event in plane.elastic.events.after(0)]
    assert kinds.index(EventKind.HOLD) < kinds.index(EventKind.RELEASED)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"vram_bytes": 0, "reason": "x"}, "vram_bytes = 0 is out of range"),
        ({"vram_bytes": 1, "reason": " "}, "reason has 0 characters"),
        ({"vram_bytes": 1, "reason": "x" * 201}, "reason has 201 characters"),
    ],
)
async def test_a_hold_without_size_or_reason_is_refused(
    admin: grpc.aio.Channel, plane: ControlPlane, fields: dict[str, object], told: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=told) as refused:
        await pb_grpc.AdminStub(admin).Hold(pb.HoldRequest(**fields)).read()  # type: ignore[arg-type]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert plane.elastic.wants.holds == ()


async def test_events_are_replayed_from_a_number_and_followed(
    plane: ControlPlane, monitor: grpc.aio.Channel
) -> None:
    events = plane.elastic.events
    first = events.newest_id
    for text in ("a", "b", "c"):
        events.add(EventKind.PROBE, "failing", text)
    stub = pb_grpc.MonitorStub(monitor)
    call = stub.WatchEvents(pb.WatchEventsRequest(after_index=first + 1, follow=True))
    async with asyncio.timeout(DEADLINE_S):
        assert [(await call.read()).event.text for _ in range(2)] == ["b", "c"]
        events.add(EventKind.PROBE, "works", "d")
        assert (await call.read()).event.text == "d"
    call.cancel()
    other_run = stub.WatchEvents(pb.WatchEventsRequest(after_index=9999))
    assert [r.event.text async for r in other_run][-4:] == ["a", "b", "c", "d"]


async def test_the_ring_keeps_the_newest_and_counts_all() -> None:
    ring = EventRing(kept_count=3, wall_clock=lambda: 7.0)
    for number in range(5):
        ring.add(EventKind.HOLD, "x", str(number))
    assert [event.event_id for event in ring.after(0)] == [3, 4, 5]
    assert ring.after(5) == ()
    assert ring.counts[EventKind.HOLD] == 5
    assert ring.counts[EventKind.SLEEP] == 0


def test_a_heartbeat_from_before_an_answer_is_not_believed() -> None:
    view = EngineView()
    command = Resize(
        generation=1,
        slots_count=5,
        kv_pages_count=9,
        urgent=True,
        reason=Reason(code=ReasonCode.VRAM_TAKEN, text=""),
    )

    def slots(count: int) -> int:
        snapshot = EngineSnapshot(
            state=EngineState.READY,
            state_since_s=0.0,
            model="demo",
            pid=1,
            description=CUDA,
            stats=CACHED_STATS,
            cache=replace(CACHE, slots_count=count),
        )
        facts = view.facts(snapshot, 0.0)
        assert facts is not None
        return facts.slots_count

    assert slots(12) == 12
    view.heard(command, CacheResized(generation=1, outcome=ResizeOutcome.DONE, slots_count=5))
    assert slots(12) == 5  # it was on its way
    assert slots(6) == 6


def test_what_a_sleeping_engine_keeps_of_the_card_is_counted() -> None:
    def held(*, asleep: bool, fixed_held_bytes: int) -> int:
        stats = replace(CACHED_STATS, asleep=asleep, fixed_held_bytes=fixed_held_bytes)
        snapshot = EngineSnapshot(
            state=EngineState.READY,
            state_since_s=0.0,
            model="demo",
            pid=1,
            description=CUDA,
            stats=stats,
            cache=CACHE,
        )
        facts = EngineView().facts(snapshot, 0.0)
        assert facts is not None
        return facts.fixed_held_bytes

    awake_bytes = held(asleep=False, fixed_held_bytes=0)
    assert awake_bytes > 0
    assert held(asleep=True, fixed_held_bytes=0) == 0
    assert held(asleep=True, fixed_held_bytes=7 << 20) == 7 << 20


def test_the_switch_leaves_the_operators_word_and_the_holds(tmp_path: Path) -> None:
    wants = Wants(config(tmp_path, elastic__enabled=False, elastic__process_rules="x=1GiB"))
    wants.hold(GIB, "x", frozenset())
    spec = wants.spec(24 * GIB, follows=True)
    assert (spec.rules, spec.limits.cushion_bytes, len(spec.holds)) == ((), 0, 1)
    wants = Wants(config(tmp_path, elastic__process_rules="x=1GiB", elastic__hold_s=5))
    spec = wants.spec(24 * GIB, follows=True)
    assert len(spec.rules) == 1
    assert (spec.limits.hold_s, spec.limits.hold_most_s) == (5, 40)
    assert spec.limits.cushion_bytes == 3 << 29
