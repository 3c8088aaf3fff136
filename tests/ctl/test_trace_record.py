"""`freetokenctl trace record` against a control plane whose steps the test makes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from freetokend.control import ControlPlane
from freetokend.core.errors import Reason, UnavailableError
from freetokend.link.trace_messages import RoutedRows, TracedStep, TraceEnded
from freetokend.traces.trace import SKIPPED, Phase
from freetokend.traces.trace_file import read_trace
from tests.control.fakes import FakeOperations, traced_step
from tests.ctl.conftest import Ctl, started

READ = (True, [[[1, 2], [3, 4]], [[SKIPPED, SKIPPED], [5, 6]]])
WROTE = (False, [[[0, 1]], [[6, 7]]])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.trace"


def names(file: Path) -> list[str]:
    """What lies beside it, itself included."""
    return [one.name for one in file.parent.iterdir()]


async def test_what_was_told_is_in_the_file(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl, file: Path
) -> None:
    operations.recording.items = [traced_step(READ, WROTE), traced_step(WROTE), traced_step(WROTE)]
    done = await ctl("trace", "record", "--out", str(file), "--steps", "2")
    assert done.code == 0
    assert done.err == (
        f"recording to {file}: 2 layers of 8 experts, 2 per token; Ctrl-C ends it\n"
    )
    assert done.out.startswith(f"{file}: 2 steps in ")
    assert "4 tokens (2 read, 2 written), 2 layers, " in done.out
    assert f"trace replay {file}" in done.out
    await operations.recording.closed.wait()
    trace = read_trace(file)
    assert (trace.source, len(trace.steps)) == ("made up", 3)
    assert [one.phase for one in trace.steps] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert np.array_equal(trace.steps[0].ids, np.array(READ[1]))
    assert names(file) == ["some.trace"]
    table = await ctl("trace", "replay", str(file))
    assert table.code == 0
    assert "2 decode steps, 1 prompt steps\n" in table.out


async def test_for_programs_and_without_a_step(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl, file: Path
) -> None:
    done = await ctl("trace", "record", "--out", str(file), "--seconds", "0.1", "-o", "json")
    told = json.loads(done.out)
    assert done.code == 0
    assert (told["steps_count"], told["ended_early"]) == (0, False)
    assert told["ended"] == "the time that was asked for is over"
    assert told["record_s"] > 0
    assert read_trace(file).steps == ()
    again = await ctl("trace", "record", "--out", str(file))
    assert (again.code, again.out) == (64, "")
    assert "is there already" in again.err
    operations.recording.items = [traced_step(WROTE)]
    forced = await ctl("trace", "record", "--out", str(file), "--steps", "1", "--force")
    assert forced.code == 0
    assert len(read_trace(file).steps) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_keeps_what_was_recorded(
    plane: ControlPlane,
    operations: FakeOperations,
    environment: dict[str, str],
    file: Path,
    number: int,
) -> None:
    operations.recording.items = [traced_step(WROTE)]
    process = await started(environment, "trace", "record", "--out", str(file), "-o", "json")
    assert process.stderr is not None
    async with asyncio.timeout(60):
        await process.stderr.readline()
        assert names(file) == ["some.trace.partial"]
        process.send_signal(number)
        out, err = await process.communicate()
        await operations.recording.closed.wait()
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["ended"] == "it was ended here"
    assert len(read_trace(file).steps) == json.loads(out)["steps_count"]
    assert names(file) == ["some.trace"]


async def test_an_early_end_keeps_the_steps_and_tells_why(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl, file: Path
) -> None:
    operations.recording.items = [
        traced_step(WROTE),
        TraceEnded(trace_id="t", error_reason=Reason.ENGINE_FAILED, error_message="it died"),
    ]
    done = await ctl("trace", "record", "--out", str(file), "-o", "json")
    assert done.code == 70
    assert f"ended early: it died. {file} has the steps before that" in done.err
    assert json.loads(done.out)["ended_early"] is True
    assert len(read_trace(file).steps) == 1


async def test_a_daemon_that_goes_away_leaves_a_whole_file(
    plane: ControlPlane, operations: FakeOperations, environment: dict[str, str], file: Path
) -> None:
    operations.recording.items = [traced_step(WROTE)]
    process = await started(environment, "trace", "record", "--out", str(file))
    assert process.stderr is not None
    async with asyncio.timeout(60):
        await process.stderr.readline()
        await plane.stop(0.0)
        _, err = await process.communicate()
    assert process.returncode in (69, 70, 130), err
    assert b"ended early" in err
    read_trace(file)


async def test_a_refusal_leaves_no_file(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl, file: Path
) -> None:
    operations.error = UnavailableError("already", reason=Reason.QUEUE_FULL)
    done = await ctl("trace", "record", "--out", str(file))
    assert (done.code, done.out, done.err) == (75, "", "freetokenctl: already\n")
    assert names(file) == []


async def test_a_step_that_cannot_be_ends_it_with_the_steps_before(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl, file: Path
) -> None:
    short = RoutedRows(is_prefill=False, rows_count=1, expert_ids=bytes(6))
    operations.recording.items = [traced_step(WROTE), TracedStep(trace_id="t", parts=(short,))]
    done = await ctl("trace", "record", "--out", str(file))
    assert done.code == 70
    assert "a step that cannot be" in done.err
    assert len(read_trace(file).steps) == 1
    assert names(file) == ["some.trace"]


async def test_a_place_that_cannot_be_written(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl, file: Path
) -> None:
    done = await ctl("trace", "record", "--out", str(file / "none"), "--seconds", "9")
    assert (done.code, done.out) == (74, "")
    assert "cannot be written" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seconds", "0"),
        ("--seconds", "nan"),
        ("--steps", "0"),
        ("--steps", "1", "--seconds", "1"),
    ],
)
async def test_limits_that_mean_nothing(ctl: Ctl, file: Path, arguments: tuple[str, ...]) -> None:
    done = await ctl("trace", "record", "--out", str(file), *arguments)
    assert (done.code, done.out) == (64, "")


async def test_it_needs_a_daemon_and_help_says_what_a_trace_holds(ctl: Ctl, file: Path) -> None:
    done = await ctl("trace", "record", "--out", str(file))
    assert done.code == 69
    assert "no tokens, no text" in (await ctl("trace", "record", "--help")).out
