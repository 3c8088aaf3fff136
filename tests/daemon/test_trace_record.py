"""`freetokenctl trace record` of a real service, then what can be done with the file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from freetokend.ftw.convert import convert
from freetokend.traces.trace import SKIPPED, Phase, TraceShape
from freetokend.traces.trace_file import read_trace
from tests.ctl.conftest import started
from tests.daemon.running import DEADLINE_S, Daemon, completion, daemon
from tests.support.tiny_checkpoints import write_tiny_qwen3_moe

pytestmark = pytest.mark.slow

SHAPE = TraceShape(layers_count=4, experts_per_layer=8, experts_per_token=2)
HOST = (
    *("--set", "engine.device=host"),
    *("--set", "engine.backend=hybrid"),
    *("--set", "engine.slots_count=9"),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("hf") / "tiny"
    write_tiny_qwen3_moe(source, layers=5, mlp_only_layers=(1,))
    out = source.with_name("tiny.ftw")
    convert(source, out, progress=lambda _: None)
    return out


class Recorder:
    """A running `trace record`, from the moment at which it records."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def end(self, number: int | None = None) -> tuple[int, str, str]:
        """Exit code, output and errors, perhaps after a signal."""
        if number is not None:
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


async def ctl(running: Daemon, *arguments: str) -> asyncio.subprocess.Process:
    socket = str(running.runtime_dir / "admin.sock")
    return await started(dict(os.environ), "--socket", socket, *arguments)


async def recorder(running: Daemon, file: Path, *arguments: str) -> Recorder:
    process = await ctl(running, "trace", "record", "--out", str(file), *arguments)
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        line = (await process.stderr.readline()).decode()
    assert "4 layers of 8 experts, 2 per token" in line
    return Recorder(process)


async def complete(http: httpx.AsyncClient, count: int, tokens: int = 30) -> list[str]:
    """Prompts of several lengths at once."""
    bodies = [
        {**completion(tokens, stream=False), "prompt": "abc" * (1 + 9 * one), "temperature": 0}
        for one in range(count)
    ]
    answers = await asyncio.gather(*(http.post("/v1/completions", json=one) for one in bodies))
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json()["choices"][0]["text"] for answer in answers]


@pytest.mark.parametrize("settings", [("--set", "engine.backend=cpu"), HOST], ids=["cpu", "host"])
async def test_a_recording_is_replayed_and_changes_no_answer(
    model_dir: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    file = tmp_path / "some.trace"
    async with daemon("--model", str(model_dir), *settings) as running:
        await running.engine_pid()
        url = await running.base_url()
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
            expected = await complete(http, 4)
            recording = await recorder(running, file, "-o", "json")
            assert os.listdir(tmp_path) == ["some.trace.partial"]
            other = await ctl(running, "trace", "record", "--out", str(tmp_path / "other"))
            _, refusal = await other.communicate()
            assert other.returncode == 75
            assert b"one recording at a time" in refusal
            assert await complete(http, 4) == expected
            code, out, err = await recording.end(signal.SIGINT)
            assert (code, err) == (0, "")
            assert await complete(http, 1) == expected[:1], "it serves on"
        replay = await ctl(running, "trace", "replay", str(file))
        table, _ = await replay.communicate()
        assert replay.returncode == 0
        assert b"optimum" in table
        running.terminate()
        assert await running.wait_exit() == 0
        assert "Traceback" not in running.log
    assert os.listdir(tmp_path) == ["some.trace"]
    trace = read_trace(file)
    assert trace.shape == SHAPE
    told = json.loads(out)
    tokens = {
        phase: sum(step.tokens_count for step in trace.steps if step.phase is phase)
        for phase in Phase
    }
    assert (told["prefill_tokens"], told["decode_tokens"]) == (
        tokens[Phase.PREFILL],
        tokens[Phase.DECODE],
    )
    # Of each answer's tokens the first comes with its prompt. The signal may have come before the
    # last steps had reached the recorder.
    assert 2 * 29 <= tokens[Phase.DECODE] <= 4 * 29
    assert tokens[Phase.PREFILL] >= 3 * (1 + 10 + 19 + 28)
    assert told["file_bytes"] == file.stat().st_size
    for step in trace.steps:
        skipped = (step.ids == SKIPPED).any(axis=2)
        assert not skipped[:3].any()
        assert step.phase is Phase.PREFILL or not skipped.any()
        first, second = np.moveaxis(step.ids, 2, 0)
        assert ((first == second) == skipped).all(), "two different experts each"


async def test_limits_and_an_idle_service(model_dir: Path, tmp_path: Path) -> None:
    async with daemon("--model", str(model_dir), "--set", "engine.backend=cpu") as running:
        await running.engine_pid()
        url = await running.base_url()
        idle = await recorder(running, tmp_path / "idle", "--seconds", "0.2")
        code, out, err = await idle.end()
        assert (code, err) == (0, "")
        assert "0 steps" in out
        assert "record while requests run" in out
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
            some = await recorder(running, tmp_path / "some", "--steps", "5")
            await complete(http, 1)
            code, out, err = await some.end()
        assert (code, err) == (0, "")
        assert "5 steps" in out
    assert read_trace(tmp_path / "idle").steps == ()
    assert len(read_trace(tmp_path / "some").steps) == 5


async def test_a_killed_engine_and_a_killed_recorder(model_dir: Path, tmp_path: Path) -> None:
    async with daemon("--model", str(model_dir), "--set", "engine.backend=cpu") as running:
        pid = await running.engine_pid()
        url = await running.base_url()
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
            recording = await recorder(running, tmp_path / "some")
            await complete(http, 2)
            seen = len(running.lines)
            os.kill(pid, signal.SIGKILL)
            code, out, err = await recording.end()
            assert code == 70
            assert "ended early: the engine died with signal 9 (SIGKILL)" in err
            assert "58 written" in out
            await running.wait_line(r"link\.session engine-ready", seen)
            gone = await recorder(running, tmp_path / "gone")
            await complete(http, 1)
            gone.process.kill()
            await gone.process.wait()
            await running.wait_line(r"trace-ended", seen)
            assert "gone" not in os.listdir(tmp_path)
            again = await recorder(running, tmp_path / "again", "--steps", "30")
            await complete(http, 1)
            code, out, _ = await again.end()
            assert code == 0
            assert "29 written" in out, "every step is there, the first wrote and read"
            last = await recorder(running, tmp_path / "last")
            await complete(http, 1)
            code, _, _ = await last.end(signal.SIGTERM)
            assert code == 0
        assert "Traceback" not in running.log
    for name in ("some", "last"):
        assert len(read_trace(tmp_path / name).steps) > 0
