"""Sleep and wake, and what a request is told when the card is busy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freetokend.core.units import GIB
from freetokend.policy.controller import (
    Answer,
    Outcome,
    ReasonCode,
    RefuseWaiting,
    Sleep,
    Spec,
    Wake,
    Window,
)
from tests.policy.controller.world import SHAPE, World, asleep, engine, with_sizes

NIGHT = Window(name="night", start_minute=600, end_minute=800, sleep=True)


@pytest.mark.parametrize(
    ("spec", "idle_s", "code"),
    [
        (Spec(sleep_idle_s=60.0), 60.0, ReasonCode.IDLE),
        (Spec(sleep_idle_s=60.0), 59.0, None),
        (Spec(sleep_idle_s=None), 1e6, None),
        (Spec(sleep_ticket=1), 0.0, ReasonCode.OPERATOR),
        (Spec(windows=(NIGHT,)), 61.0, ReasonCode.WINDOW),
        (Spec(windows=(NIGHT,)), 59.0, None),
    ],
)
def test_when_it_falls_asleep(spec: Spec, idle_s: float, code: ReasonCode | None) -> None:
    world = World(spec, engine(idle_s=idle_s))
    commands = world.tick()
    assert [(type(c), c.reason.code) for c in commands] == ([] if code is None else [(Sleep, code)])


@pytest.mark.parametrize("busy", [{"running_count": 1}, {"waiting_count": 1}])
def test_never_under_a_request(busy: dict[str, int]) -> None:
    world = World(Spec(sleep_ticket=1, sleep_idle_s=0.0), engine(**busy))
    assert world.tick() == ()
    world.engine = engine()
    assert [type(command) for command in world.tick()] == [Sleep]


def test_sleep_is_done_when_it_is_to_be_seen() -> None:
    world = World(Spec(sleep_ticket=1))
    (command,) = world.tick()
    assert isinstance(command, Sleep)
    answer = Answer(generation=command.generation, outcome=Outcome.DONE)
    world.engine = engine(answer=answer)
    world.tick()
    assert world.state.in_flight is not None
    world.engine = asleep(answer=answer)
    world.free_bytes = 12 * GIB
    assert world.ticks(60) == []
    assert world.state.standing.code is ReasonCode.ASLEEP


def test_a_request_wakes_it_with_what_the_card_has() -> None:
    world = World(Spec(), asleep(waiting_count=2))
    world.free_bytes = 12 * GIB
    (command,) = world.tick()
    assert isinstance(command, Wake)
    taken_bytes = (
        command.slots_count * SHAPE.record_bytes + command.kv_pages_count * SHAPE.kv_page_bytes
    )
    assert 7 * GIB < taken_bytes <= 8 * GIB  # 2 for the fixed costs, 2 for cushion and margin
    assert world.tick() == ()
    world.engine = replace(
        with_sizes(engine(), command.slots_count, command.kv_pages_count), waiting_count=2
    )
    world.free_bytes = 2 * GIB
    assert world.ticks(10) == []


def test_a_busy_card_is_said_at_once_and_heals() -> None:
    world = World(Spec(), asleep(waiting_count=1))
    world.free_bytes = 3 * GIB
    (command,) = world.tick()
    assert isinstance(command, RefuseWaiting)
    assert command.reason.code is ReasonCode.CARD_BUSY
    assert "0.38 GiB for slots and KV are the least" in command.reason.text
    assert "3.00 GiB free" in command.reason.text
    world.free_bytes = 6 * GIB
    assert [type(command) for command in world.tick()] == [Wake]


def test_waking_onto_memory_that_is_gone_is_tried_again_later() -> None:
    world = World(Spec(), asleep(waiting_count=1))
    world.free_bytes = 12 * GIB
    (command,) = world.tick()
    assert isinstance(command, Wake)
    world.engine = asleep(
        waiting_count=1, answer=Answer(generation=command.generation, outcome=Outcome.FAILED)
    )
    (refusal,) = world.tick()
    assert isinstance(refusal, RefuseWaiting)
    assert refusal.reason.code is ReasonCode.BACK_OFF
    world.ticks(5)
    assert world.state.in_flight is not None


def test_an_unknown_card_is_waited_for_a_little_and_then_said() -> None:
    world = World(Spec(), asleep())
    world.tick()
    world.engine = asleep(waiting_count=1)
    world.gpu_fails = True
    assert world.ticks(2) == []
    (refusal,) = world.tick()
    assert isinstance(refusal, RefuseWaiting)
    assert refusal.reason.code is ReasonCode.GPU_UNKNOWN


def test_the_operator_wakes_it_and_sleep_asked_before_is_not_done_again() -> None:
    world = World(Spec(sleep_ticket=1), asleep())
    world.free_bytes = 12 * GIB
    assert world.ticks(5) == []
    world.spec = Spec(sleep_ticket=1, wake_ticket=1)
    (command,) = world.tick()
    assert isinstance(command, Wake)
    assert command.reason.code is ReasonCode.OPERATOR
    world.engine = with_sizes(engine(), command.slots_count, command.kv_pages_count)
    world.free_bytes = 2 * GIB
    assert world.ticks(60) == []


@pytest.mark.parametrize("configured", [True, False])
def test_over_the_budget_at_the_floor_it_sleeps_if_that_is_wanted(configured: bool) -> None:
    world = World(Spec(sleep_over_budget=configured), with_sizes(engine(), 2, 16))
    world.free_bytes = 0
    commands = world.ticks(0.5)
    assert [type(command) for command in commands] == ([Sleep] if configured else [])
    assert world.state.standing.code is ReasonCode.FLOOR
