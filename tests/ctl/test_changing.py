"""The verbs that change something, run as programs against a real control plane."""

from __future__ import annotations

import asyncio
import json

import pytest

from freetokend.control import ControlPlane
from freetokend.core.errors import UnavailableError
from tests.control.fakes import FakeOperations
from tests.ctl.conftest import Ctl


async def test_drain_and_resume(plane: ControlPlane, operations: FakeOperations, ctl: Ctl) -> None:
    done = await ctl("drain", "--timeout", "2.5")
    assert done.code == 0
    assert done.out.startswith("drained: ")
    operations.still_running_count = 3
    done = await ctl("drain")
    assert done.code == 75
    assert done.out.startswith("not drained: 3 requests still run,")
    assert (await ctl("resume")).out == "requests are accepted again\n"
    assert operations.calls == [("drain", 2.5), ("drain", 30.0), ("resume", None)]


async def test_drain_and_resume_for_programs(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl
) -> None:
    done = await ctl("drain", "-o", "json")
    assert (done.code, json.loads(done.out)) == (0, {"drained": True, "running_count": 0})
    operations.still_running_count = 1
    done = await ctl("drain", "-o", "json")
    assert (done.code, json.loads(done.out)) == (75, {"drained": False, "running_count": 1})
    assert (await ctl("drain")).out.startswith("not drained: 1 request still runs,")
    done = await ctl("resume", "-o", "json")
    assert (done.code, json.loads(done.out)) == (0, {"resumed": True})


async def test_log_level_for_programs(plane: ControlPlane, ctl: Ctl) -> None:
    before = json.loads((await ctl("log-level", "-o", "json")).out)
    assert before == {"level": before["level"], "previous_level": None}
    done = await ctl("log-level", "error", "-o", "json")
    assert json.loads(done.out) == {"level": "error", "previous_level": before["level"]}
    await ctl("log-level", before["level"])


async def test_log_level(plane: ControlPlane, operations: FakeOperations, ctl: Ctl) -> None:
    before = (await ctl("log-level")).out.strip()
    done = await ctl("log-level", "debug")
    assert done.out == f"debug (was {before})\n"
    assert (await ctl("log-level")).out == "debug\n"
    await ctl("log-level", before)


@pytest.mark.parametrize(("flags", "drains"), [((), True), (("--now",), False)])
async def test_stop_waits_until_the_daemon_has_gone(
    plane: ControlPlane,
    operations: FakeOperations,
    ctl: Ctl,
    flags: tuple[str, ...],
    drains: bool,
) -> None:
    stopping = asyncio.create_task(ctl("stop", *flags))
    async with asyncio.timeout(30):
        await operations.stop_requested.wait()
    assert operations.calls == [("stop", drains)]
    assert not stopping.done()
    await plane.stop(0.5)
    done = await stopping
    assert done.code == 0
    assert done.out.startswith("stopped after ")


async def test_stop_for_programs(plane: ControlPlane, operations: FakeOperations, ctl: Ctl) -> None:
    stopping = asyncio.create_task(ctl("stop", "-o", "json"))
    async with asyncio.timeout(30):
        await operations.stop_requested.wait()
    await plane.stop(0.5)
    told = json.loads((await stopping).out)
    assert told.keys() == {"stopped", "stop_s"}
    assert told["stopped"] is True
    assert 0 < told["stop_s"] < 30


async def test_stop_tells_when_the_daemon_takes_longer(plane: ControlPlane, ctl: Ctl) -> None:
    done = await ctl("stop", "--timeout", "0.2")
    assert done.code == 75
    assert "has not ended after 0.2 s" in done.err


async def test_a_typed_error_of_the_daemon_is_told_with_its_exit_code(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl
) -> None:
    operations.error = UnavailableError("the engine is not there")
    done = await ctl("drain")
    assert (done.code, done.err) == (69, "freetokenctl: the engine is not there\n")
    operations.error = RuntimeError("boom")
    done = await ctl("drain")
    assert done.code == 70
    assert "Traceback" not in done.err


async def test_a_monitor_socket_is_not_enough_to_change(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl, runtime_dir: str
) -> None:
    done = await ctl("stop", "--socket", f"{runtime_dir}/monitor.sock", "-o", "json")
    assert done.out == ""
    assert done.code == 77
    assert "monitor socket" in done.err
    assert operations.calls == []
