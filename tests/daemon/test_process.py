"""The daemon as a process: start, serve, survive its engine, drain, stop, and its exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.api.control.v1 import control_pb2_grpc as pb_grpc
from tests.daemon.running import (
    DEADLINE_S,
    Daemon,
    completion,
    daemon,
    read_events,
    scripted_daemon,
)
from tests.support.scripted import engine_environment

CYCLE = {"tokens": {"kind": "cycle", "token_ids": [68, 69, 70]}, "heartbeat_s": 0.05}
SLOW = {**CYCLE, "step_s": 0.02}


def client(base_url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S)


async def ready(running: Daemon) -> str:
    base_url = await running.base_url()
    await running.wait_line(r"link\.session engine-ready")
    return base_url


async def test_it_serves_and_stops_with_status_zero() -> None:
    async with scripted_daemon(CYCLE) as running:
        async with client(await ready(running)) as http:
            assert (await http.get("/readyz")).status_code == 200
            answer = await http.post("/v1/completions", json=completion(6, stream=False))
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert "freetoken_" in (await http.get("/metrics")).text
            models = (await http.get("/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["tiny"]
        maps = memory_maps(running.process.pid)
        assert "torch" not in maps
        assert "_host" in maps
        running.terminate()
        assert await running.wait_exit() == 0
        assert "Traceback" not in running.log
        assert sorted(path.name for path in running.runtime_dir.rglob("*.sock")) == []


async def test_a_stop_string_ends_a_sequence_that_counts_as_stopped() -> None:
    async with scripted_daemon(SLOW) as running, client(await ready(running)) as http:
        answer = await http.post("/v1/completions", json=completion(6, stream=False))
        text = answer.json()["choices"][0]["text"]
        body = {**completion(4000, stream=False), "stop": [text[1:3]]}
        (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[:1], "stop")
        metrics = (await http.get("/metrics")).text
        for outcome, count in (("length", 1), ("stop", 1), ("cancelled", 0)):
            name = "freetoken_requests_finished_total"
            assert f'{name}{{model="tiny",outcome="{outcome}"}} {count}.0' in metrics
        status = await get_status(running)
        assert (status.requests.finished_count, status.requests.cancelled_count) == (2, 0)


def memory_maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_nothing_that_the_daemon_imports_imports_torch() -> None:
    code = (
        "import sys, freetokend.daemon.main, freetokend.scripted.main\n"
        "print([name for name in sys.modules if name.split('.')[0] in"
        " ('torch', 'triton', 'transformers')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=engine_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "[]"


async def test_64_clients_get_what_one_gets() -> None:
    async with scripted_daemon(CYCLE) as running:
        limits = httpx.Limits(max_connections=None)
        base_url = await ready(running)
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S, limits=limits) as http:
            solo = await streamed_text(http)
            texts = await asyncio.gather(*(streamed_text(http) for _ in range(64)))
        assert len(solo) == 40
        assert texts == [solo] * 64


async def streamed_text(http: httpx.AsyncClient) -> str:
    async with http.stream("POST", "/v1/completions", json=completion(40)) as response:
        events = [event async for event in read_events(response)]
    assert events[-1] == {"done": True}
    return "".join(event["choices"][0]["text"] for event in events[:-1])


async def test_killed_engine_ends_streams_with_an_error_event_and_comes_back() -> None:
    async with scripted_daemon(SLOW) as running, client(await ready(running)) as http:
        pid = await running.engine_pid()
        request = http.stream("POST", "/v1/completions", json=completion(4000))
        async with request as response:
            events = read_events(response)
            await anext(events)
            seen = len(running.lines)
            os.kill(pid, signal.SIGKILL)
            loop = asyncio.get_running_loop()
            killed_s = loop.time()
            rest = [event async for event in events]
        assert loop.time() - killed_s < 2.0
        assert rest[-1]["error"]["code"] == "engine_failed"
        assert {"done": True} not in rest
        await running.wait_line(r"link\.session engine-ready", seen)
        answer = await http.post("/v1/completions", json=completion(3, stream=False))
        assert answer.status_code == 200
        status = await get_status(running)
        assert status.engine.restarts_count == 1
        assert "SIGKILL" in status.engine.cause


async def get_status(running: Daemon) -> pb.Status:
    async with grpc.aio.insecure_channel(f"unix:{running.runtime_dir}/monitor.sock") as channel:
        stub = pb_grpc.MonitorStub(channel)  # type: ignore[no-untyped-call]
        answer: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest())
        return answer.status


async def test_a_stop_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with scripted_daemon(SLOW) as running, client(await ready(running)) as http:
        async with http.stream("POST", "/v1/completions", json=completion(60)) as response:
            events = read_events(response)
            await anext(events)
            running.terminate()
            await running.wait_line("daemon.service stopping")
            refused = await http.post("/v1/completions", json=completion(3))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert (await http.get("/readyz")).status_code == 503
            rest = [event async for event in events]
        assert rest[-1] == {"done": True}
        assert await running.wait_exit() == 0


async def test_a_second_signal_ends_it_at_once() -> None:
    async with scripted_daemon(SLOW) as running, client(await ready(running)) as http:
        async with http.stream("POST", "/v1/completions", json=completion(4000)) as response:
            events = read_events(response)
            await anext(events)
            running.terminate()
            await running.wait_line("daemon.service stopping")
            running.terminate()
            rest = [event async for event in events]
        assert rest[-1]["error"]["code"] == "draining"
        assert await running.wait_exit() == 0


async def test_a_drain_that_is_too_short_ends_streams_with_an_error() -> None:
    arguments = ("--set", "service.drain_timeout_s=0.2")
    async with scripted_daemon(SLOW, *arguments) as running, client(await ready(running)) as http:
        async with http.stream("POST", "/v1/completions", json=completion(4000)) as response:
            events = read_events(response)
            await anext(events)
            running.terminate()
            rest = [event async for event in events]
        assert rest[-1]["error"]["code"] == "draining"
        assert await running.wait_exit() == 0


async def test_admin_stops_it_and_a_hangup_does_not() -> None:
    async with scripted_daemon(CYCLE) as running:
        await ready(running)
        running.process.send_signal(signal.SIGHUP)
        await running.wait_line("reload-is-not-supported")
        address = f"unix:{running.runtime_dir}/admin.sock"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
            answer = await stub.SetLogLevel(pb.SetLogLevelRequest(level="debug"))
            assert answer.previous == "info"
            await stub.Stop(pb.StopRequest(drain=True))
        assert await running.wait_exit() == 0


async def test_killed_daemon_takes_its_engine_along() -> None:
    async with scripted_daemon(CYCLE) as running:
        await ready(running)
        watch = os.pidfd_open(await running.engine_pid())
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(watch, gone.set)
        running.process.kill()
        try:
            async with asyncio.timeout(1.0):
                await gone.wait()
        finally:
            loop.remove_reader(watch)
            os.close(watch)


async def test_second_daemon_in_one_place_is_refused() -> None:
    async with scripted_daemon(CYCLE) as running:
        await ready(running)
        place = ("--set", f"service.runtime_dir={running.runtime_dir}")
        async with scripted_daemon(CYCLE, *place) as second:
            assert await second.wait_exit() == 75
            assert "another freetokend is running" in second.log
        async with client(await running.base_url()) as http:
            assert (await http.get("/readyz")).status_code == 200
            assert (await http.post("/v1/completions", json=completion(2))).status_code == 200


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (
            {"at": "load", "action": "fail", "reason": "model_invalid", "message": "shard bent"},
            65,
            "shard bent",
        ),
        ({"at": "load", "action": "exit", "exit_code": 1}, 70, "exit code 1"),
    ],
)
async def test_engine_that_never_serves_ends_the_daemon(
    fault: dict[str, Any], status: int, words: str
) -> None:
    arguments = ("--set", "engine.restart_budget_count=1")
    async with scripted_daemon({"faults": [fault]}, *arguments) as running:
        assert await running.wait_exit() == status
        assert re_complaint(running, words)
        assert "Traceback" not in running.log


def re_complaint(running: Daemon, words: str) -> bool:
    return any(line.startswith("freetokend: ") and words in line for line in running.lines)


async def test_engine_that_served_and_spent_its_budget_leaves_a_truthful_daemon() -> None:
    fault = {"at": "step", "step_index": 1, "action": "signal"}
    arguments = ("--set", "engine.restart_budget_count=0")
    async with scripted_daemon({**CYCLE, "faults": [fault]}, *arguments) as running:
        async with client(await ready(running)) as http:
            lost = await http.post("/v1/completions", json=completion(3, stream=False))
            assert lost.status_code == 500
            await running.wait_line("engine-given-up")
            refused = await http.post("/v1/completions", json=completion(3))
            assert refused.status_code == 503
            assert "Retry-After" in refused.headers
            # the same verdict as the status below: no time will mend this
            assert (await http.get("/livez")).status_code == 503
        status = await get_status(running)
        assert status.engine.state == pb.ENGINE_STATE_FAILED
        assert not status.alive
        running.terminate()
        assert await running.wait_exit() == 0


async def test_loading_is_told_and_stopping_does_not_wait_for_it() -> None:
    script = {**CYCLE, "load": {"chunks_count": 1000, "chunk_s": 0.05}}
    async with scripted_daemon(script) as running, client(await running.base_url()) as http:
        refused = await http.post("/v1/completions", json=completion(3))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        running.terminate()
        assert await running.wait_exit() == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--model", "/nowhere/at/all"), 65, "/nowhere/at/all does not exist"),
        ((), 78, "no model is configured"),
        (("--model", "/", "--set", "http.prot=1"), 78, 'did you mean "http.port"'),
        (("--config", "/nowhere.toml"), 78, "/nowhere.toml: the file does not exist"),
        (("--bogus",), 64, "--bogus"),
        (("--set", "nonsense"), 78, "KEY=VALUE"),
        (("--model", "/", "--log-level", "loud"), 78, "loud"),
    ],
)
async def test_wrong_starts_are_one_sentence_and_a_status(
    arguments: tuple[str, ...], status: int, words: str
) -> None:
    async with daemon(*arguments) as running:
        assert await running.wait_exit() == status
        assert re_complaint(running, words), running.log
        assert "Traceback" not in running.log


async def test_taken_port_is_named_and_worth_another_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with scripted_daemon(CYCLE, "--port", port) as running:
            assert await running.wait_exit() == 75, "free at the next try, perhaps"
            assert re_complaint(running, f"127.0.0.1 port {port}")


async def test_check_config_prints_every_value_and_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "freetokend.toml"
    config.write_text('[model]\npath = "/"\n[http]\nport = 1234\n')
    async with scripted_daemon(CYCLE, "--config", str(config), "--check-config") as running:
        assert running.process.stdout is not None
        out = (await running.process.stdout.read()).decode()
        assert await running.wait_exit() == 0
        assert 'model.id = "tiny"' in out
        assert "engine.threads = " in out
        assert not running.runtime_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("--host", "no-such-host.invalid"), "cannot listen on no-such-host.invalid"),
        (("--set", "control.admin_group=no-such-group"), '"no-such-group" does not exist'),
        (("--set", "service.runtime_dir=/proc/none"), "/proc/none"),
    ],
)
async def test_check_config_says_what_the_start_says(
    arguments: tuple[str, ...], words: str
) -> None:
    said = []
    for check in ((), ("--check-config",)):
        async with scripted_daemon(CYCLE, *arguments, *check) as running:
            status = await running.wait_exit()
            complaints = [line for line in running.lines if line.startswith("freetokend: ")]
            said.append((status, complaints))
            assert not check or not running.runtime_dir.exists()
    assert said[0] == said[1]
    assert words in said[1][1][0]


async def test_check_config_is_not_disturbed_by_the_running_service() -> None:
    async with scripted_daemon(CYCLE) as running:
        base_url = await ready(running)
        place = ("--set", f"service.runtime_dir={running.runtime_dir}")
        port = base_url.rpartition(":")[2]
        same = ("--port", port, *place, "--check-config")
        async with scripted_daemon(CYCLE, *same) as check:
            assert await check.wait_exit() == 0, check.log
        async with client(base_url) as http:
            assert (await http.post("/v1/completions", json=completion(2))).status_code == 200
        await get_status(running)
