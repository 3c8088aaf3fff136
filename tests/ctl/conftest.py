"""A control plane with a fake engine behind it, and `freetokenctl` as its users run it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from freetokend.control import ControlPlane, serve_control
from freetokend.control.probes.ports import ProbeError
from tests.control.fakes import FakeGateway, FakeOperations, config, facts
from tests.fakes.probes import ScriptedGpu, ScriptedHost, scripted_probes


@dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


Ctl = Callable[..., Awaitable[Done]]


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ftk"))
    yield path / "freetokend"
    shutil.rmtree(path)


@pytest.fixture
def environment(runtime_dir: Path) -> dict[str, str]:
    """An environment in which the daemon of the test is this user's daemon."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FREETOKEN")}
    kept.pop("RUNTIME_DIRECTORY", None)
    return kept | {
        "XDG_RUNTIME_DIR": str(runtime_dir.parent),
        "TMPDIR": str(runtime_dir.parent),
        "COLUMNS": "200",
    }


async def started(
    environment: dict[str, str], *arguments: str, stderr: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    """A running `freetokenctl`; its standard error may be a terminal."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "freetokend.ctl",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        stdin=asyncio.subprocess.DEVNULL,
        env=environment,
    )


@pytest.fixture
def ctl(environment: dict[str, str]) -> Ctl:
    async def run(*arguments: str, **extra_environment: str) -> Done:
        process = await started(environment | extra_environment, *arguments)
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        assert process.returncode is not None
        return Done(process.returncode, out.decode(), err.decode())

    return run


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
