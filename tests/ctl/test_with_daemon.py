"""`freetokenctl` and a scraper against the real daemon with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx

from tests.control.test_metrics import lint
from tests.ctl.conftest import Ctl
from tests.daemon.running import DEADLINE_S, Daemon, completion, scripted_daemon

CYCLE = {"tokens": {"kind": "cycle", "token_ids": [68, 69, 70]}, "heartbeat_s": 0.05}
SLOW = {**CYCLE, "step_s": 0.02}


def socket_of(running: Daemon) -> str:
    return str(running.runtime_dir / "admin.sock")


async def test_from_wait_to_stop(ctl: Ctl) -> None:
    async with scripted_daemon(CYCLE, "--set", "engine.max_waiting_count=7") as running:
        base_url = await running.base_url()
        where = ("--socket", socket_of(running))
        assert (await ctl(*where, "wait", "--timeout", "60")).code == 0
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            for stream in (False, True):
                answer = await http.post("/v1/completions", json=completion(6, stream=stream))
                assert answer.status_code == 200
            assert (await http.get("/no/such/path")).status_code == 404
            metrics = await http.get("/metrics")

            status = json.loads((await ctl(*where, "status", "-o", "json")).out)
            assert status["ready"] is True
            assert status["http_address"] == base_url
            assert status["pid"] == running.process.pid
            assert status["model"]["model"] == "tiny"
            assert status["requests"]["finished_count"] == 2
            assert [warning["code"] for warning in status["warnings"]] == ["scripted-engine"]

            origins = (await ctl(*where, "config", "show", "--origin")).out
            assert "engine.max_waiting_count = 7 " in origins

            assert (await ctl(*where, "drain")).code == 0
            assert (await http.get("/readyz")).status_code == 503
            refused = await http.post("/v1/completions", json=completion(6, stream=False))
            assert refused.status_code == 503
            assert (await ctl(*where, "resume")).code == 0
            assert (await http.get("/readyz")).status_code == 200
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        lint(metrics.content)
        for line in (
            'freetoken_http_requests_total{method="POST",route="/v1/completions",status="200"} 2.0',
            'freetoken_http_requests_total{method="GET",route="other",status="404"} 1.0',
            'freetoken_requests_finished_total{model="tiny",outcome="length"} 2.0',
            'freetoken_completion_tokens_total{model="tiny"} 12.0',
            'freetoken_ready{model="tiny"} 1.0',
        ):
            assert line in metrics.text.splitlines()
        done = await ctl(*where, "stop")
        assert done.code == 0
        assert await running.wait_exit() == 0


async def test_a_client_that_goes_away_is_counted_as_cancelled(ctl: Ctl) -> None:
    async with scripted_daemon(SLOW) as running:
        base_url = await running.base_url()
        where = ("--socket", socket_of(running))
        assert (await ctl(*where, "wait", "--timeout", "60")).code == 0
        async with (
            httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http,
            http.stream("POST", "/v1/completions", json=completion(3000, stream=True)) as answer,
        ):
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("data:"):
                pass
            status = json.loads((await ctl(*where, "status", "-o", "json")).out)
            assert status["requests"]["running_count"] == 1
            assert status["requests"]["decode_tokens_per_s"] > 0
        async with asyncio.timeout(DEADLINE_S):
            while True:
                status = json.loads((await ctl(*where, "status", "-o", "json")).out)
                if status["requests"]["cancelled_count"] == 1:
                    break
        assert status["requests"]["running_count"] == 0


async def test_an_engine_that_dies_is_seen_with_its_cause(ctl: Ctl) -> None:
    async with scripted_daemon(SLOW) as running:
        where = ("--socket", socket_of(running))
        assert (await ctl(*where, "wait", "--timeout", "60")).code == 0
        os.kill(await running.engine_pid(), signal.SIGKILL)
        await running.wait_line("engine-died")
        assert (await ctl(*where, "wait", "--timeout", "60")).code == 0
        status = json.loads((await ctl(*where, "status", "-o", "json")).out)
        assert status["engine"]["restarts_count"] == 1
        assert "signal 9" in status["engine"]["cause"] or "SIGKILL" in status["engine"]["cause"]
        codes = [warning["code"] for warning in status["warnings"]]
        assert "engine-was-restarted" in codes
        assert "health-warning-raised" in running.log


async def test_top_follows_a_running_request(ctl: Ctl) -> None:
    async with scripted_daemon(SLOW) as running:
        where = ("--socket", socket_of(running))
        assert (await ctl(*where, "wait", "--timeout", "60")).code == 0
        base_url = await running.base_url()
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            request = asyncio.create_task(
                http.post("/v1/completions", json=completion(60, stream=False))
            )
            done = await ctl(*where, "top", "--interval", "0.2", "--count", "4")
            assert (await request).status_code == 200
        assert done.code == 0
        assert len(done.out.splitlines()) == 4
        assert "running=1" in done.out
