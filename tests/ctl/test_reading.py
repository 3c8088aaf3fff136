"""The verbs that read, run as programs against a real control plane."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
from pathlib import Path

import pytest

from freetokend.control import ControlPlane, serve_control
from freetokend.control.probes.ports import PressureReadings, ProbeError
from freetokend.link.messages import EngineState, LoadProgress
from tests.control.fakes import FakeGateway, FakeOperations, config, facts
from tests.ctl.conftest import Ctl, started
from tests.fakes.nvml import NOT_AVAILABLE, FakeGpu
from tests.fakes.probes import ScriptedGpu, ScriptedHost
from tests.fakes.readings import fill_machine

GOLDEN = Path(__file__).with_name("status.golden.json")


def shape(value: object) -> object:
    """The names and kinds of a JSON document without its values."""
    match value:
        case dict():
            return {key: shape(item) for key, item in value.items()}
        case list():
            return [shape(item) for item in value[:1]]
        case bool():
            return "bool"
        case int() | float():
            return "number"
        case str():
            return "string"
        case _:
            return "null"


async def test_status_for_people(plane: ControlPlane, gateway: FakeGateway, ctl: Ctl) -> None:
    plane.set_http_address("http://127.0.0.1:8440")
    gateway.set_stats(running_count=3, kv_pages_used_count=5, kv_pages_total_count=1000)
    done = await ctl("status")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert re.fullmatch(r"freetokend 1\.2\.3, ready \(up .*\)", lines[0])
    assert {re.split(r"  +", line.strip(), maxsplit=1)[0]: line for line in lines[1:]}.keys() == {
        "model",
        "device",
        "pool",
        "requests",
        "speed",
        "kv cache",
        "http",
        "gpu",
        "host",
    }
    assert "gpu        unknown (there is no driver)\n" in done.out
    assert "demo, context 32768 tokens, 30 layers, 28 with 8 experts of 5 MiB; " in done.out
    assert "; experts in mxfp4, the rest in int8_g32_f16 and bf16\n" in done.out
    assert (
        "cpu (Some CPU), avx2, fast numerics, 4 threads on CPUs 0-3 (one per physical core); "
        "backend cpu: no NVIDIA GPU" in done.out
    )
    assert "10 GiB in pages of 2 MiB, all pinned, re-attached in 20 ms" in done.out
    assert "3 running, 0 waiting; 0 finished" in done.out
    assert "5 of 1000 pages used (1 GiB in all)" in done.out


async def test_status_says_why_it_is_not_ready_and_what_is_wrong(
    plane: ControlPlane, gateway: FakeGateway, ctl: Ctl
) -> None:
    gateway.set(
        state=EngineState.LOADING,
        load=LoadProgress(stage="warm_up", done_bytes=3 << 30, total_bytes=8 << 30),
        description=None,
        cause="killed by signal 9",
        restarts_count=2,
    )
    done = await ctl("status")
    assert done.code == 0
    assert "not ready: the model is being loaded: 3 GiB of 8 GiB" in done.out
    assert "loading    warm up: 3 GiB of 8 GiB (38%)" in done.out
    assert "last end   killed by signal 9, 2 restarts" in done.out
    assert re.search(
        r"^  warning    The engine was restarted 2 times.*\[engine-was", done.out, re.M
    )
    assert "http       not listening yet" in done.out
    gateway.set(restarts_count=1)
    assert "last end   killed by signal 9, 1 restart\n" in (await ctl("status")).out


async def test_status_tells_the_machine_and_what_is_unknown_of_it(
    plane: ControlPlane, ctl: Ctl, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    await fill_machine(plane.machine, gpu, host)
    out = (await ctl("status")).out
    assert (
        "  gpu        NVIDIA GeForce RTX 4090: 10 GiB of 24 GiB free; own 8 GiB, others 5 GiB "
        "(most: pid 4711 8 GiB, pid 777 4 GiB); PCIe 1 x16 now, PCIe 4 x16 at most; driver "
        "580.65.06; clocks held down by sw-power-cap\n"
    ) in out
    assert (
        "  host       32 GiB of 64 GiB memory available; control group 3 GiB of 16 GiB; pressure: "
        "memory 10%, cpu 84%, io 0%; others use 25% of the executor's CPUs\n"
    ) in out
    host.pressure = PressureReadings()
    gpu.gpus = [FakeGpu(compute={4711: NOT_AVAILABLE})]
    await plane.machine.look()
    out = (await ctl("status")).out
    assert "own unknown, others unknown (most: pid 4711 unknown); PCIe 4 x16; driver" in out
    assert "pressure: unknown" in out
    gpu.gpus = [FakeGpu(lost=True)]
    await plane.machine.look()
    assert "gpu        NVIDIA GeForce RTX 4090: lost, it does not" in (await ctl("status")).out
    gpu.error = ProbeError("nvmlDeviceGetName: Timeout")
    await plane.machine.look()
    out = (await ctl("status")).out
    assert "gpu        unknown (its probe fails)\n" in out
    assert re.search(
        r"no reading gpu: nvmlDeviceGetName: Timeout \(for .*, \d+ failures since", out
    )


async def test_the_names_of_the_json_are_stable(
    plane: ControlPlane, gateway: FakeGateway, ctl: Ctl, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    await fill_machine(plane.machine, gpu, host)
    host.load_error = ProbeError("no stat")
    await plane.machine.look()
    gateway.set(
        state=EngineState.LOADING, load=LoadProgress(stage="read", done_bytes=1, total_bytes=2)
    )
    gateway.set_stats(kv_pages_used_count=5)
    gateway.set(restarts_count=1)
    done = await ctl("status", "-o", "json")
    status = json.loads(done.out)
    assert status["engine"]["state"] == "loading"
    assert status["warnings"][0]["severity"] == "warning"
    assert status["pool"]["size_bytes"] == 10 << 30
    if os.environ.get("FREETOKEN_UPDATE_GOLDENS") == "1":
        GOLDEN.write_text(json.dumps(shape(status), indent=2) + "\n")
    # Adding is harmless; taking away or changing a kind breaks the programs that read it.
    assert shape(status) == json.loads(GOLDEN.read_text())
    assert gateway.snapshot().description is not None
    assert status["machine"]["gpu"]["own_bytes"] == 8 << 30
    assert status["machine"]["host"]["executor_load_ratio"] is None
    gateway.set(description=None)
    assert json.loads((await ctl("status", "-o", "json")).out)["device"] is None


async def test_top_prints_lines_when_nobody_looks(plane: ControlPlane, ctl: Ctl) -> None:
    done = await ctl("top", "--count", "2", "--interval", "0.1")
    assert done.code == 0
    assert [line.split()[1] for line in done.out.splitlines()] == ["ready", "ready"]
    assert "\x1b" not in done.out
    done = await ctl("top", "--count", "1", "-o", "json")
    assert json.loads(done.out)["ready"] is True


async def test_top_ends_with_the_daemon(plane: ControlPlane, environment: dict[str, str]) -> None:
    top = await started(environment, "top", "--interval", "0.1")
    assert top.stdout is not None
    async with asyncio.timeout(60):
        await top.stdout.readline()
        await plane.stop(0.0)
        _, err = await top.communicate()
    assert top.returncode == 69
    assert b"went away" in err


async def test_versions_of_client_and_daemon(plane: ControlPlane, ctl: Ctl) -> None:
    from freetokend import __version__

    done = await ctl("version")
    assert done.out == f"freetokenctl {__version__}\nfreetokend   1.2.3\n"
    done = await ctl("version", "-o", "json")
    assert json.loads(done.out) == {"client": __version__, "daemon": "1.2.3"}


async def test_version_without_a_daemon(ctl: Ctl, tmp_path: Path) -> None:
    done = await ctl("version", FREETOKEN_SOCKET=str(tmp_path / "none"))
    assert (done.code, done.err) == (0, "")
    assert "(not running)" in done.out


async def test_configuration_as_toml_with_origins_and_as_json(
    plane: ControlPlane, ctl: Ctl
) -> None:
    import tomllib

    shown = tomllib.loads((await ctl("config", "show")).out)
    assert shown["model"] == {"path": "/models/demo", "id": "demo"}
    assert shown["engine"]["kv_bytes"] == "auto"
    done = await ctl("config", "show", "--origin")
    assert re.search(r'^model\.path = "/models/demo" +# command line$', done.out, re.M)
    assert re.search(
        r'^engine\.backend = "cpu" +# default  \(no NVIDIA GPU is present\)$', done.out, re.M
    )
    values = json.loads((await ctl("config", "show", "-o", "json")).out)
    assert values[0] == {
        "key": "model.path",
        "value": '"/models/demo"',
        "origin": "command line",
        "reason": "",
    }


async def test_the_list_of_keys_needs_no_daemon(ctl: Ctl) -> None:
    done = await ctl("config", "keys", FREETOKEN_SOCKET="/nonexistent")
    assert done.code == 0
    assert "#port = 8440" in done.out


async def test_wait_returns_at_once_when_ready(plane: ControlPlane, ctl: Ctl) -> None:
    done = await ctl("wait", "--ready", "--timeout", "60")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = await ctl("wait", "--timeout", "60", "-o", "json")
    told = json.loads(done.out)
    assert (done.code, told.keys(), told["ready"]) == (0, {"ready", "wait_s"}, True)
    assert 0 < told["wait_s"] < 60


async def test_wait_tells_a_person_what_it_waits_for_and_returns_when_ready(
    plane: ControlPlane, gateway: FakeGateway, environment: dict[str, str]
) -> None:
    gateway.set(state=EngineState.LOADING)
    main_fd, terminal_fd = pty.openpty()
    waiting = await started(environment, "wait", "--timeout", "60", stderr=terminal_fd)
    os.close(terminal_fd)
    async with asyncio.timeout(60):
        told = await asyncio.to_thread(os.read, main_fd, 1000)
        assert told.strip() == b"not ready yet: the model is being loaded"
        assert waiting.returncode is None
        gateway.set(state=EngineState.READY)
        assert await waiting.wait() == 0
    os.close(main_fd)


async def test_wait_waits_for_a_daemon_that_is_still_to_come(
    runtime_dir: Path, gateway: FakeGateway, environment: dict[str, str]
) -> None:
    waiting = await started(environment, "wait", "--timeout", "60")
    plane = await serve_control(
        gateway=gateway,
        config=config(runtime_dir),
        facts=facts(),
        operations=FakeOperations(),
        version="1",
    )
    async with asyncio.timeout(60):
        assert await waiting.wait() == 0
    await plane.stop(0.0)


async def test_wait_ends_at_its_timeout_with_the_reason(
    plane: ControlPlane, gateway: FakeGateway, ctl: Ctl
) -> None:
    gateway.set(state=EngineState.LOADING)
    done = await ctl("wait", "--timeout", "0.5")
    assert done.code == 75
    assert done.err == "freetokenctl: not ready after 0.5 s: the model is being loaded\n"


async def test_wait_does_not_wait_for_what_cannot_come(
    plane: ControlPlane, gateway: FakeGateway, ctl: Ctl
) -> None:
    gateway.set(state=EngineState.FAILED, cause="exit code 65: the index is damaged")
    done = await ctl("wait", "--timeout", "60")
    assert done.code == 69
    assert "cannot become ready: exit code 65: the index is damaged" in done.err


async def test_wait_without_a_daemon_tells_so_at_its_timeout(ctl: Ctl, tmp_path: Path) -> None:
    done = await ctl("wait", "--timeout", "0.3", FREETOKEN_SOCKET=str(tmp_path / "none"))
    assert done.code == 69
    assert "is not running" in done.err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
async def test_wait_refuses_absurd_timeouts(ctl: Ctl, text: str) -> None:
    done = await ctl("wait", f"--timeout={text}")
    assert done.code == 64
    assert "is not a time above 0" in done.err
