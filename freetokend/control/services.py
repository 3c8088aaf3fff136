"""The gRPC services Monitor and Admin."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc.aio

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.api.control.v1 import control_pb2_grpc as pb_grpc
from freetokend.control.cache import cache_response, verify_response
from freetokend.control.config_values import config_values
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

_log = logs.logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class MonitorService(pb_grpc.MonitorServicer):
    """Read-only: answers from the keeper's present state and the resolved configuration."""

    def __init__(self, keeper: StateKeeper, config: ResolvedConfig, version: str) -> None:
        self._keeper = keeper
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
        _check_range("interval_s", interval_s, _INTERVAL_RANGE_S)
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


class AdminService(pb_grpc.AdminServicer):
    """Changing: checks the arguments, then passes on to the daemon's operations."""

    def __init__(
        self, keeper: StateKeeper, operations: ServiceOperations, config: ResolvedConfig
    ) -> None:
        self._keeper = keeper
        self._operations = operations
        self._config = config

    async def Drain(  # noqa: N802 - the name is the protocol's
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainResponse:
        """Waits for the drain; a caller that goes away leaves the drain in force."""
        timeout_s = request.timeout_s or self._config.service.drain_timeout_s
        _check_range("timeout_s", timeout_s, _DRAIN_RANGE_S)
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

    async def RecordTrace(  # noqa: N802 - the name is the protocol's
        self, request: pb.RecordTraceRequest, context: Context
    ) -> AsyncIterator[pb.RecordTraceResponse]:
        """Records until a limit is reached or the caller goes."""
        _check_range("duration_s", request.duration_s, _TRACE_RANGE_S)
        started, recording = await self._operations.record_trace()
        # However the call ends: the generator of a caller that has gone may be finished late.
        context.add_done_callback(lambda _: recording.close())  # type: ignore[arg-type] # its stubs ask for an instance of their own class
        _log.info("trace-started", duration_s=request.duration_s, steps_count=request.steps_count)
        async for response in recorded(
            started, recording, duration_s=request.duration_s, steps_count=request.steps_count
        ):
            yield response


def _check_range(param: str, value: float, limits: tuple[float, float]) -> None:
    low, high = limits
    if not low <= value <= high:
        raise InvalidInputError(
            f"{param} = {value:g} is out of range; it must be from {low:g} to {high:g}", param=param
        )
