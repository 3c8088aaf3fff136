"""The reporter on snapshots of our own and a clock of our own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from freetokend.daemon.reporting import ManagerReporter, status_text
from freetokend.link.messages import (
    EngineSnapshot,
    EngineState,
    EngineStats,
    GenerateRequest,
    LoadProgress,
    SequenceStream,
)

GIB = 1 << 30
BASE = EngineSnapshot(state=EngineState.STARTING, state_since_s=0.0, model="m")


@dataclass
class Manager:
    """Writes down what it is told."""

    said: list[str] = field(default_factory=list)
    beat: asyncio.Event = field(default_factory=asyncio.Event)

    def ready(self) -> None:
        self.said.append("READY")

    def status(self, text: str) -> None:
        self.said.append(text)

    def extend_timeout(self, timeout_s: float) -> None:
        self.said.append("EXTEND")

    def watchdog(self) -> None:
        self.said.append("WATCHDOG")
        self.beat.set()


@dataclass
class Gateway:
    """A gateway whose state the test sets; nothing can be generated."""

    now: EngineSnapshot = BASE
    asked: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    def snapshot(self) -> EngineSnapshot:
        self.asked.put_nowait(None)
        return self.now

    async def asked_count(self, count: int) -> None:
        """Wait until the snapshot was asked for that often."""
        for _ in range(count):
            await self.asked.get()

    def generate(self, request: GenerateRequest) -> SequenceStream:
        raise AssertionError(request)

    async def changed(self, generation: int) -> int:
        await asyncio.Event().wait()
        return generation


def reporter(manager: Manager) -> ManagerReporter:
    return ManagerReporter(Gateway(), manager, ready_at_once=False, watchdog_s=None)


def loading(done_bytes: int, progress_s: float) -> EngineSnapshot:
    load = LoadProgress(stage="read", done_bytes=done_bytes, total_bytes=64 * GIB)
    return replace(BASE, state=EngineState.LOADING, load=load, last_progress_s=progress_s)


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        (BASE, "Starting the engine for m"),
        (replace(BASE, state=EngineState.LOADING), "Loading m"),
        (loading(3 * GIB, 0.0), "Loading m: read 3 GiB of 64 GiB"),
        (
            replace(BASE, state=EngineState.READY, stats=EngineStats(running_count=2)),
            "Serving m: 2 running, 0 waiting",
        ),
        (replace(BASE, state=EngineState.DRAINING), "Draining m: 0 requests still run"),
        (
            replace(BASE, state=EngineState.RESTARTING, cause="died with signal 9 (SIGKILL)"),
            "Restarting the engine: it died with signal 9 (SIGKILL)",
        ),
        (
            replace(BASE, state=EngineState.FAILED, cause="died with exit code 1"),
            "The engine has failed: it died with exit code 1",
        ),
        (replace(BASE, state=EngineState.STOPPED), "Stopped"),
    ],
)
def test_status_texts(snapshot: EngineSnapshot, text: str) -> None:
    assert status_text(snapshot) == text


def test_ready_is_told_once_and_status_at_most_once_a_second() -> None:
    manager = Manager()
    report = reporter(manager)
    report.observe(BASE, 0.0)
    for tick in range(100):
        report.observe(loading(tick * GIB // 2, 0.1 * tick), 0.1 * tick)
    statuses = [said for said in manager.said if said.startswith("Loading")]
    assert 9 <= len(statuses) <= 11
    ready = replace(BASE, state=EngineState.READY)
    for tick in range(3):
        report.observe(ready, 10.0 + tick)
    assert manager.said.count("READY") == 1
    assert manager.said[-1] == "Serving m: 0 running, 0 waiting"


def test_more_time_is_asked_for_only_while_loading_advances() -> None:
    manager = Manager()
    report = reporter(manager)
    for tick in range(600):
        report.observe(loading(tick, float(tick)), float(tick))
    advancing = manager.said.count("EXTEND")
    assert 100 <= advancing <= 121
    for tick in range(600, 1200):
        report.observe(loading(600, 599.0), float(tick))
    assert manager.said.count("EXTEND") <= advancing + 1
    report.observe(replace(BASE, state=EngineState.READY, last_progress_s=2000.0), 2000.0)
    report.observe(replace(BASE, state=EngineState.READY, last_progress_s=2010.0), 2010.0)
    assert manager.said.count("EXTEND") <= advancing + 1


@pytest.mark.parametrize("state", EngineState)
async def test_watchdog_beats_in_every_state_but_failed(state: EngineState) -> None:
    manager, gateway = Manager(), Gateway(now=replace(BASE, state=state))
    report = ManagerReporter(gateway, manager, ready_at_once=True, watchdog_s=0.04)
    running = asyncio.create_task(report.run())
    try:
        async with asyncio.timeout(10):
            if state is EngineState.FAILED:
                await gateway.asked_count(3)
                assert "WATCHDOG" not in manager.said
                gateway.now = replace(BASE, state=EngineState.RESTARTING)
            await manager.beat.wait()
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert manager.said[0] == "READY"
