"""The running daemon: builds every part, waits for a reason to stop, takes the parts down again.

The composition root of the control process. Owns the pool's descriptor, the link server, the
engine's supervisor, the control plane and the HTTP server; everything lives in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import freetokend
from freetokend.control import ControlPlane, serve_control
from freetokend.core import logs
from freetokend.core.config import EnvironmentFacts, ResolvedConfig
from freetokend.core.errors import FreetokenError, InternalError
from freetokend.daemon.access_log import AccessLog
from freetokend.daemon.http import HttpServer, http_address, listen
from freetokend.daemon.notify import ServiceManager, own_watchdog_s
from freetokend.daemon.reporting import ManagerReporter
from freetokend.ftw.index import FtwIndex
from freetokend.link.bandwidth_messages import BandwidthMeasured
from freetokend.link.control_side import (
    EngineLaunch,
    EngineSupervisor,
    LinkServer,
    LivenessLimits,
    PoolHandover,
    TraceRecording,
)
from freetokend.link.messages import (
    CacheResized,
    CacheVerified,
    EngineSettings,
    EngineState,
    SizeCommand,
)
from freetokend.link.trace_messages import TraceStarted
from freetokend.native.pool import PoolFile, create_pool_file
from freetokend.policy.restart import RestartBudget
from freetokend.serving.app import create_app, model_created_s
from freetokend.serving.model_text import ModelText, load_model_text

_STUCK_S: Final = 60.0
# Beyond the drain: the engine's orderly exit and the last bytes of HTTP.
_STOP_MARGIN_S: Final = 15.0
_ENGINE_EXIT_S: Final = 5.0
_PART_STOP_S: Final = 3.0

_log = logs.logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """What to run, checked. `index` is None and `script_file` given for a scripted engine."""

    config: ResolvedConfig
    facts: EnvironmentFacts
    index: FtwIndex | None
    script_file: Path | None

    @property
    def model_dir(self) -> Path:
        """The FTW directory (for a scripted engine: where the tokenizer is)."""
        return Path(self.config.model.path)


class EngineFailedError(FreetokenError):
    """The engine could not be started, or can never start as things are: the daemon ends too."""


class Service:
    """One run of the daemon. Implements `ServiceOperations` of the control plane."""

    def __init__(self, plan: ServicePlan, manager: ServiceManager) -> None:
        self._plan = plan
        self._manager = manager
        self._server = LinkServer(Path(plan.config.service.runtime_dir) / "link")
        self._pool: PoolFile | None = None
        self._supervisor: EngineSupervisor | None = None
        self._stop_requested = asyncio.Event()
        self._stop_drains = True
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Start, serve, stop. Returns after an asked-for stop.

        Raises the `FreetokenError` that prevented the start or made going on senseless.
        """
        async with contextlib.AsyncExitStack() as stack:
            reporter = await self._start(stack)
            stack.push_async_callback(_cancelled, reporter)
            await self._wait(reporter)
            await self._shut_down()
        _log.info("stopped")

    def request_stop(self, *, drain: bool) -> None:
        """See `ServiceOperations`. Asking again hurries a stop that is under way."""
        if self._stop_requested.is_set():
            self._hurry.set()
            return
        self._stop_drains = drain
        self._stop_requested.set()

    async def drain(self, timeout_s: float) -> int:
        """See `ServiceOperations`."""
        return await self._engine().drain(timeout_s)

    def resume(self) -> None:
        """See `ServiceOperations`."""
        self._engine().resume()

    async def resize_engine(self, command: SizeCommand) -> CacheResized:
        """See `ServiceOperations`."""
        return await self._engine().carry_out(command)

    def refuse_waiting(self, message: str) -> int:
        """See `ServiceOperations`."""
        return self._engine().refuse_waiting(message)

    async def verify_cache(self) -> CacheVerified:
        """See `ServiceOperations`."""
        return await self._engine().verify_cache()

    async def record_trace(self) -> tuple[TraceStarted, TraceRecording]:
        """See `ServiceOperations`."""
        return await self._engine().record_trace()

    async def measure_bandwidth(
        self,
        *,
        parts: tuple[str, ...] = (),
        limit_s: float,
        progress: Callable[[str], None] = lambda part: None,
    ) -> BandwidthMeasured:
        """See `ServiceOperations`."""
        return await self._engine().measure_bandwidth(
            parts=parts, limit_s=limit_s, progress=progress
        )

    def set_log_level(self, level: str) -> str:
        """See `ServiceOperations`."""
        former = logs.set_log_level(level)
        self._engine().set_log_level(level)
        return former

    def _engine(self) -> EngineSupervisor:
        if self._supervisor is None:
            raise InternalError("the engine's supervisor is not there yet")
        return self._supervisor

    async def _start(self, stack: contextlib.AsyncExitStack) -> asyncio.Task[None]:
        """Every part, in the order in which conflicts show early; the stack takes them down."""
        config = self._plan.config
        listener = listen(config.http.host, config.http.port)
        stack.callback(listener.close)
        await self._server.start()
        stack.push_async_callback(self._server.stop)
        self._pool = self._make_pool()
        if self._pool is not None:
            stack.callback(self._pool.close)
        supervisor = EngineSupervisor(
            self._launch(),
            self._server,
            budget=RestartBudget(
                restarts_count=config.engine.restart_budget_count,
                window_s=config.engine.restart_window_s,
            ),
            limits=LivenessLimits(stuck_s=self._stuck_s()),
        )
        self._supervisor = supervisor
        plane = await serve_control(
            gateway=supervisor,
            config=config,
            facts=self._plan.facts,
            operations=self,
            version=freetokend.__version__,
        )
        stack.push_async_callback(_bounded, "control", plane.stop)
        supervisor.start()
        stack.push_async_callback(supervisor.stop, drain_timeout_s=0.0, exit_timeout_s=0.0)
        reporter = asyncio.create_task(self._report(supervisor), name="manager-reporter")
        text = await asyncio.to_thread(load_model_text, self._plan.model_dir)
        http = HttpServer(self._app(plane, text), listener)
        http.start()
        stack.push_async_callback(http.stop)
        plane.set_http_address(http_address(listener))
        _log.info("http-listening", address=http_address(listener), model=config.model.id)
        return reporter

    async def _report(self, supervisor: EngineSupervisor) -> None:
        await ManagerReporter(
            supervisor,
            self._manager,
            ready_at_once=self._plan.config.service.ready == "listening",
            watchdog_s=own_watchdog_s(),
        ).run()

    def _make_pool(self) -> PoolFile | None:
        index, config = self._plan.index, self._plan.config
        if index is None:
            return None
        pool = create_pool_file(
            f"freetoken-pool-{config.model.id}",
            index.region_bytes,
            index.identity,
            config.pool.directory or None,
        )
        _log.info(
            "pool-created",
            size_bytes=pool.length_bytes,
            page_bytes=pool.page_bytes,
            place=pool.reason,
        )
        return pool

    def _launch(self) -> EngineLaunch:
        config, pool = self._plan.config, self._pool
        return EngineLaunch(
            argv=engine_argv(self._plan),
            environment=engine_environment(),
            pool=None
            if pool is None
            else PoolHandover(name=pool.name, length_bytes=pool.length_bytes, fd=pool.fd),
            settings=engine_settings(config),
        )

    def _stuck_s(self) -> float:
        """A stuck engine is replaced well before the service manager would act on us."""
        watchdog = own_watchdog_s()
        return _STUCK_S if watchdog is None else watchdog / 3

    def _app(self, plane: ControlPlane, text: ModelText) -> object:
        app = create_app(
            plane.gateway,
            text,
            observer=AccessLog(),
            health=lambda: plane.state.state().health,
            render_metrics=plane.metrics.render,
            model_created_s=0
            if self._plan.index is None
            else model_created_s(self._plan.model_dir),
            max_body_bytes=self._plan.config.http.max_body_bytes,
        )
        return plane.metrics.metered_app(app)

    async def _wait(self, reporter: asyncio.Task[None]) -> None:
        """Until a stop is asked for. Raises when there is no sense in going on."""
        stop = asyncio.create_task(self._stop_requested.wait(), name="stop-requested")
        hopeless = asyncio.create_task(self._until_hopeless(), name="engine-hopeless")
        tasks: set[asyncio.Task[object]] = {stop, hopeless, reporter}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()
        finally:
            stop.cancel()
            hopeless.cancel()

    async def _until_hopeless(self) -> None:
        """Raises `EngineFailedError` once the engine has failed and waiting cannot help.

        A service that was ready once and spent its restart budget stays, refuses truthfully and
        lets the watchdog run out; one that never served, or whose files are at fault, ends.
        """
        supervisor = self._engine()
        generation, was_ready = 0, False
        while True:
            generation = await supervisor.changed(generation)
            state, end = supervisor.snapshot().state, supervisor.last_end
            was_ready = was_ready or state is EngineState.READY
            if state is not EngineState.FAILED or end is None:
                continue
            if not was_ready or not end.restart_can_help:
                raise EngineFailedError(f"the engine {end.full_cause}", reason=end.reason)

    async def _shut_down(self) -> None:
        """Drain as asked; a second request, or none to drain, ends everything at once."""
        supervisor = self._engine()
        drain_timeout_s = self._plan.config.service.drain_timeout_s if self._stop_drains else 0.0
        _log.info("stopping", drain_timeout_s=drain_timeout_s, running=supervisor.in_flight_count)
        self._manager.stopping(
            f"Stopping: {supervisor.in_flight_count} requests still run",
            timeout_s=drain_timeout_s + _STOP_MARGIN_S,
        )
        orderly = asyncio.create_task(
            supervisor.stop(drain_timeout_s=drain_timeout_s, exit_timeout_s=_ENGINE_EXIT_S)
        )
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({orderly, hurry}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()
            await _cancelled(orderly)
        await supervisor.stop(drain_timeout_s=0.0, exit_timeout_s=0.0)


async def _bounded(part: str, stop: Callable[[], Awaitable[None]]) -> None:
    """A part that does not stop must not keep the service from stopping."""
    try:
        async with asyncio.timeout(_PART_STOP_S):
            await stop()
    except TimeoutError:
        _log.warning("part-did-not-stop", part=part, waited_s=_PART_STOP_S)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def engine_settings(config: ResolvedConfig) -> EngineSettings:
    """What the engine is told of the configuration."""
    engine = config.engine
    return EngineSettings(
        model=config.model.id,
        threads_count=engine.threads,
        kv_bytes=engine.kv_bytes,
        max_running_count=engine.max_running_count,
        max_waiting_count=engine.max_waiting_count,
        step_tokens=engine.step_tokens,
        max_context_tokens=engine.max_context_tokens,
        log_level=config.log.level,
        log_format=config.log.format,
        pin_pool=engine.pin_pool,
        backend=engine.backend,
        numerics=engine.numerics,
        device=engine.device,
        slots_count=engine.slots_count,
        device_bytes=engine.device_bytes,
        link_bytes_per_s=engine.link_bytes_per_s,
        preset=engine.preset,
        layers=engine.layers,
        attention=engine.attention,
        sweep_tokens=engine.sweep_tokens,
        gpu="" if config.control.gpu == "auto" else config.control.gpu,
    )


def engine_argv(plan: ServicePlan) -> tuple[str, ...]:
    """The engine's command line; -P keeps the working directory out of its import path."""
    python = (sys.executable, "-P", "-m")
    if plan.script_file is not None:
        return (*python, "freetokend.scripted", "--scripted", str(plan.script_file))
    return (*python, "freetokend.enginehost.main", "--model-dir", str(plan.model_dir))


def engine_environment() -> dict[str, str]:
    """Our environment; the engine imports freetokend from where we did."""
    root = str(Path(freetokend.__file__).parents[1])
    given = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}:{given}" if given else root}
