"""The socketpair: the pool crosses it, and an engine does not outlive its control process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from freetokend.link.handover import PoolHandover, hand_over, make_lifeline
from freetokend.native.lifeline import receive_pool
from tests.support.scripted import DEADLINE_S, engine_environment, scripted_argv, write_script

CONTROL = """
import asyncio, sys, tempfile
from pathlib import Path
from freetokend.link.messages import EngineState
from tests.support.scripted import supervised

async def main():
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        async with supervised(tuple(sys.argv[1:]), directory=Path(name)) as harness:
            print((await harness.wait_state(EngineState.READY)).pid, flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


def test_pool_crosses_with_its_descriptor() -> None:
    ours, theirs = make_lifeline()
    fd = os.memfd_create("a-pool")
    os.write(fd, b"FTKPOOL1")
    with ours, theirs:
        hand_over(ours, PoolHandover(name="a-pool", length_bytes=8, fd=fd))
        received = receive_pool(theirs)
        assert received is not None
        assert (received.name, received.length_bytes) == ("a-pool", 8)
        assert os.path.sameopenfile(received.fd, fd)
        os.close(received.fd)
    os.close(fd)


def test_no_pool() -> None:
    ours, theirs = make_lifeline()
    with ours, theirs:
        hand_over(ours, None)
        assert receive_pool(theirs) is None


async def engine_death_after_control_is_killed(argv: tuple[str, ...]) -> float:
    """Start a control process with this engine, kill -9 it; seconds until the engine is gone."""
    environment = engine_environment()
    control = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONTROL, *argv, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert control.stdout is not None
    async with asyncio.timeout(DEADLINE_S * 4):
        engine_pid = int(await control.stdout.readline())
    watch = os.pidfd_open(engine_pid)
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(watch, gone.set)
    try:
        os.kill(control.pid, signal.SIGKILL)
        killed_s = loop.time()
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
        return loop.time() - killed_s
    finally:
        loop.remove_reader(watch)
        os.close(watch)
        await control.wait()


async def test_killed_control_takes_an_idle_engine_along(tmp_path: Path) -> None:
    argv = scripted_argv(write_script(tmp_path, {}))
    assert await engine_death_after_control_is_killed(argv) < 1.0
