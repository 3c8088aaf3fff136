"""The keeper of the state under a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from freetokend.control.state import RequestTotals, StateKeeper
from freetokend.link.messages import EngineState
from tests.control.fakes import FakeGateway, config


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def keeper(gateway: FakeGateway, clock: Clock) -> StateKeeper:
    return StateKeeper(
        gateway=gateway,
        config=config(Path("/run/x")),
        version="1",
        pid=7,
        totals=RequestTotals,
        clock=clock,
        wall_clock=lambda: clock.now_s + 5e8,
    )


async def test_durations_are_measured_to_the_instant(
    keeper: StateKeeper, gateway: FakeGateway, clock: Clock
) -> None:
    gateway.set(state_since_s=990.0, busy=True, last_progress_s=998.0)
    clock.now_s = 1003.0
    state = keeper.state()
    assert (state.uptime_s, state.state_for_s, state.progress_age_s) == (3.0, 13.0, 5.0)
    assert state.next_restart_s is None
    gateway.set(busy=False, next_restart_s=1005.5)
    assert keeper.state().progress_age_s == 0.0
    assert keeper.state().next_restart_s == 2.5
    clock.now_s = 1007.0
    assert keeper.state().next_restart_s == 0.0


async def test_a_warning_keeps_the_time_of_its_first_appearance(
    keeper: StateKeeper, gateway: FakeGateway, clock: Clock
) -> None:
    assert keeper.state().warnings == ()
    gateway.set(state=EngineState.DRAINING)
    before = keeper.state().generation
    clock.now_s = 1060.0
    (raised,) = keeper.state().warnings
    assert (raised.warning.code, raised.since_s) == ("draining", 1000.0 + 5e8)
    gateway.set(state=EngineState.READY)
    assert keeper.state().warnings == ()
    assert keeper.state().generation > before
    gateway.set(state=EngineState.DRAINING)
    (raised,) = keeper.state().warnings
    assert raised.since_s == 1060.0 + 5e8


async def test_a_warning_is_logged_once_when_it_comes_and_once_when_it_goes(
    keeper: StateKeeper, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.set(state=EngineState.RESTARTING, cause="killed")
    for _ in range(3):
        keeper.state()
    gateway.set(state=EngineState.READY)
    for _ in range(3):
        keeper.state()
    events = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert events == [
        ("ERROR", "health-warning-raised"),
        ("INFO", "health-warning-cleared"),
    ]


async def test_rates_follow_the_counters(
    keeper: StateKeeper, gateway: FakeGateway, clock: Clock
) -> None:
    for second in range(11):
        clock.now_s = 1000.0 + second
        gateway.set_stats(decode_tokens_count=20 * second, prefill_tokens_count=500)
        keeper.state()
    assert keeper.state().rates.decode_tokens_per_s == pytest.approx(20.0)
    assert keeper.state().rates.prefill_tokens_per_s == 0.0
    clock.now_s += 3.0
    assert keeper.state().rates.decode_tokens_per_s == pytest.approx(8.0)
    clock.now_s += 60
    assert keeper.state().rates.decode_tokens_per_s == 0.0


async def test_changes_of_engine_and_daemon_wake_those_who_wait(
    keeper: StateKeeper, gateway: FakeGateway
) -> None:
    follower = asyncio.create_task(keeper.run())
    async with asyncio.timeout(5):
        seen = await keeper.changed(0)
        gateway.set_stats(running_count=1)
        seen = await keeper.changed(seen)
        keeper.set_http_address("http://127.0.0.1:1")
        newest = await keeper.changed(seen)
    assert newest > seen
    assert keeper.state().http_address == "http://127.0.0.1:1"
    follower.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await follower


async def test_a_restart_is_a_warning_until_the_new_engine_has_served_for_minutes(
    keeper: StateKeeper, gateway: FakeGateway, clock: Clock
) -> None:
    def codes() -> list[str]:
        return [raised.warning.code for raised in keeper.state().warnings]

    gateway.set(restarts_count=1, cause="killed", pid=8)
    assert codes() == ["engine-was-restarted"]
    clock.now_s += 200.0
    gateway.set(state=EngineState.DRAINING)
    assert codes() == ["draining"]
    gateway.set(state=EngineState.READY, state_since_s=clock.now_s)
    assert codes() == ["engine-was-restarted"]
    clock.now_s += 100.0
    assert codes() == [], "a drain does not make the news new"
    gateway.set(restarts_count=2, pid=9)
    assert codes() == ["engine-was-restarted"]
