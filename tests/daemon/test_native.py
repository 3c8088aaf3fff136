"""The whole service on a tiny real model: daemon, native engine, pool, HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from freetokend.ftw.convert import convert
from tests.daemon.running import DEADLINE_S, Daemon, completion, daemon, read_events
from tests.daemon.test_process import get_status
from tests.support.tiny_checkpoints import write_tiny_mixtral

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("hf") / "tiny"
    write_tiny_mixtral(source)
    return source


@pytest.fixture(scope="module")
def model_dir(checkpoint: Path) -> Path:
    out = checkpoint.with_name("tiny.ftw")
    convert(checkpoint, out, progress=lambda _: None)
    return out


async def answer(http: httpx.AsyncClient) -> str:
    body = {**completion(12, stream=False), "temperature": 0}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def endless_stream(running: Daemon, http: httpx.AsyncClient) -> asyncio.Task[list[object]]:
    """A request that has begun to stream and goes on for as long as it may."""
    begun = asyncio.Event()

    async def read() -> list[object]:
        events: list[object] = []
        try:
            async with http.stream("POST", "/v1/completions", json=completion(3000)) as response:
                async for event in read_events(response):
                    events.append(event)
                    begun.set()
        except httpx.RemoteProtocolError as error:
            events.append(error)
        return events

    task = asyncio.create_task(read())
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
    return task


async def test_a_life(model_dir: Path) -> None:
    async with daemon("--model", str(model_dir)) as running:
        base_url = await running.base_url()
        first_pid = await running.engine_pid()
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            before = await answer(http)
            assert not (await get_status(running)).pool.reattached

            stream = await endless_stream(running, http)
            seen = len(running.lines)
            os.kill(first_pid, signal.SIGKILL)
            async with asyncio.timeout(2.0):
                events = await stream
            last = events[-1]
            assert isinstance(last, dict)
            assert last["error"]["code"] == "engine_failed"

            await running.wait_line(r"link\.session engine-ready", seen)
            status = await get_status(running)
            assert status.pool.reattached
            assert status.pool.load_s == 0.0
            assert await answer(http) == before
        maps = memory_maps(running.process.pid)
        assert "torch" not in maps
        running.terminate()
        assert await running.wait_exit() == 0
        assert "Traceback" not in running.log


def memory_maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_killed_daemon_takes_a_busy_native_engine_along(model_dir: Path) -> None:
    async with daemon("--model", str(model_dir)) as running:
        base_url = await running.base_url()
        watch = os.pidfd_open(await running.engine_pid())
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(watch, gone.set)
        try:
            async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
                stream = await endless_stream(running, http)
                running.process.kill()
                async with asyncio.timeout(1.0):
                    await gone.wait()
                await stream
        finally:
            loop.remove_reader(watch)
            os.close(watch)


async def test_checkpoint_and_small_cap_are_refused_before_loading(
    checkpoint: Path, model_dir: Path
) -> None:
    async with daemon("--model", str(checkpoint)) as running:
        assert await running.wait_exit() == 65
        assert "freetokenctl ftw convert" in running.log
    async with daemon("--model", str(model_dir), "--set", "pool.max_bytes=1MiB") as running:
        assert await running.wait_exit() == 71
        assert "pool.max_bytes allows" in running.log
        assert "engine-started" not in running.log
