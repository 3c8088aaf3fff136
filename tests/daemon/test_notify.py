"""What the service manager hears, on a socket of our own."""

from __future__ import annotations

import httpx
import pytest

from freetokend.daemon.notify import ServiceManager, watchdog_s
from tests.daemon.running import DEADLINE_S, scripted_daemon
from tests.support.notify_socket import notify_socket

CYCLE = {"tokens": {"kind": "cycle", "token_ids": [68]}, "heartbeat_s": 0.05}


async def test_messages_of_one_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async with notify_socket() as heard:
        monkeypatch.setenv("NOTIFY_SOCKET", heard.path)
        manager = ServiceManager()
        manager.extend_timeout(1.5)
        manager.status("it said:\nWATCHDOG=trigger\n\u4f60 \xe9")
        manager.ready()
        manager.watchdog()
        manager.stopping("bye", timeout_s=30)
        await heard.wait_until(lambda now: len(now.messages) == 5, DEADLINE_S)
        assert heard.messages == [
            {"EXTEND_TIMEOUT_USEC": "1500000"},
            {"STATUS": "it said: WATCHDOG=trigger ? ?"},
            {"READY": "1"},
            {"WATCHDOG": "1"},
            {"STOPPING": "1", "STATUS": "bye", "EXTEND_TIMEOUT_USEC": "30000000"},
        ]


def test_without_a_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    ServiceManager().ready()
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/socket")
    ServiceManager().ready()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_period(environ: dict[str, str], expected: float | None) -> None:
    assert watchdog_s(environ, 7) == expected


async def test_daemon_reports_loading_ready_watchdog_and_stop() -> None:
    script = {**CYCLE, "load": {"chunks_count": 30, "chunk_s": 0.1, "total_bytes": 3 << 20}}
    async with notify_socket() as heard:
        environment = {"NOTIFY_SOCKET": heard.path, "WATCHDOG_USEC": "6000000"}
        async with scripted_daemon(script, environment=environment) as running:
            await heard.wait_for("READY", "1", DEADLINE_S)
            await running.wait_line(r"link\.session engine-ready")
            loading = [s for s in heard.values("STATUS") if "of 3 MiB" in s]
            assert loading, heard.values("STATUS")
            assert len(heard.values("EXTEND_TIMEOUT_USEC")) >= 1
            ready_index = heard.messages.index({"READY": "1"})
            beats = len(heard.values("WATCHDOG"))
            await heard.wait_until(lambda now: len(now.values("WATCHDOG")) >= beats + 2, DEADLINE_S)
            running.terminate()
            assert await running.wait_exit() == 0
        await heard.wait_for("STOPPING", "1")
        after = [m for m in heard.messages[ready_index + 1 :] if "READY" in m]
        assert after == [], "READY is said once"


async def test_listening_is_ready_before_the_model() -> None:
    script = {**CYCLE, "load": {"chunks_count": 1000, "chunk_s": 0.05}}
    async with notify_socket() as heard:
        arguments = ("--set", "service.ready=listening")
        environment = {"NOTIFY_SOCKET": heard.path}
        async with scripted_daemon(script, *arguments, environment=environment) as running:
            await heard.wait_for("READY", "1", DEADLINE_S)
            assert "link.session engine-ready" not in running.log


async def test_watchdog_ends_when_the_restart_budget_is_spent() -> None:
    fault = {"at": "step", "step_index": 1, "action": "signal"}
    async with notify_socket() as heard:
        environment = {"NOTIFY_SOCKET": heard.path, "WATCHDOG_USEC": "400000"}
        arguments = ("--set", "engine.restart_budget_count=0")
        script = {**CYCLE, "faults": [fault]}
        async with scripted_daemon(script, *arguments, environment=environment) as running:
            await heard.wait_for("READY", "1", DEADLINE_S)
            await ask_once(await running.base_url())
            await running.wait_line("engine-given-up")
            await heard.wait_until(
                lambda now: any(
                    s.startswith("The engine has failed") for s in now.values("STATUS")
                ),
                DEADLINE_S,
            )
            beats = len(heard.values("WATCHDOG"))
            with pytest.raises(TimeoutError):  # six periods; one beat may have been on its way
                await heard.wait_until(lambda now: len(now.values("WATCHDOG")) > beats + 1, 0.6)


async def ask_once(base_url: str) -> None:
    async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
