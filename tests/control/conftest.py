"""A short directory for sockets (their paths are limited) and a running control plane."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from freetokend.control import ControlPlane, serve_control
from freetokend.control.probes.ports import ProbeError
from freetokend.core import logs
from tests.control.fakes import FakeGateway, FakeOperations, config, facts
from tests.fakes.probes import ScriptedGpu, ScriptedHost, scripted_probes


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ftk"))
    yield path / "run"
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def log_level_as_before() -> Iterator[None]:
    own = logging.getLogger(logs.ROOT)
    level = own.level
    own.setLevel(logging.INFO)
    yield
    own.setLevel(level)


@pytest.fixture
async def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
async def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
def gpu() -> ScriptedGpu:
    """What the plane's probe of the GPU reads: nothing, as without a driver."""
    made = ScriptedGpu()
    made.error = ProbeError("there is no driver", is_absent=True)
    made.now_s = time.monotonic()
    return made


@pytest.fixture
def host() -> ScriptedHost:
    """What the plane's probes of the host read."""
    return ScriptedHost()


@pytest.fixture
async def plane(
    runtime_dir: Path,
    gateway: FakeGateway,
    operations: FakeOperations,
    gpu: ScriptedGpu,
    host: ScriptedHost,
) -> AsyncIterator[ControlPlane]:
    plane = await serve_control(
        gateway=gateway,
        config=config(runtime_dir),
        facts=facts(),
        operations=operations,
        version="1.2.3",
        probes=scripted_probes(gpu, host, gpu_deadline_s=30),
    )
    await plane.machine.look()
    yield plane
    await plane.stop(0.0)


@pytest.fixture
async def admin(plane: ControlPlane, runtime_dir: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"unix:{runtime_dir}/admin.sock") as channel:
        yield channel


@pytest.fixture
async def monitor(plane: ControlPlane, runtime_dir: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"unix:{runtime_dir}/monitor.sock") as channel:
        yield channel
