"""One look at the world, and what is to be done about it: `tick`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from freetokend.policy.controller.budget import (
    Required,
    Room,
    required_free,
    room_for,
    usable_reading,
)
from freetokend.policy.controller.commands import Command, HostCommand, Reason, ReasonCode
from freetokend.policy.controller.facts import EngineFacts, Phase, Snapshot
from freetokend.policy.controller.flight import settle
from freetokend.policy.controller.host_ladder import UNLOAD_RUNG, climb
from freetokend.policy.controller.sizing import resize
from freetokend.policy.controller.sleeping import fall_asleep, wake_up
from freetokend.policy.controller.state import Growth, InFlight, Ladder, Resized, State
from freetokend.policy.readings import GpuReading

_NO_ENGINE: Final = Reason(code=ReasonCode.NO_ENGINE, text="There is no engine to give memory to.")


def tick(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
    """What to do now, and what to remember. Pure: the same values give the same answer.

    Called every `TICK_S`, sooner or later; with nothing new it commands nothing.
    """
    state, host_commands = _at(state, snapshot)
    state, again = settle(state, snapshot)
    command: Command | None = again
    engine = snapshot.engine
    if engine is None or state.ladder.rung >= UNLOAD_RUNG:
        state = replace(state, standing=_NO_ENGINE, budget_bytes=None)
    else:
        reading = usable_reading(state, snapshot, snapshot.spec.limits)
        state, room = _looked(state, snapshot, engine, reading)
        state, decided = _decided(state, snapshot, engine, room)
        command = again if decided is None else decided  # what pre-empts is not sent again
    return state, host_commands if command is None else (*host_commands, command)


def _looked(
    state: State, snapshot: Snapshot, engine: EngineFacts, reading: GpuReading | Reason
) -> tuple[State, Room | Reason]:
    """The room, with what there is to remember of the look; or why it is not known."""
    limits = snapshot.spec.limits
    if isinstance(reading, Reason):
        return replace(state, budget_bytes=None, required_free_bytes=None), reading
    if state.known_s is not None and snapshot.now_s - state.known_s > limits.gap_s:
        state = replace(state, growth=replace(state.growth, pending=None))
    required = required_free(state, snapshot, reading)
    room = _room(engine, snapshot, reading, required)
    state = replace(
        state,
        reading_s=reading.taken_s,
        known_s=snapshot.now_s,
        active_rules=required.rules,
        budget_bytes=room.most_bytes,
        required_free_bytes=required.free_bytes,
    )
    return state, room


def _room(engine: EngineFacts, snapshot: Snapshot, reading: GpuReading, required: Required) -> Room:
    free_bytes = reading.free_bytes
    assert free_bytes is not None  # `usable_reading` has seen to it
    return room_for(
        engine,
        snapshot.spec,
        free_bytes,
        required,
        fresh=snapshot.now_s - reading.taken_s <= snapshot.spec.limits.fresh_s,
    )


def _decided(
    state: State, snapshot: Snapshot, engine: EngineFacts, room: Room | Reason
) -> tuple[State, Command | None]:
    command: Command | None
    if engine.phase is Phase.ASLEEP:
        return wake_up(state, snapshot, engine, room)
    state, command = fall_asleep(state, snapshot, engine)
    if command is not None:
        return state, command
    if isinstance(room, Reason):
        return replace(state, standing=room), None
    return resize(state, snapshot, engine, room)


def _at(state: State, snapshot: Snapshot) -> tuple[State, tuple[HostCommand, ...]]:
    """The state as of now, and what the host's memory needs.

    A clock that goes back makes nothing lie in the future, or what waits for a time would wait for
    ever.
    """
    now_s, limits = snapshot.now_s, snapshot.spec.limits
    if state.now_s is not None and now_s < state.now_s:
        state = _rewound(state, now_s)
    recent = tuple(entry for entry in state.recent if now_s - entry.at_s < limits.window_s)
    ladder, commands = climb(state.ladder, snapshot)
    return replace(state, now_s=now_s, recent=recent, ladder=ladder), commands


def _rewound(state: State, now_s: float) -> State:
    return replace(
        state,
        in_flight=_rewound_flight(state.in_flight, now_s),
        changed_s=_earlier(state.changed_s, now_s),
        reading_s=None,
        known_s=None,
        recent=tuple(
            Resized(at_s=min(entry.at_s, now_s), freed_bytes=entry.freed_bytes)
            for entry in state.recent
        ),
        growth=_rewound_growth(state.growth, now_s),
        ladder=Ladder(rung=state.ladder.rung),
    )


def _rewound_flight(in_flight: InFlight | None, now_s: float) -> InFlight | None:
    if in_flight is None:
        return None
    return replace(in_flight, sent_s=min(in_flight.sent_s, now_s))


def _rewound_growth(growth: Growth, now_s: float) -> Growth:
    return replace(
        growth,
        pending=None,
        grown_s=_earlier(growth.grown_s, now_s),
        changed_s=min(growth.changed_s, now_s),
        retry_s=_earlier(growth.retry_s, now_s),
    )


def _earlier(time_s: float | None, now_s: float) -> float | None:
    return None if time_s is None else min(time_s, now_s)
