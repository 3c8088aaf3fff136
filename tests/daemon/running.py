"""A real daemon process for tests: started on free ports, followed through its log."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.scripted import engine_environment, write_script
from tests.support.tiny_tokenizer import write_tiny_text

DEADLINE_S = 60.0


@dataclass
class Daemon:
    """A started process. `lines` is its log so far."""

    process: Process
    runtime_dir: Path
    lines: list[str] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_line(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first log line from number `after` on that matches; fails when the daemon ends."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for line in self.lines[after:]:
                    if match := re.search(pattern, line):
                        return match
                assert not self.ended.is_set(), "\n".join(self.lines)
                self.grew.clear()
                await self.grew.wait()

    async def base_url(self) -> str:
        """Where HTTP listens."""
        return (await self.wait_line(r"http-listening address=(\S+)"))[1]

    async def engine_pid(self) -> int:
        """The pid of the newest engine, once it is ready."""
        pattern = r"link\.session engine-ready engine_pid=(\d+)"
        await self.wait_line(pattern)
        return int([match[1] for line in self.lines if (match := re.search(pattern, line))][-1])

    async def wait_exit(self) -> int:
        """Exit status, once the log is read to its end."""
        async with asyncio.timeout(DEADLINE_S):
            await self.ended.wait()
            return await self.process.wait()

    async def pump(self) -> None:
        """Read the log."""
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            self.lines.append(raw.decode().rstrip("\n"))
            self.grew.set()
        self.ended.set()
        self.grew.set()

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    @property
    def log(self) -> str:
        """The whole log so far."""
        return "\n".join(self.lines)


@asynccontextmanager
async def daemon(
    *arguments: str, environment: dict[str, str] | None = None, port: str = "0"
) -> AsyncIterator[Daemon]:
    """Start `freetokend ARGUMENTS` with sockets of its own; killed at the end if still there."""
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        runtime_dir = Path(name) / "run"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "freetokend.daemon", "--port", port),
            *("--set", f"service.runtime_dir={runtime_dir}"),
            *("--set", f"service.state_dir={Path(name) / 'state'}"),
            *arguments,
            stdout=PIPE,
            stderr=PIPE,
            env={**engine_environment(), **(environment or {})},
        )
        running = Daemon(process, runtime_dir)
        pump = asyncio.create_task(running.pump())
        try:
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await pump


@asynccontextmanager
async def scripted_daemon(
    script: dict[str, Any], *arguments: str, environment: dict[str, str] | None = None
) -> AsyncIterator[Daemon]:
    """A daemon with a real tokenizer and a scripted engine."""
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        model_dir = Path(name) / "tiny"
        model_dir.mkdir()
        write_tiny_text(model_dir)
        script_path = write_script(Path(name), script)
        chosen = ("--model", str(model_dir), "--scripted", str(script_path))
        async with daemon(*chosen, *arguments, environment=environment) as running:
            yield running


async def ctl(running: Daemon, *arguments: str) -> tuple[int, str]:
    """Exit code and output of `freetokenctl`."""
    socket = str(running.runtime_dir / "admin.sock")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "freetokend.ctl", "--socket", socket, *arguments),
        stdout=PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def ctl_json(running: Daemon, *arguments: str) -> dict[str, Any]:
    code, out = await ctl(running, *arguments, "-o", "json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def completion(max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """A request body."""
    return {"prompt": "abc", "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}


async def read_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream; "[DONE]" comes as {"done": True}."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield {"done": True} if data == "[DONE]" else json.loads(data)
