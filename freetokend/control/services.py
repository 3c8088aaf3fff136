"""The gRPC services Monitor and Admin."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.api.control.v1 import control_pb2_grpc as pb_grpc
from freetokend.control.bandwidth import BandwidthKeeper
from freetokend.control.bandwidth_answers import bandwidth_response, measuring
from freetokend.control.cache import cache_response, verify_response
from freetokend.control.checks import check_range
from freetokend.control.config_values import config_values
from freetokend.control.elastic import ElasticLoop, HandResizes
from freetokend.control.elastic_messages import (
    asked_of,
    event_message,
    hold_status,
    resize_response,
)
from freetokend.control.operations import ServiceOperations
from freetokend.control.state import StateKeeper
from freetokend.control.status import status_message
from freetokend.control.traces import recorded
from freetokend.core import logs
from freetokend.core.config.resolved import ResolvedConfig
from freetokend.core.errors import InvalidInputError

_DEFAULT_INTERVAL_S: Final = 1.0
_INTERVAL_RANGE_S: Final = (0.1, 3600.0)
# A step every few milliseconds changes the state; no reader needs more than ten a second.
_SPACING_S: Final = 0.1
_DRAIN_RANGE_S: Final = (0.0, 3600.0)
_TRACE_RANGE_S: Final = (0.0, 7 * 86400.0)
_HOLD_RANGE_BYTES: Final = (1, 1 << 44)
_REASON_LIMIT: Final = 200

_log = logs.logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class MonitorService(pb_grpc.MonitorServicer):
    """Read-only: answers from the keeper's present state and the resolved configuration."""

    def __init__(
        self,
        keeper: StateKeeper,
        config: ResolvedConfig,
        version: str,
        elastic: ElasticLoop,
        bandwidth: BandwidthKeeper,
    ) -> None:
        self._bandwidth = bandwidth
        self._keeper = keeper
        self._elastic = elastic
        self._config = config
        self._version = version

    async def GetStatus(  # noqa: N802 - the name is the protocol's
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """The state now."""
        return pb.GetStatusResponse(status=status_message(self._keeper.state()))

    async def WatchStatus(  # noqa: N802 - the name is the protocol's
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        """The state now, then after every change and at least every `interval_s`."""
        interval_s = request.interval_s or _DEFAULT_INTERVAL_S
        check_range("interval_s", interval_s, _INTERVAL_RANGE_S)
        while True:
            state = self._keeper.state()
            yield pb.WatchStatusResponse(status=status_message(state))
            await asyncio.sleep(_SPACING_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s - _SPACING_S):
                    await self._keeper.changed(state.generation)

    async def GetVersion(  # noqa: N802 - the name is the protocol's
        self, request: pb.GetVersionRequest, context: Context
    ) -> pb.GetVersionResponse:
        """The daemon's version."""
        return pb.GetVersionResponse(version=self._version)

    async def GetConfig(  # noqa: N802 - the name is the protocol's
        self, request: pb.GetConfigRequest, context: Context
    ) -> pb.GetConfigResponse:
        """Every key in the order of the schema, and what an engine made of those left to it."""
        snapshot = self._keeper.state().snapshot
        return pb.GetConfigResponse(values=config_values(self._config, snapshot))

    async def GetCache(  # noqa: N802 - the name is the protocol's
        self, request: pb.GetCacheRequest, context: Context
    ) -> pb.GetCacheResponse:
        """The expert cache, or why there is none."""
        return cache_response(self._keeper.state())

    async def GetBandwidth(  # noqa: N802 - the name is the protocol's
        self, request: pb.GetBandwidthRequest, context: Context
    ) -> pb.GetBandwidthResponse:
        """The profiles, and what steps tell."""
        return bandwidth_response(self._bandwidth, self._keeper.state().snapshot)

    async def WatchEvents(  # noqa: N802 - the name is the protocol's
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """What is kept, then what comes."""
        events = self._elastic.events
        told = request.after_index if request.after_index <= events.newest_id else 0
        while True:
            for event in events.after(told):
                told = event.event_id
                yield pb.WatchEventsResponse(event=event_message(event))
            if not request.follow:
                return
            await events.changed(told)

    async def ListHolds(  # noqa: N802 - the name is the protocol's
        self, request: pb.ListHoldsRequest, context: Context
    ) -> pb.ListHoldsResponse:
        """The holds that stand."""
        holds = self._elastic.wants.holds
        return pb.ListHoldsResponse(holds=[hold_status(hold) for hold in holds])


class AdminService(pb_grpc.AdminServicer):
    """Changing: checks the arguments, then passes on to the daemon's operations."""

    def __init__(
        self,
        keeper: StateKeeper,
        operations: ServiceOperations,
        config: ResolvedConfig,
        elastic: ElasticLoop,
        bandwidth: BandwidthKeeper,
    ) -> None:
        self._bandwidth = bandwidth
        self._keeper = keeper
        self._elastic = elastic
        self._resizes = HandResizes(elastic)
        self._operations = operations
        self._config = config

    async def Drain(  # noqa: N802 - the name is the protocol's
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainResponse:
        """Waits for the drain; a caller that goes away leaves the drain in force."""
        timeout_s = request.timeout_s or self._config.service.drain_timeout_s
        check_range("timeout_s", timeout_s, _DRAIN_RANGE_S)
        _log.info("drain-requested", timeout_s=timeout_s)
        running_count = await self._operations.drain(timeout_s)
        return pb.DrainResponse(drained=running_count == 0, running_count=running_count)

    async def Resume(  # noqa: N802 - the name is the protocol's
        self, request: pb.ResumeRequest, context: Context
    ) -> pb.ResumeResponse:
        """Ends a drain."""
        _log.info("resume-requested")
        self._operations.resume()
        return pb.ResumeResponse()

    async def Stop(  # noqa: N802 - the name is the protocol's
        self, request: pb.StopRequest, context: Context
    ) -> pb.StopResponse:
        """Begins the stop."""
        _log.info("stop-requested", drain=request.drain)
        self._operations.request_stop(drain=request.drain)
        return pb.StopResponse()

    async def SetLogLevel(  # noqa: N802 - the name is the protocol's
        self, request: pb.SetLogLevelRequest, context: Context
    ) -> pb.SetLogLevelResponse:
        """Sets the level and shows it in the state."""
        previous = self._operations.set_log_level(request.level)
        self._keeper.touch()
        _log.info("log-level-set", level=request.level, previous=previous)
        return pb.SetLogLevelResponse(previous=previous)

    async def VerifyCache(  # noqa: N802 - the name is the protocol's
        self, request: pb.VerifyCacheRequest, context: Context
    ) -> pb.VerifyCacheResponse:
        """Waits for the comparison."""
        found = await self._operations.verify_cache()
        return verify_response(found)

    async def MeasureBandwidth(  # noqa: N802 - the name is the protocol's
        self, request: pb.MeasureBandwidthRequest, context: Context
    ) -> AsyncIterator[pb.MeasureBandwidthResponse]:
        """Measures, and tells each part as it begins."""
        _log.info("bandwidth-requested", parts=",".join(request.parts))
        async for response in measuring(self._bandwidth, request):
            yield response

    async def RecordTrace(  # noqa: N802 - the name is the protocol's
        self, request: pb.RecordTraceRequest, context: Context
    ) -> AsyncIterator[pb.RecordTraceResponse]:
        """Records until a limit is reached or the caller goes."""
        check_range("duration_s", request.duration_s, _TRACE_RANGE_S)
        started, recording = await self._operations.record_trace()
        # However the call ends: the generator of a caller that has gone may be finished late.
        context.add_done_callback(lambda _: recording.close())  # type: ignore[arg-type] # its stubs ask for an instance of their own class
        _log.info("trace-started", duration_s=request.duration_s, steps_count=request.steps_count)
        async for response in recorded(
            started, recording, duration_s=request.duration_s, steps_count=request.steps_count
        ):
            yield response

    async def Resize(  # noqa: N802 - the name is the protocol's
        self, request: pb.ResizeRequest, context: Context
    ) -> pb.ResizeResponse:
        """Waits for the decision, or for its end."""
        asked = asked_of(request)
        resized = await self._resizes.resize(asked, wait=request.wait)
        return resize_response(resized)

    async def Sleep(  # noqa: N802 - the name is the protocol's
        self, request: pb.SleepRequest, context: Context
    ) -> pb.SleepResponse:
        """Waits until the engine sleeps, or long enough."""
        asleep = await self._resizes.sleep()
        return pb.SleepResponse(asleep=asleep, reason=self._elastic.state.standing.text)

    async def Wake(  # noqa: N802 - the name is the protocol's
        self, request: pb.WakeRequest, context: Context
    ) -> pb.WakeResponse:
        """Waits until the engine is awake, or was refused."""
        awake = await self._resizes.wake()
        return pb.WakeResponse(awake=awake, reason=self._elastic.state.standing.text)

    async def Hold(  # noqa: N802 - the name is the protocol's
        self, request: pb.HoldRequest, context: Context
    ) -> AsyncIterator[pb.HoldResponse]:
        """Holds until the caller goes."""
        check_range("vram_bytes", request.vram_bytes, _HOLD_RANGE_BYTES)
        reason = " ".join(request.reason.split())
        if not reason or len(reason) > _REASON_LIMIT:
            raise InvalidInputError(
                f"reason has {len(reason)} characters; it must have from 1 to {_REASON_LIMIT}",
                param="reason",
            )
        elastic = self._elastic
        held = elastic.hold(request.vram_bytes, reason, frozenset(request.pids))
        # However the call ends: the generator of a caller that has gone may be finished late.
        context.add_done_callback(lambda _: elastic.release(held.hold_id))  # type: ignore[arg-type] # its stubs ask for an instance of their own class
        told: bool | None = None
        while True:
            granted = elastic.leaves_what_is_held()
            if granted is not told:
                told = granted
                yield pb.HoldResponse(
                    hold=hold_status(held), granted=granted, reason=elastic.state.standing.text
                )
            await elastic.next_tick()
