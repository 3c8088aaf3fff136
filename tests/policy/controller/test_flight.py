"""One command under way at a time: answers, lost ones, deferred ones, engines that start anew."""

from __future__ import annotations

from dataclasses import replace

from freetokend.core.units import GIB
from freetokend.policy.controller import Answer, Outcome, ReasonCode, Resize, Spec
from freetokend.policy.vram_budget import VramWishes
from tests.policy.controller.world import World, as_it_is, engine, with_sizes

AUTO = Spec(wishes=VramWishes(kv_bytes=GIB))


def grabbed() -> tuple[World, Resize]:
    """A world whose controller has just commanded a shrink."""
    world = World(AUTO)
    world.tick()
    world.free_bytes = GIB
    return world, world.one(world.tick())


def test_the_same_snapshot_again_commands_nothing_again() -> None:
    world, _ = grabbed()
    assert world.tick(0.0) == ()
    assert world.tick(0.0) == ()


def test_a_lost_message_is_sent_again_under_the_same_generation_each_time_later() -> None:
    world, command = grabbed()
    sent_s = []
    for _ in range(4 * 60):
        for again in world.tick():
            if again == command:
                sent_s.append(world.now_s)
            else:
                assert isinstance(again, Resize)
                assert again.generation == command.generation + 1
                assert len(sent_s) == 5
                return
    raise AssertionError("never given up")


def test_what_the_facts_show_needs_no_answer() -> None:
    world, command = grabbed()
    world.engine = with_sizes(engine(), command.slots_count, command.kv_pages_count)
    world.free_bytes = 3 * GIB // 2 + GIB // 2
    assert world.ticks(5) == []
    assert world.state.in_flight is None


def test_answers_to_other_generations_are_ignored() -> None:
    world, command = grabbed()
    for generation in (command.generation - 1, command.generation + 1):
        answer = Answer(generation=generation, outcome=Outcome.DONE)
        world.engine = replace(world.engine or engine(), answer=answer)
        world.tick(0.01)
        assert world.state.in_flight is not None


def test_the_same_answer_twice_is_one() -> None:
    world, command = grabbed()
    world.obey(command)
    assert world.ticks(20) == []


def test_an_engine_that_starts_anew_has_no_command_and_no_history() -> None:
    world, _ = grabbed()
    world.engine = None
    assert world.ticks(3) == []
    assert world.state.standing.code is ReasonCode.NO_ENGINE
    world.engine = engine(boot_count=2)
    world.free_bytes = 2 * GIB
    assert world.ticks(5) == []
    assert world.state.recent == ()
    assert world.state.in_flight is None


def test_a_shrink_that_is_deferred_is_asked_for_again_until_it_is_done() -> None:
    world, command = grabbed()
    world.engine = replace(world.engine or engine(), kv_pages_used_count=command.kv_pages_count)
    world.obey(command, Outcome.DEFERRED)
    commands = world.ticks(60)
    assert len(commands) == 120
    assert set(commands) == {command}
    world.free_bytes = 3 * GIB  # nobody needs it any more
    assert world.ticks(2) == []
    assert world.state.in_flight is None


def test_what_the_operator_asked_and_is_deferred_stays_asked() -> None:
    world = World()
    world.tick()
    world.spec = replace(world.spec, wishes=as_it_is(pages=20), revision=1)
    command = world.one(world.tick())
    world.obey(command, Outcome.DEFERRED)
    assert set(world.ticks(30)) == {command}
    assert "waits for KV pages in use" in world.state.standing.text
    world.spec = replace(world.spec, wishes=as_it_is(pages=30), revision=2)
    assert world.one(world.tick()).kv_pages_count == 30


def test_a_superseded_command_is_decided_anew() -> None:
    world, command = grabbed()
    world.obey(command, Outcome.SUPERSEDED)
    assert world.one(world.tick()).generation == command.generation + 1


def test_a_clock_that_goes_back_holds_nothing_up() -> None:
    world, command = grabbed()
    world.now_s -= 50
    assert world.tick(0) == ()
    assert command in world.ticks(1)
    world.obey(command)
    world.free_bytes = 6 * GIB
    assert len(world.ticks(31)) >= 1


def test_a_long_pause_is_no_time_in_which_there_was_room() -> None:
    world = World(AUTO)
    world.free_bytes = 6 * GIB
    world.ticks(5)
    assert world.tick(3600) == ()
    assert world.ticks(29) == []
