"""When bandwidths are measured, and where the figures go; the clock is the test's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from freetokend.control.bandwidth import BandwidthKeeper, ProfiledMachine
from freetokend.control.profiles import ProfileStore
from freetokend.core.errors import UnavailableError
from freetokend.link.bandwidth_messages import BandwidthMeasured
from freetokend.link.messages import EngineSnapshot, EngineState, EngineStats
from freetokend.policy.bandwidth_profile import Figure, FigureName, ProfileSource
from freetokend.policy.profiling import IDLE_QUIET_S, LIMIT_S
from tests.control.fakes import CACHED

INTERVAL_S = 600.0


class Measuring:
    """An engine that measures at once, what it is told to."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.asked: list[tuple[str, ...]] = []
        self.parts_left: tuple[str, ...] = ()
        self.error: UnavailableError | None = None

    async def measure_bandwidth(
        self,
        *,
        parts: tuple[str, ...] = (),
        limit_s: float,
        progress: Callable[[str], None] = lambda part: None,
    ) -> BandwidthMeasured:
        assert limit_s <= LIMIT_S
        assert not self.machine.snapshot.busy
        self.asked.append(parts)
        if self.error is not None:
            raise self.error
        figure = Figure(name=FigureName.HOST_READ, value=5e9 + len(self.asked))
        return BandwidthMeasured(
            run_id="r",
            figures=(figure,),
            parts_left=self.parts_left,
            interrupted="a request came" if self.parts_left else "",
        )


class Machine:
    """A keeper, the engine that it sees, and time."""

    def __init__(self, state_dir: Path, interval_s: float = INTERVAL_S) -> None:
        self.now_s = 1000.0
        self.snapshot = EngineSnapshot(
            state=EngineState.READY, state_since_s=0.0, model="m", pid=7, description=CACHED
        )
        self.measuring = Measuring(self)
        self.store = ProfileStore(state_dir)
        self.keeper = BandwidthKeeper(
            ProfiledMachine(
                snapshot=lambda: self.snapshot, driver_version=lambda: "580", version="1.2"
            ),
            self.measuring,
            self.store,
            interval_s=interval_s,
            clock=lambda: self.now_s,
            wall_clock=lambda: 1e9 + self.now_s,
        )

    async def passes(self, seconds: float, step_s: float = 0.5) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            await self.keeper.look()

    def serve(self, running_count: int) -> None:
        self.snapshot = replace(
            self.snapshot,
            busy=running_count > 0,
            stats=EngineStats(running_count=running_count),
        )

    def sources(self) -> list[ProfileSource]:
        entry = self.keeper.entry()
        return [] if entry is None else [one.source for one in entry.measurements]


async def test_without_an_entry_it_measures_by_itself_and_then_no_more(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.passes(30.0)
    assert machine.sources() == [ProfileSource.BOOT]
    assert machine.measuring.asked == [()]
    again = Machine(tmp_path)
    await again.passes(30.0)
    assert again.measuring.asked == []
    assert again.sources() == [ProfileSource.BOOT]


async def test_ten_idle_intervals_give_ten_entries(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.passes(10.0)
    await machine.passes(10 * (INTERVAL_S + IDLE_QUIET_S), step_s=1.0)
    assert machine.sources() == [ProfileSource.BOOT, *[ProfileSource.IDLE] * 10]
    on_disk = machine.store.read("").entries
    assert len(on_disk) == 1
    assert len(on_disk[0].measurements) == 11


async def test_nothing_is_measured_under_load_however_long(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.serve(3)
    await machine.passes(3 * INTERVAL_S, step_s=1.0)
    assert machine.measuring.asked == []
    machine.serve(0)
    await machine.passes(2.0)
    assert machine.sources() == [ProfileSource.BOOT]


async def test_short_rests_of_a_conversation_are_not_idle(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.passes(2.0)
    assert len(machine.measuring.asked) == 1
    for _ in range(400):
        machine.serve(1)
        await machine.passes(1.0)
        machine.serve(0)
        await machine.passes(3.0)
    assert len(machine.measuring.asked) == 1


async def test_what_a_request_interrupted_goes_on_when_it_is_quiet(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.measuring.parts_left = ("pair", "disk")
    await machine.passes(1.5)
    machine.serve(1)
    await machine.passes(20.0)
    assert machine.measuring.asked == [()]
    machine.measuring.parts_left = ()
    machine.serve(0)
    await machine.passes(5.0)
    assert machine.measuring.asked == [(), ("pair", "disk")]
    assert machine.sources() == [ProfileSource.BOOT] * 2


async def test_an_engine_that_refuses_is_not_asked_again_and_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.measuring.error = UnavailableError("not now")
    with pytest.raises(UnavailableError, match="not now"):
        await machine.passes(5.0)
    await machine.passes(100.0)
    assert len(machine.measuring.asked) == 1


async def test_other_experts_are_another_entry(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.passes(5.0)
    machine.snapshot = replace(
        machine.snapshot, pid=8, description=replace(CACHED, expert_format="bf16")
    )
    await machine.passes(5.0)
    assert len(machine.store.read("").entries) == 2
    assert machine.sources() == [ProfileSource.BOOT]


async def test_an_interval_of_nought_measures_only_what_is_unknown(tmp_path: Path) -> None:
    machine = Machine(tmp_path, interval_s=0.0)
    await machine.passes(3 * INTERVAL_S, step_s=1.0)
    assert len(machine.measuring.asked) == 1


async def test_while_no_engine_is_ready_nothing_is_asked(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.snapshot = replace(machine.snapshot, state=EngineState.LOADING)
    await machine.passes(5.0)
    machine.snapshot = replace(
        machine.snapshot, state=EngineState.READY, stats=EngineStats(asleep=True)
    )
    await machine.passes(5.0)
    assert machine.measuring.asked == []
