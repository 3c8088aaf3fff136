"""The host memory ladder, rung by rung and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freetokend.core.units import GIB, MIB
from freetokend.policy.controller import (
    Command,
    DropIdlePools,
    DropSpill,
    HostFacts,
    LoadModel,
    RefuseLongPrompts,
    UnloadModel,
)
from freetokend.policy.readings import HostReading, PressureReading
from tests.policy.controller.world import World

FULL = HostFacts(spill_bytes=GIB, idle_pools_bytes=2 * GIB, model_bytes=8 * GIB)


def weather(world: World, available_bytes: int | None, **more: Any) -> None:
    values = {"mem_total_bytes": 64 * GIB, "mem_available_bytes": available_bytes} | more
    world.host = HostReading(taken_s=world.now_s + 0.25, **values)


def ticks(world: World, for_s: float, available_bytes: int | None, **more: Any) -> list[Command]:
    commands: list[Command] = []
    for _ in range(round(for_s * 4)):
        weather(world, available_bytes, **more)
        for command in world.tick():
            commands.append(command)
            carry_out(world, command)
    return commands


def carry_out(world: World, command: Command) -> None:
    facts = world.more["host_facts"]
    match command:
        case DropSpill():
            facts = replace(facts, spill_bytes=0)
        case DropIdlePools():
            facts = replace(facts, idle_pools_bytes=0)
        case RefuseLongPrompts():
            facts = replace(facts, long_prompts_refused=command.refuse)
        case UnloadModel():
            facts = replace(facts, model_loaded=False)
            world.engine = None
        case LoadModel():
            facts = replace(facts, model_loaded=True)
        case _:
            raise AssertionError(command)
    world.more["host_facts"] = facts


def new_world() -> World:
    world = World()
    world.more["host_facts"] = FULL
    return world


def test_up_rung_by_rung_and_down_again_with_room_for_the_model() -> None:
    world = new_world()
    commands = ticks(world, 30, 300 * MIB)
    assert [type(command) for command in commands] == [
        DropSpill,
        DropIdlePools,
        RefuseLongPrompts,
        UnloadModel,
    ]
    assert "MemAvailable leaves 0.29 GiB" in commands[0].reason.text
    assert ticks(world, 120, 8 * GIB) == []  # plenty, but not with the model in it
    commands = ticks(world, 120, 12 * GIB)
    assert [type(command) for command in commands] == [LoadModel, RefuseLongPrompts]
    assert world.state.ladder.rung == 0


def test_scarce_but_stable_memory_does_not_unload() -> None:
    world = new_world()
    commands = ticks(world, 120, 600 * MIB)
    assert [type(command) for command in commands] == [DropSpill, DropIdlePools, RefuseLongPrompts]


def test_between_short_and_plenty_nothing_moves() -> None:
    world = new_world()
    ticks(world, 3, 600 * MIB)
    rung = world.state.ladder.rung
    assert rung == 1
    assert ticks(world, 120, 900 * MIB) == []
    assert world.state.ladder.rung == rung


@pytest.mark.parametrize("available_gib", [7, 30])
def test_pressure_with_memory_to_spare_is_none_of_ours(available_gib: int) -> None:
    world = new_world()
    pressure = PressureReading(some_avg10=90.0, full_avg10=80.0)
    assert ticks(world, 60, available_gib * GIB, memory_pressure=pressure) == []


def test_pressure_with_little_memory_climbs() -> None:
    world = new_world()
    pressure = PressureReading(some_avg10=30.0, full_avg10=None)
    commands = ticks(world, 3, 2 * GIB, memory_pressure=pressure)
    assert [type(command) for command in commands] == [DropSpill]
    assert "stall 30 %" in commands[0].reason.text


def test_the_limit_of_the_cgroup_counts_where_it_is_the_tighter() -> None:
    world = new_world()
    limit = {"cgroup_limit_bytes": 10 * GIB, "cgroup_used_bytes": 10 * GIB - 400 * MIB}
    commands = ticks(world, 3, 30 * GIB, **limit)
    assert [type(command) for command in commands] == [DropSpill]
    assert "the cgroup's limit leaves" in commands[0].reason.text


@pytest.mark.parametrize(
    ("available", "more"),
    [(None, {}), (-1, {}), (64 * MIB, {"cgroup_limit_bytes": GIB})],
)
def test_what_is_not_known_leaves_the_ladder_as_it_is(
    available: int | None, more: dict[str, int]
) -> None:
    world = new_world()
    ticks(world, 3, 600 * MIB)
    before = world.state.ladder.rung
    assert ticks(world, 120, available, **more) == []
    assert world.state.ladder.rung == before


def test_a_spike_shorter_than_the_wait_is_nothing() -> None:
    world = new_world()
    for _ in range(20):
        assert ticks(world, 1.75, 100 * MIB if world.now_s < 0 else 600 * MIB) == []
        assert ticks(world, 1, 2 * GIB) == []


def test_a_command_that_is_not_carried_out_is_said_again() -> None:
    world = new_world()
    said = 0
    for _ in range(5 * 4):
        weather(world, 600 * MIB)
        said += sum(isinstance(command, DropSpill) for command in world.tick())
    assert 3 <= said <= 4
