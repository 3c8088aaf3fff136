"""Scripted engines for tests: write a script, spawn it under a real supervisor, wait on states."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import freetokend
from freetokend.link.control_side import (
    EngineLaunch,
    EngineSupervisor,
    LinkServer,
    LivenessLimits,
)
from freetokend.link.messages import (
    EngineSettings,
    EngineSnapshot,
    EngineState,
    GenerateRequest,
    Sampling,
    SequenceUpdate,
)
from freetokend.policy.gpu_faults import GpuPatience
from freetokend.policy.restart import RestartBudget

DEADLINE_S = 30.0
"""How long a test waits for what must happen; only a failing test waits that long."""


def write_script(directory: Path, script: dict[str, Any]) -> Path:
    """Put a script file into `directory`."""
    path = directory / "script.json"
    path.write_text(json.dumps(script))
    return path


def scripted_argv(script_path: Path) -> tuple[str, ...]:
    """The command line of a scripted engine, to which the supervisor adds its own options."""
    return (sys.executable, "-m", "freetokend.scripted", "--scripted", str(script_path))


def engine_environment() -> dict[str, str]:
    """Our environment, with this checkout importable whatever the working directory is."""
    root = str(Path(freetokend.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root}


def greedy(
    request_id: str, prompt: tuple[int, ...] = (11, 12, 13), max_new_tokens: int = 8, **more: Any
) -> GenerateRequest:
    """A greedy request."""
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=0.0),
        **more,
    )


@dataclass
class EngineHarness:
    """A supervisor with its server, and what the engine printed."""

    supervisor: EngineSupervisor
    server: LinkServer
    directory: Path
    lines: list[str] = field(default_factory=list)

    async def wait_until(self, condition: Callable[[EngineSnapshot], bool]) -> EngineSnapshot:
        """Wait, on the supervisor's own change signal, until the snapshot satisfies it."""
        async with asyncio.timeout(DEADLINE_S):
            generation = 0
            while True:
                generation = await self.supervisor.changed(generation)
                snapshot = self.supervisor.snapshot()
                if condition(snapshot):
                    return snapshot

    async def wait_state(self, *states: EngineState) -> EngineSnapshot:
        """Wait for one of `states`."""
        return await self.wait_until(lambda snapshot: snapshot.state in states)

    async def collect(self, request: GenerateRequest) -> list[SequenceUpdate]:
        """All updates of one request."""
        async with asyncio.timeout(DEADLINE_S):
            return [update async for update in self.supervisor.generate(request)]


@asynccontextmanager
async def supervised(
    argv: tuple[str, ...],
    *,
    directory: Path,
    settings: EngineSettings | None = None,
    budget: RestartBudget | None = None,
    limits: LivenessLimits | None = None,
    gpu_patience: GpuPatience | None = None,
    **launch: Any,
) -> AsyncIterator[EngineHarness]:
    """Run `argv` under a supervisor until the block ends."""
    server = LinkServer(directory / "link")
    lines: list[str] = []
    supervisor = EngineSupervisor(
        EngineLaunch(
            argv=argv,
            settings=EngineSettings(model="test") if settings is None else settings,
            environment=engine_environment(),
            line_sink=lines.append,
            **launch,
        ),
        server,
        budget=budget,
        gpu_patience=gpu_patience,
        limits=limits,
    )
    await server.start()
    supervisor.start()
    try:
        yield EngineHarness(supervisor, server, directory, lines)
    finally:
        await supervisor.stop(drain_timeout_s=0.0, exit_timeout_s=1.0)
        await server.stop()


@asynccontextmanager
async def scripted_engine(
    script: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[EngineHarness]:
    """A scripted engine under a supervisor, in a short-named directory of its own."""
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        directory = Path(name)
        argv = scripted_argv(write_script(directory, script or {}))
        async with supervised(argv, directory=directory, **options) as harness:
            yield harness


def make_gate(directory: Path) -> Path:
    """A FIFO for a script's `gate`."""
    path = directory / "gate"
    os.mkfifo(path)
    return path


class Gate:
    """The test's end of a gate: each `open` lets one more step happen."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def open(self, steps_count: int = 1) -> None:
        """Let `steps_count` steps pass."""
        os.write(self._fd, b"." * steps_count)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)
