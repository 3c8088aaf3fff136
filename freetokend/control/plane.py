"""Composition of the control plane: state, watch, metrics, health, and servers on two sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.api.control.v1 import control_pb2_grpc as pb_grpc
from freetokend.control.bandwidth import BandwidthKeeper, ProfiledMachine
from freetokend.control.elastic import ElasticLoop, Surroundings, Wants
from freetokend.control.errors import ErrorInterceptor
from freetokend.control.metrics import Metrics
from freetokend.control.metrics.meters import MeteredGateway
from freetokend.control.operations import ServiceOperations
from freetokend.control.probes import (
    MachineReadings,
    MachineWatch,
    ProbeSet,
    probe_query,
    real_probes,
)
from freetokend.control.profiles import ProfileStore
from freetokend.control.services import AdminService, MonitorService
from freetokend.control.sockets import SocketPlace, prepare_directory
from freetokend.control.state import StateKeeper
from freetokend.core import logs
from freetokend.core.config import EnvironmentFacts, ResolvedConfig
from freetokend.core.errors import ConfigError
from freetokend.link.messages import EngineGateway

MONITOR_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Monitor"].full_name
ADMIN_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Admin"].full_name
# Names of grpc.health.v1 beside those of the services: "" and LIVENESS answer "can the service
# come good", READINESS "does it take requests".
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"

# Any local user may connect to the monitor socket: one must not use up the daemon.
_MONITOR_CALLS_LIMIT: Final = 64
_SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 1024),
)

_log = logs.logger(__name__)


class ControlPlane:
    """The running control plane. `gateway` is what serving should use, `metrics` what it mounts,
    `machine` what is known of the machine.

    Every method is called in the event loop that called `serve_control`.
    """

    def __init__(
        self,
        *,
        gateway: EngineGateway,
        config: ResolvedConfig,
        facts: EnvironmentFacts,
        operations: ServiceOperations,
        version: str,
        probes: ProbeSet | None = None,
    ) -> None:
        self.metrics = Metrics(config, gateway.snapshot().model)
        self.gateway: MeteredGateway = self.metrics.metered(gateway)
        self.machine = MachineWatch(
            probes or real_probes(),
            lambda: probe_query(gateway.snapshot(), config.control.gpu),
            tick_s=config.control.tick_s,
            changed=self._machine_changed,
            looked=self._machine_looked,
        )
        self.elastic = ElasticLoop(
            Surroundings(
                snapshot=gateway.snapshot,
                machine=self.machine.newest,
                port=operations,
                meter=self.metrics.resizes,
            ),
            Wants(config),
            tick_s=config.control.tick_s,
        )
        self.state = StateKeeper(
            gateway=gateway,
            config=config,
            version=version,
            pid=os.getpid(),
            totals=self.metrics.totals,
            machine=self.machine.newest,
        )
        self.bandwidth = BandwidthKeeper(
            ProfiledMachine(
                snapshot=gateway.snapshot,
                driver_version=lambda: _driver_version(self.machine.newest()),
                version=version,
            ),
            operations,
            ProfileStore(Path(config.service.state_dir)),
            interval_s=config.control.profile_interval_s,
        )
        self.state.follow_elastic(self.elastic.status)
        self.metrics.follow(self.state.state)
        self._monitor = MonitorService(self.state, config, version, self.elastic, self.bandwidth)
        self._admin = AdminService(self.state, operations, config, self.elastic, self.bandwidth)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined] # missing in its stubs
        self._admin_place, self._monitor_place = _places(config)
        self._servers: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []

    def set_http_address(self, address: str) -> None:
        """Show where HTTP listens, for example "http://127.0.0.1:8440"."""
        self.state.set_http_address(address)

    async def start(self) -> None:
        """Bind both sockets and begin to follow the engine.

        Raises `ConfigError` when a socket's place is taken or not usable; nothing is left behind.
        """
        try:
            for place in (self._admin_place, self._monitor_place):
                prepare_directory(os.path.dirname(place.path))
                place.claim()
            await self._show_health()
            await self._listen(self._admin_place, admin=True)
            await self._listen(self._monitor_place, admin=False)
        except BaseException:
            await self.stop(0.0)
            raise
        self._tasks = [
            asyncio.create_task(self.state.run(), name="control-state"),
            asyncio.create_task(self._follow_health(), name="control-health"),
            asyncio.create_task(self.machine.run(), name="control-machine"),
            asyncio.create_task(self.elastic.run(), name="control-elastic"),
            asyncio.create_task(self.bandwidth.run(), name="control-bandwidth"),
        ]
        _log.info(
            "control-listening",
            admin=self._admin_place.path,
            monitor=self._monitor_place.path,
        )

    async def stop(self, grace_s: float = 1.0) -> None:
        """End the servers, running calls after `grace_s`, and remove the sockets; idempotent."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        await self.machine.close()
        await self._health.enter_graceful_shutdown()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        self._servers = []
        for place in (self._admin_place, self._monitor_place):
            place.release()

    async def _listen(self, place: SocketPlace, *, admin: bool) -> None:
        server = grpc.aio.server(
            interceptors=(ErrorInterceptor(),),
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=None if admin else _MONITOR_CALLS_LIMIT,
        )
        pb_grpc.add_MonitorServicer_to_server(self._monitor, server)  # type: ignore[no-untyped-call]
        names = [MONITOR_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME]
        if admin:
            pb_grpc.add_AdminServicer_to_server(self._admin, server)  # type: ignore[no-untyped-call]
            names.append(ADMIN_SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(names, server)
        place.bind(lambda: _add_port(server, place.path))
        await server.start()
        self._servers.append(server)

    def _machine_changed(self) -> None:
        self.state.touch()

    def _machine_looked(self) -> None:
        self.elastic.poke()

    async def _follow_health(self) -> None:
        generation = 0
        while True:
            generation = await self.state.changed(generation)
            await self._show_health()

    async def _show_health(self) -> None:
        now = self.state.state().health
        await self._set_health(("", LIVENESS), now.alive)
        await self._set_health((READINESS,), now.ready)
        await self._set_health((MONITOR_SERVICE, ADMIN_SERVICE), True)

    async def _set_health(self, services: Iterable[str], serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in services:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)


def _driver_version(readings: MachineReadings) -> str:
    return "" if readings.gpu is None else readings.gpu.driver_version


def _add_port(server: grpc.aio.Server, path: str) -> None:
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {path}: {error}; set service.runtime_dir to a directory that "
            f"uid {os.geteuid()} may write to",
            param="service.runtime_dir",
        ) from error


def _places(config: ResolvedConfig) -> tuple[SocketPlace, SocketPlace]:
    """Of the admin and of the monitor socket."""
    control = config.control
    return (
        SocketPlace(control.admin_socket, mode=0o660, group=control.admin_group),
        SocketPlace(control.monitor_socket, mode=0o666),
    )


def check_control(config: ResolvedConfig) -> None:
    """Make the directories of the sockets and raise the `ConfigError` with which `serve_control`
    would refuse them, the group, or the rules of the elastic memory."""
    Wants(config)
    for place in _places(config):
        prepare_directory(os.path.dirname(place.path))
        place.check()


async def serve_control(
    *,
    gateway: EngineGateway,
    config: ResolvedConfig,
    facts: EnvironmentFacts,
    operations: ServiceOperations,
    version: str,
    probes: ProbeSet | None = None,
) -> ControlPlane:
    """Start the control plane in front of `gateway`; `stop` it in the end. `probes`: those of this
    machine unless others are given."""
    plane = ControlPlane(
        gateway=gateway,
        config=config,
        facts=facts,
        operations=operations,
        version=version,
        probes=probes,
    )
    await plane.start()
    return plane
