"""Shrinking, growing, and what keeps the two apart: one rule a test."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from freetokend.core.units import GIB, MIB
from freetokend.policy.controller import (
    Floor,
    Hold,
    Outcome,
    ProcessRule,
    ReasonCode,
    SessionNeeds,
    Spec,
    Window,
)
from freetokend.policy.readings import GpuProcess
from freetokend.policy.vram_budget import Preset, VramWishes
from tests.policy.controller.world import KV_FLOOR_PAGES, SHAPE, World, as_it_is, engine, with_sizes

# Slots as they fit beside 64 pages.
AUTO = Spec(wishes=VramWishes(kv_bytes=GIB))
GAME = GpuProcess(pid=7, name="Game.exe", used_bytes=GIB)


def test_at_rest_nothing_is_commanded() -> None:
    world = World()
    assert world.ticks(120) == []
    assert world.state.standing.code is ReasonCode.STEADY


def test_a_grab_is_answered_at_the_next_tick_with_cushion_and_margin_and_numbers() -> None:
    world = World(AUTO)
    world.tick()
    world.free_bytes = GIB // 2  # 1 GiB short of the cushion
    command = world.one(world.tick())
    assert command.urgent
    assert command.reason.code is ReasonCode.VRAM_TAKEN
    assert "0.50 GiB free" in command.reason.text
    assert "1.00 GiB short" in command.reason.text
    before_bytes = world.engine.elastic_bytes if world.engine else 0
    world.obey(command)
    assert world.engine is not None
    freed_bytes = before_bytes - world.engine.elastic_bytes
    assert GIB + 512 * MIB <= freed_bytes <= GIB + 512 * MIB + 2 * SHAPE.record_bytes


def test_what_others_take_of_the_margin_costs_no_resize() -> None:
    world = World(AUTO)
    world.tick()
    world.free_bytes = GIB + GIB // 2
    assert world.ticks(60) == []


def test_repeated_grabs_are_given_twice_as_much_and_the_sixth_all_but_the_floor() -> None:
    world = World(AUTO)
    world.engine = with_sizes(engine(), 160, 200)
    freed_bytes = []
    for _ in range(6):
        world.free_bytes = GIB + GIB // 2 - 64 * MIB
        before_bytes = world.engine.elastic_bytes
        commands = world.tick()
        if not commands:
            break
        world.obey(world.one(commands))
        freed_bytes.append(before_bytes - world.engine.elastic_bytes)
    assert all(b >= a for a, b in pairwise(freed_bytes[:-1]))
    assert (world.engine.slots_count, world.engine.kv_pages_count) == (2, KV_FLOOR_PAGES)
    world.free_bytes = 0
    assert world.ticks(10) == []
    assert world.state.standing.code is ReasonCode.FLOOR


def test_after_five_resizes_of_a_minute_the_next_grab_leads_to_the_floor() -> None:
    world = World(AUTO)
    sizes = []
    for grab in range(6):
        world.engine = with_sizes(world.engine or engine(), 160 - grab, 64)
        world.free_bytes = GIB
        command = world.one(world.tick())
        world.obey(command)
        sizes.append(command.slots_count)
        world.engine = with_sizes(world.engine, 160, 64)  # as if it had grown at once
    assert sizes[-1] == 2
    assert min(sizes[:-2]) > 2
    world.free_bytes = GIB
    assert world.tick() == ()
    assert world.state.standing.code is ReasonCode.RATE_LIMIT


@pytest.mark.parametrize(("floor", "slots"), [(Floor.ONE_TOKEN, 2), (Floor.LAYER, 16)])
def test_never_below_the_floor(floor: Floor, slots: int) -> None:
    world = World(replace(AUTO, floor=floor))
    world.free_bytes = 0
    world.engine = with_sizes(engine(), slots + 1, KV_FLOOR_PAGES + 1)
    command = world.one(world.tick())
    assert (command.slots_count, command.kv_pages_count) == (slots, KV_FLOOR_PAGES)
    world.obey(command)
    world.free_bytes = 0
    assert world.ticks(70) == []
    assert world.state.standing.code is ReasonCode.FLOOR
    assert "is the floor" in world.state.standing.text


def test_pages_in_use_stay_and_slots_give_way() -> None:
    world = World(AUTO, engine(kv_pages_used_count=60))
    world.tick()
    world.free_bytes = 0
    command = world.one(world.tick())
    assert command.kv_pages_count >= 60


def test_growth_waits_until_there_was_room_for_thirty_seconds() -> None:
    world = World(AUTO)
    world.free_bytes = 5 * GIB
    assert world.ticks(30) == []
    assert world.state.standing.code is ReasonCode.WAITING
    command = world.one(world.ticks(0.25))
    assert command.reason.code is ReasonCode.VRAM_FREE
    assert command.slots_count > 100
    assert not command.urgent
    world.obey(command)
    assert world.free_bytes is not None
    assert 2 * GIB <= world.free_bytes < 2 * GIB + 256 * MIB
    assert world.ticks(120) == []


def test_room_that_goes_meanwhile_begins_the_wait_anew() -> None:
    world = World(AUTO)
    world.free_bytes = 6 * GIB
    world.ticks(20)
    world.free_bytes = 2 * GIB
    world.ticks(1)
    world.free_bytes = 6 * GIB
    assert world.ticks(30) == []
    assert len(world.ticks(0.5)) == 1


def test_growth_takes_no_more_than_there_was_all_the_time() -> None:
    world = World(AUTO)
    world.free_bytes = 3 * GIB
    world.ticks(20)
    world.free_bytes = 12 * GIB
    command = world.one(world.ticks(10.25))
    after_bytes = (
        command.slots_count * SHAPE.record_bytes + command.kv_pages_count * SHAPE.kv_page_bytes
    )
    assert after_bytes <= engine().elastic_bytes + GIB


@pytest.mark.parametrize(
    "wrong",
    [
        {"free_bytes": None},
        {"free_bytes": (1 << 64) - 1},
        {"free_bytes": -1},
        {"free_bytes": 25 * GIB},
        {"is_lost": True},
        {"taken_s": 1.0},
        {"taken_s": 1e9},
        {"taken_s": float("nan")},
    ],
)
def test_what_is_not_known_freezes_the_cache(wrong: dict[str, object]) -> None:
    world = World(AUTO)
    world.free_bytes = 6 * GIB
    world.ticks(29)
    world.reading = wrong
    assert world.ticks(10) == []
    assert world.state.standing.code is ReasonCode.GPU_UNKNOWN
    world.reading = {}
    assert world.ticks(30) == []  # nobody knows what was in between
    assert len(world.ticks(0.5)) == 1


def test_one_look_that_fails_does_not_begin_the_wait_anew() -> None:
    world = World(AUTO)
    world.free_bytes = 6 * GIB
    world.ticks(29)
    world.gpu_fails = True
    assert world.ticks(1.5) == []
    world.gpu_fails = False
    assert len(world.tick()) == 1


def test_a_reading_older_than_the_one_before_is_none() -> None:
    world = World(AUTO)
    world.tick()
    world.free_bytes = 0
    world.reading = {"taken_s": world.now_s - 0.1}
    assert world.tick() == ()
    assert "older than the one before" in world.state.standing.text


def test_after_a_change_the_card_is_looked_at_again_first() -> None:
    world = World(AUTO)
    world.free_bytes = 0
    world.obey(world.one(world.tick()))
    world.free_bytes = 0
    world.reading = {"taken_s": world.now_s}  # before the change is seen
    assert world.tick() == ()
    assert world.state.standing.code is ReasonCode.WAITING


def test_a_growth_that_is_taken_back_doubles_the_wait() -> None:
    world = World(AUTO)
    world.free_bytes = 6 * GIB
    for wait_s in (30, 60, 120, 240, 240):
        assert world.ticks(wait_s) == [], wait_s
        world.obey(world.one(world.ticks(0.25)))
        world.ticks(5)
        world.free_bytes = GIB
        world.obey(world.one(world.tick()))
        world.free_bytes = 6 * GIB
    world.now_s += 4000  # the wait becomes shorter again with the time
    world.free_bytes = GIB + GIB // 2
    world.ticks(1)
    assert world.state.growth.hold_s == 120


def test_a_growth_that_fails_is_tried_again_later_with_less() -> None:
    world = World(AUTO)
    world.free_bytes = 10 * GIB
    first = world.one(world.ticks(30.25))
    world.obey(first, Outcome.FAILED)
    assert world.ticks(4.75) == []
    assert world.state.standing.code is ReasonCode.BACK_OFF
    second = world.one(world.ticks(0.75))
    assert second.generation == first.generation + 1
    gained = first.slots_count - 100
    assert second.slots_count - 100 <= gained // 2 + 1
    world.obey(second)
    third = world.until(61)  # two growths a minute
    assert third.slots_count == first.slots_count


def test_an_urgent_shrink_pre_empts_a_growth() -> None:
    world = World(AUTO)
    world.free_bytes = 6 * GIB
    growth = world.one(world.ticks(30.25))
    world.free_bytes = GIB
    shrink = world.one(world.tick())
    assert shrink.generation == growth.generation + 1
    assert shrink.urgent
    assert shrink.slots_count < 100
    assert world.state.growth.hold_s == 60


def test_a_shrink_under_way_that_suffices_is_not_commanded_twice() -> None:
    world = World(AUTO)
    world.free_bytes = GIB
    world.one(world.tick())
    assert world.tick() == ()
    world.free_bytes = 0  # now it does not
    assert world.one(world.tick()).generation == 2


def test_a_hold_is_given_at_once_and_says_for_what() -> None:
    world = World(AUTO)
    world.tick()
    world.spec = replace(AUTO, holds=(Hold(hold_id="1", size_bytes=4 * GIB, reason="rendering"),))
    command = world.one(world.tick())
    assert command.reason.code is ReasonCode.HOLD
    assert "4.00 GiB held: rendering" in command.reason.text
    world.obey(command)
    assert world.free_bytes is not None
    assert world.free_bytes >= 6 * GIB - 512 * MIB


def test_what_the_owner_of_a_hold_took_is_not_kept_twice() -> None:
    hold = Hold(hold_id="1", size_bytes=4 * GIB, reason="rendering", pids=frozenset({9}))
    world = World(replace(World().spec, holds=(hold,)))
    world.free_bytes = 2 * GIB
    world.reading = {"processes": (GpuProcess(pid=9, name="blender", used_bytes=4 * GIB),)}
    assert world.ticks(5) == []


def test_a_rule_holds_while_the_program_has_memory_and_stays_while_nobody_knows() -> None:
    rule = ProcessRule(name="game.EXE", keep_free_bytes=5 * GIB)
    world = World(replace(AUTO, rules=(rule,)))
    world.reading = {"processes": (GAME,)}
    command = world.one(world.tick())
    assert command.reason.code is ReasonCode.PROCESS_RULE
    assert "while game.EXE runs" in command.reason.text
    world.obey(command)
    world.reading = {"processes": None}
    assert world.ticks(60) == []
    world.reading = {"processes": ()}
    assert world.until(31).slots_count == 100


def test_without_a_list_of_processes_no_rule_begins() -> None:
    world = World(Spec(wishes=as_it_is(), rules=(ProcessRule(name="x", keep_free_bytes=8 * GIB),)))
    world.reading = {"processes": None}
    assert world.ticks(10) == []


@pytest.mark.parametrize(
    ("start", "end", "days", "holds"),
    [
        (700, 730, range(7), True),
        (720, 721, range(7), True),
        (721, 730, range(7), False),
        (700, 720, range(7), False),
        (1000, 730, {6}, True),
        (1000, 730, {0}, False),
        (700, 600, {0}, True),
        (700, 730, {1}, False),
    ],
)
def test_windows(start: int, end: int, days: object, holds: bool) -> None:
    window = Window(
        name="w",
        start_minute=start,
        end_minute=end,
        weekdays=frozenset(days),  # type: ignore[call-overload]
        keep_free_bytes=5 * GIB,
    )
    world = World(Spec(wishes=as_it_is(), windows=(window,)))
    commands = world.tick()
    assert bool(commands) is holds
    if holds:
        assert world.one(commands).reason.code is ReasonCode.WINDOW


def test_a_limit_of_the_operator_is_kept_to() -> None:
    world = World(Spec(vram_limit_bytes=6 * GIB, wishes=as_it_is()))
    world.free_bytes = 10 * GIB
    command = world.one(world.tick())
    assert command.reason.code is ReasonCode.VRAM_LIMIT
    world.obey(command)
    assert world.engine is not None
    assert world.engine.elastic_bytes <= 4 * GIB
    assert world.ticks(60) == []


def test_what_the_operator_asks_does_not_wait() -> None:
    world = World()
    world.free_bytes = 6 * GIB
    world.tick()
    world.spec = Spec(wishes=as_it_is(slots=130), revision=1)
    command = world.one(world.tick())
    assert (command.slots_count, command.reason.code) == (130, ReasonCode.OPERATOR)
    world.obey(command)
    world.spec = Spec(wishes=as_it_is(slots=50), revision=2)
    assert world.one(world.tick()).slots_count == 50


def test_what_is_asked_and_does_not_fit_is_a_bound() -> None:
    world = World()
    world.tick()
    world.spec = Spec(wishes=VramWishes(slots_count=150, kv_bytes=GIB), revision=1)
    world.free_bytes = 4 * GIB
    command = world.one(world.tick())
    assert 100 < command.slots_count < 150
    assert command.kv_pages_count <= 64


def test_the_operator_leaves_two_resizes_of_a_minute_for_others() -> None:
    world = World()
    world.free_bytes = 6 * GIB
    world.tick()
    for revision in range(1, 7):
        world.spec = Spec(wishes=as_it_is(slots=100 + revision), revision=revision)
        commands = world.tick()
        assert len(commands) == (1 if revision <= 4 else 0)
        for command in commands:
            world.obey(command)
    assert world.state.standing.code is ReasonCode.RATE_LIMIT
    assert world.until(61).slots_count == 106


def test_a_preset_takes_no_more_than_it_stands_for() -> None:
    world = World()
    world.tick()
    world.spec = Spec(wishes=VramWishes(preset=Preset.MINIMUM), revision=1)
    command = world.one(world.tick())
    assert (command.slots_count, command.kv_pages_count) == (16, KV_FLOOR_PAGES)


def test_sessions_get_their_pages_at_once_and_slots_give_way() -> None:
    world = World(Spec(wishes=VramWishes(preset=Preset.CHAT)))
    world.engine = with_sizes(engine(), 100, 64)
    world.tick()
    needs = SessionNeeds(longest_context_tokens=20_000)
    world.engine = replace(world.engine, needs=needs)
    command = world.one(world.tick())
    assert command.reason.code is ReasonCode.SESSIONS
    assert command.kv_pages_count >= 20_000 / 256
    assert command.slots_count < 100
    world.obey(command)
    assert world.ticks(10) == []
    world.engine = replace(world.engine, needs=SessionNeeds())
    assert world.ticks(30) == []
    assert world.one(world.ticks(0.5)).kv_pages_count < 64  # and give them back later


def test_a_prompt_that_waits_gets_pages_beside_those_in_use() -> None:
    world = World(Spec(), engine(kv_pages_used_count=60, running_count=1))
    world.tick()
    needs = SessionNeeds(waiting_prompt_tokens=10_000)
    world.engine = replace(world.engine or engine(), needs=needs, waiting_count=1)
    assert world.one(world.tick()).kv_pages_count >= 60 + 40


def test_a_dense_model_has_kv_only() -> None:
    shape = replace(SHAPE, experts_count=0)
    facts = with_sizes(engine(shape=shape, slots_capacity_count=0), 0, 200)
    world = World(AUTO, facts)
    world.free_bytes = GIB
    command = world.one(world.tick())
    assert command.slots_count == 0
    assert command.kv_pages_count < 200


def test_control_that_was_started_anew_counts_on_from_what_the_engine_saw() -> None:
    world = World(AUTO, engine(newest_generation=41))
    world.free_bytes = 0
    assert world.one(world.tick()).generation == 42
