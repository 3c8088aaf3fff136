"""The gRPC services over real sockets."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.api.control.v1 import control_pb2_grpc as pb_grpc
from freetokend.control import ControlPlane
from freetokend.control.errors import PARAM_KEY, REASON_KEY, RETRY_AFTER_KEY
from freetokend.core.errors import REACTIONS, FreetokenError, InternalError, Reason
from freetokend.link.messages import CacheVerified, EngineState, LoadProgress, SlotDifference
from freetokend.link.trace_messages import TraceEnded
from tests.control.fakes import CACHE, CACHED, FakeGateway, FakeOperations, traced_step


def details(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {key: str(value) for key, value in error.trailing_metadata() or ()}


async def test_status_shows_everything_that_a_ready_engine_says(
    plane: ControlPlane, gateway: FakeGateway, monitor: grpc.aio.Channel
) -> None:
    plane.set_http_address("http://127.0.0.1:8440")
    gateway.set(state_since_s=time.monotonic() - 50)
    gateway.set_stats(running_count=3, waiting_count=2, kv_pages_used_count=5)
    reply = await pb_grpc.MonitorStub(monitor).GetStatus(pb.GetStatusRequest())
    status = reply.status
    assert status.version == "1.2.3"
    assert status.pid == os.getpid()
    assert status.alive
    assert status.ready
    assert status.progressing
    assert status.ready_reason == ""
    assert status.http_address == "http://127.0.0.1:8440"
    assert status.log_level == "info"
    assert status.engine.state == pb.ENGINE_STATE_READY
    assert status.engine.pid == 4711
    assert status.engine.state_for_s == pytest.approx(50, abs=5)
    assert status.engine.first_token_s == 0.4
    assert not status.engine.HasField("load")
    assert status.model.model == "demo"
    assert status.model.servable_context_tokens == 32768
    assert status.device.device == "cpu"
    assert status.device.kernel == "avx2"
    assert status.device.numerics == "fast"
    assert list(status.device.cpus) == [0, 1, 2, 3]
    assert status.device.threads_reason == "one per physical core"
    assert status.model.expert_format == "mxfp4"
    assert list(status.model.dense_formats) == ["int8_g32_f16", "bf16"]
    assert status.pool.size_bytes == 10 << 30
    assert status.pool.pinned_bytes == 10 << 30
    assert status.pool.reattached
    assert status.requests.running_count == 3
    assert status.requests.waiting_count == 2
    assert status.kv.pages_used_count == 5
    assert list(status.warnings) == []


async def test_status_while_loading_shows_bytes_and_says_why_it_is_not_ready(
    gateway: FakeGateway, monitor: grpc.aio.Channel
) -> None:
    load = LoadProgress(stage="read", done_bytes=3 << 30, total_bytes=8 << 30)
    gateway.set(state=EngineState.LOADING, load=load, description=None)
    status = (await pb_grpc.MonitorStub(monitor).GetStatus(pb.GetStatusRequest())).status
    assert not status.ready
    assert status.alive
    assert status.ready_reason == "the model is being loaded: 3 GiB of 8 GiB"
    assert status.engine.load.done_bytes == 3 << 30
    assert not status.HasField("device")
    assert not status.HasField("pool")


@pytest.mark.parametrize("state", EngineState)
async def test_every_engine_state_has_its_name(
    gateway: FakeGateway, monitor: grpc.aio.Channel, state: EngineState
) -> None:
    gateway.set(state=state)
    status = (await pb_grpc.MonitorStub(monitor).GetStatus(pb.GetStatusRequest())).status
    assert pb.EngineState.Name(status.engine.state) == f"ENGINE_STATE_{state.name}"


async def test_a_watch_starts_with_the_full_state_and_follows_changes(
    gateway: FakeGateway, monitor: grpc.aio.Channel
) -> None:
    call = pb_grpc.MonitorStub(monitor).WatchStatus(pb.WatchStatusRequest(interval_s=3600))
    first = (await call.read()).status
    assert first.device.device_name == "Some CPU"
    assert first.generation > 0
    gateway.set_stats(running_count=7)
    async with asyncio.timeout(5):
        while (second := (await call.read()).status).requests.running_count != 7:
            pass
    assert second.generation > first.generation
    call.cancel()


async def test_a_watch_without_changes_speaks_at_the_interval(monitor: grpc.aio.Channel) -> None:
    call = pb_grpc.MonitorStub(monitor).WatchStatus(pb.WatchStatusRequest(interval_s=0.1))
    async with asyncio.timeout(5):
        messages = [(await call.read()).status for _ in range(3)]
    assert messages[2].uptime_s > messages[0].uptime_s
    call.cancel()


async def test_many_changes_are_told_together(
    gateway: FakeGateway, monitor: grpc.aio.Channel
) -> None:
    call = pb_grpc.MonitorStub(monitor).WatchStatus(pb.WatchStatusRequest(interval_s=3600))
    await call.read()
    messages_count = 0
    started_s = time.monotonic()
    for count in range(200):
        gateway.set_stats(decode_tokens_count=count)
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        while (await call.read()).status.requests.decode_tokens_count != 199:
            messages_count += 1
    assert messages_count <= (time.monotonic() - started_s) / 0.1 + 1
    call.cancel()


@pytest.mark.parametrize("interval_s", [-1, 0.01, 4000, float("nan"), float("inf")])
async def test_a_watch_refuses_absurd_intervals(
    monitor: grpc.aio.Channel, interval_s: float
) -> None:
    call = pb_grpc.MonitorStub(monitor).WatchStatus(pb.WatchStatusRequest(interval_s=interval_s))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)[PARAM_KEY] == "interval_s"
    assert "from 0.1 to 3600" in (caught.value.details() or "")


async def test_version_and_configuration(monitor: grpc.aio.Channel, runtime_dir: Path) -> None:
    stub = pb_grpc.MonitorStub(monitor)
    assert (await stub.GetVersion(pb.GetVersionRequest())).version == "1.2.3"
    values = {value.key: value for value in (await stub.GetConfig(pb.GetConfigRequest())).values}
    assert values["service.runtime_dir"].value == f'"{runtime_dir}"'
    assert values["service.runtime_dir"].origin == "command line"
    assert values["engine.backend"].reason == "no NVIDIA GPU is present"


async def test_what_was_left_to_the_engine_says_what_it_chose(
    gateway: FakeGateway, monitor: grpc.aio.Channel
) -> None:
    stub = pb_grpc.MonitorStub(monitor)
    keys = ("engine.kv_bytes", "engine.max_context_tokens", "engine.slots_count")
    gateway.set(description=None)
    values = {one.key: one for one in (await stub.GetConfig(pb.GetConfigRequest())).values}
    assert not any(values[key].reason.startswith("now ") for key in keys)
    gateway.set(description=CACHED)
    values = {one.key: one for one in (await stub.GetConfig(pb.GetConfigRequest())).values}
    assert {values[key].value for key in keys} == {'"auto"'}
    assert values["engine.kv_bytes"].reason.startswith("now 1 GiB; sized by the engine")
    assert values["engine.max_context_tokens"].reason.startswith("now 32768 tokens; ")
    assert values["engine.slots_count"].reason.startswith("now 8 at the start; ")
    # Decided before there was an engine: nothing to add.
    assert values["engine.backend"].reason == "no NVIDIA GPU is present"


async def test_admin_verbs_reach_the_daemon(
    operations: FakeOperations, admin: grpc.aio.Channel
) -> None:
    stub = pb_grpc.AdminStub(admin)
    drained = await stub.Drain(pb.DrainRequest(timeout_s=2.5))
    assert drained.drained
    operations.still_running_count = 3
    late = await stub.Drain(pb.DrainRequest())
    assert (late.drained, late.running_count) == (False, 3)
    await stub.Resume(pb.ResumeRequest())
    assert (await stub.SetLogLevel(pb.SetLogLevelRequest(level="debug"))).previous == "info"
    await stub.Stop(pb.StopRequest(drain=True))
    assert operations.calls == [
        ("drain", 2.5),
        ("drain", 30.0),
        ("resume", None),
        ("log-level", "debug"),
        ("stop", True),
    ]
    status = (await pb_grpc.MonitorStub(admin).GetStatus(pb.GetStatusRequest())).status
    assert status.log_level == "debug"


async def test_the_cache_before_and_with_an_engine_that_has_one(
    gateway: FakeGateway, monitor: grpc.aio.Channel
) -> None:
    stub = pb_grpc.MonitorStub(monitor)
    reply = await stub.GetCache(pb.GetCacheRequest())
    assert not reply.HasField("summary")
    assert reply.absent_reason == "the backend is cpu: no NVIDIA GPU is present"
    assert not (await stub.GetStatus(pb.GetStatusRequest())).status.HasField("cache")

    gateway.set(description=CACHED)
    early = await stub.GetCache(pb.GetCacheRequest())
    assert (early.summary.slots_count, early.summary.slots_capacity_count) == (8, 24)
    assert early.summary.committed_bytes == 8 * CACHED.bytes_per_expert
    assert [layer.branch for layer in early.layers] == ["split", "split", "cpu"]

    gateway.set(cache=CACHE)
    reply = await stub.GetCache(pb.GetCacheRequest())
    assert reply.absent_reason == ""
    assert reply.device.device == "host"
    summary = reply.summary
    assert summary == (await stub.GetStatus(pb.GetStatusRequest())).status.cache
    assert (summary.slots_count, summary.resident_count, summary.experts_count) == (12, 10, 24)
    assert (summary.hits_count, summary.misses_count) == (125, 75)
    assert summary.hit_ratio == 0.625
    assert (summary.decode_fills_count, summary.cpu_count, summary.evictions_count) == (60, 15, 7)
    assert summary.fill_bytes_per_s == (500 << 20) / 0.5
    assert summary.fill_rate_source == "measured at the start"
    assert [layer.hit_ratio for layer in reply.layers] == [0.75, 0.5, 0.0]
    assert [layer.branch_reason for layer in reply.layers][1:] == [
        "split by the rates",
        "set for this layer",
    ]
    assert [(row.up_to_tokens, row.unbounded) for row in reply.fill_table] == [
        (1, False),
        (2, True),
    ]
    assert list(reply.fill_table[1].fill_count) == [0, 1, 2, 2, 3, 3]

    gateway.set(state=EngineState.RESTARTING, description=None, cache=None)
    reply = await stub.GetCache(pb.GetCacheRequest())
    assert reply.absent_reason == "the engine ended and is being restarted"
    assert not reply.HasField("device")


async def test_a_comparison_of_the_cache_is_passed_on(
    operations: FakeOperations, admin: grpc.aio.Channel
) -> None:
    stub = pb_grpc.AdminStub(admin)
    operations.verified = CacheVerified(
        request_id="v",
        compared_count=10,
        compared_bytes=1 << 20,
        duration_s=0.25,
        differences=(
            SlotDifference(layer_index=2, expert_index=7, slot_index=5, offset_bytes=4096),
        ),
    )
    reply = await stub.VerifyCache(pb.VerifyCacheRequest())
    assert (reply.compared_count, reply.compared_bytes) == (10, 1 << 20)
    assert reply.duration_s == 0.25
    assert list(reply.differences) == [
        pb.SlotDifference(layer_index=2, expert_index=7, slot_index=5, offset_bytes=4096)
    ]
    operations.error = FreetokenError("no expert cache", reason=Reason.DEVICE_UNUSABLE)
    with pytest.raises(grpc.aio.AioRpcError, match="no expert cache") as caught:
        await stub.VerifyCache(pb.VerifyCacheRequest())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_recording_is_told_step_by_step_and_ends_with_its_limit(
    operations: FakeOperations, admin: grpc.aio.Channel
) -> None:
    stub = pb_grpc.AdminStub(admin)
    steps = [traced_step((False, [[[0, 1]], [[2, 3]]])) for _ in range(3)]
    operations.recording.items = list(steps)
    found = [one async for one in stub.RecordTrace(pb.RecordTraceRequest(steps_count=2))]
    assert [one.WhichOneof("body") for one in found] == ["started", "step", "step", "ended"]
    assert (found[0].started.layers_count, found[0].started.source) == (2, "made up")
    assert found[1].step.parts[0].expert_ids == steps[0].parts[0].expert_ids
    assert (found[3].ended.steps_count, found[3].ended.error_reason) == (2, "")
    assert operations.recording.closed.is_set()
    # The engine's own end; then a limit of time while nothing comes.
    operations.recording.items = [
        TraceEnded(trace_id="t", error_reason=Reason.ENGINE_FAILED, error_message="it died")
    ]
    for limit_s, cause, reason in ((0.0, "it died", "engine_failed"), (0.05, "time", "")):
        request = pb.RecordTraceRequest(duration_s=limit_s)
        *_, last = [one async for one in stub.RecordTrace(request)]
        assert cause in last.ended.cause
        assert last.ended.error_reason == reason


async def test_a_recording_whose_caller_has_gone_is_closed(
    operations: FakeOperations, admin: grpc.aio.Channel
) -> None:
    call = pb_grpc.AdminStub(admin).RecordTrace(pb.RecordTraceRequest())
    assert (await call.read()).WhichOneof("body") == "started"
    assert not operations.recording.closed.is_set()
    call.cancel()
    async with asyncio.timeout(10):
        await operations.recording.closed.wait()


async def test_a_recording_that_is_refused_has_its_reason(
    operations: FakeOperations, admin: grpc.aio.Channel
) -> None:
    operations.error = FreetokenError("another one", reason=Reason.QUEUE_FULL)
    for request, code in (
        (pb.RecordTraceRequest(), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (pb.RecordTraceRequest(duration_s=-1), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.AdminStub(admin).RecordTrace(request).read()
        assert caught.value.code() is code


async def test_bad_arguments_name_the_field_and_what_is_allowed(admin: grpc.aio.Channel) -> None:
    stub = pb_grpc.AdminStub(admin)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.SetLogLevel(pb.SetLogLevelRequest(level="loud"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)[PARAM_KEY] == "level"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Drain(pb.DrainRequest(timeout_s=-1))
    assert "from 0 to 3600" in (caught.value.details() or "")


@pytest.mark.parametrize("reason", Reason)
async def test_every_typed_error_has_the_status_of_the_table(
    operations: FakeOperations, admin: grpc.aio.Channel, reason: Reason
) -> None:
    operations.error = FreetokenError("what, why, what to do", reason=reason, retry_after_s=1.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pb_grpc.AdminStub(admin).Drain(pb.DrainRequest())
    assert caught.value.code().name == REACTIONS[reason].grpc_status
    assert caught.value.details() == "what, why, what to do"
    assert details(caught.value)[REASON_KEY] == reason
    assert details(caught.value)[RETRY_AFTER_KEY] == "1.500"


@pytest.mark.parametrize("error", [RuntimeError("secret path"), InternalError("told")])
async def test_a_fault_of_ours_is_internal_and_only_typed_ones_are_told(
    operations: FakeOperations, admin: grpc.aio.Channel, error: Exception
) -> None:
    operations.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pb_grpc.AdminStub(admin).Drain(pb.DrainRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert ("told" in (caught.value.details() or "")) == isinstance(error, InternalError)


async def test_the_monitor_socket_has_no_admin_verbs(
    operations: FakeOperations, monitor: grpc.aio.Channel
) -> None:
    stub = pb_grpc.AdminStub(monitor)
    for call in (
        stub.Drain(pb.DrainRequest()),
        stub.Resume(pb.ResumeRequest()),
        stub.Stop(pb.StopRequest()),
        stub.SetLogLevel(pb.SetLogLevelRequest(level="debug")),
        stub.VerifyCache(pb.VerifyCacheRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.RecordTrace(pb.RecordTraceRequest()).read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert operations.calls == []


async def test_health_keeps_alive_and_ready_apart(
    gateway: FakeGateway, monitor: grpc.aio.Channel
) -> None:
    stub = health_pb2_grpc.HealthStub(monitor)
    serving = health_pb2.HealthCheckResponse.SERVING

    async def seen() -> dict[str, bool]:
        names = ["", "liveness", "readiness", "freetokend.control.v1.Monitor"]
        requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
        replies = [await stub.Check(request) for request in requests]
        return {name: reply.status == serving for name, reply in zip(names, replies, strict=True)}

    watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert (await watch.read()).status == serving
    assert all((await seen()).values())
    async with asyncio.timeout(5):
        gateway.set(state=EngineState.RESTARTING)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await seen() == {
            "": True,
            "liveness": True,
            "readiness": False,
            "freetokend.control.v1.Monitor": True,
        }
        gateway.set(state=EngineState.READY)
        assert (await watch.read()).status == serving
        liveness = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await liveness.read()).status == serving
        gateway.set(state=EngineState.FAILED)
        assert (await liveness.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await seen() == {
        "": False,
        "liveness": False,
        "readiness": False,
        "freetokend.control.v1.Monitor": True,
    }
    watch.cancel()
    liveness.cancel()


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    reply = await call.read()
    return {service.name for service in reply.list_services_response.service}


async def test_reflection_lists_what_each_socket_serves(
    admin: grpc.aio.Channel, monitor: grpc.aio.Channel
) -> None:
    common = {
        "freetokend.control.v1.Monitor",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert await reflected(monitor) == common
    assert await reflected(admin) == common | {"freetokend.control.v1.Admin"}


async def test_one_user_cannot_use_up_the_monitor_socket(
    plane: ControlPlane, monitor: grpc.aio.Channel, admin: grpc.aio.Channel
) -> None:
    watch = pb_grpc.MonitorStub(monitor).WatchStatus
    calls = [watch(pb.WatchStatusRequest(interval_s=3600)) for _ in range(64)]
    for call in calls:
        await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pb_grpc.MonitorStub(monitor).GetVersion(pb.GetVersionRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reply = await pb_grpc.MonitorStub(admin).GetVersion(pb.GetVersionRequest())
    assert reply.version == "1.2.3"
    for call in calls:
        call.cancel()
