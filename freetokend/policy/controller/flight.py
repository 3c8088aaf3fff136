"""The one command that is under way: what became of it, when it is sent again, when given up.

A command is done when the engine says so or when its facts show it; an answer to anything else is
ignored. An engine that was started anew knows of no command, whatever was sent to the last one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, assert_never

from freetokend.policy.controller.commands import EngineCommand, Resize, Sleep, Wake
from freetokend.policy.controller.facts import EngineFacts, Outcome, Phase, Snapshot
from freetokend.policy.controller.spec import Limits
from freetokend.policy.controller.state import Growth, InFlight, State, Trigger

_LEAST_SHARE_RATIO: Final = 1 / 16


def settle(state: State, snapshot: Snapshot) -> tuple[State, EngineCommand | None]:
    """Look at what the engine did since the last tick; a command to send again, if one is due."""
    engine = snapshot.engine
    if engine is None:
        return _forgotten(state), None
    if engine.boot_count != state.boot_count:
        # The limit on resizes protects the users of an engine that runs; this one has none yet.
        state = replace(
            _forgotten(state), boot_count=engine.boot_count, recent=(), changed_s=snapshot.now_s
        )
    if engine.elastic_bytes != state.elastic_bytes:
        state = replace(state, elastic_bytes=engine.elastic_bytes, changed_s=snapshot.now_s)
    if engine.newest_generation > state.generation:
        state = replace(state, generation=engine.newest_generation)
    in_flight = state.in_flight
    if in_flight is None:
        return state, None
    return _settled(state, in_flight, engine, snapshot)


def _forgotten(state: State) -> State:
    if state.in_flight is None and state.growth.pending is None:
        return state
    return replace(state, in_flight=None, growth=replace(state.growth, pending=None))


def _settled(
    state: State, in_flight: InFlight, engine: EngineFacts, snapshot: Snapshot
) -> tuple[State, EngineCommand | None]:
    now_s, limits = snapshot.now_s, snapshot.spec.limits
    answer = engine.answer
    outcome = None
    if answer is not None and answer.generation == in_flight.command.generation:
        outcome = answer.outcome
    if _is_seen(in_flight.command, engine):
        outcome = Outcome.DONE
    elif not isinstance(in_flight.command, Resize) and outcome is Outcome.DONE:
        outcome = None  # said, but not to be seen yet
    match outcome:
        case Outcome.DONE | Outcome.UNCHANGED:
            growth = state.growth
            if in_flight.grows:
                growth = replace(
                    growth, grown_s=now_s, failures_count=0, retry_s=None, share_ratio=1.0
                )
            return replace(state, in_flight=None, growth=growth), None
        case Outcome.SUPERSEDED:
            return replace(state, in_flight=None), None
        case Outcome.FAILED if in_flight.grows:
            growth = _failed(state.growth, limits, now_s)
            return replace(state, in_flight=None, growth=growth), None
        case Outcome.DEFERRED:
            return _deferred(state, in_flight, limits, now_s)
        case Outcome.FAILED | None:
            return _sent_again(state, in_flight, limits, now_s)
        case _ as never:
            assert_never(never)


def _is_seen(command: EngineCommand, engine: EngineFacts) -> bool:
    match command:
        case Resize():
            return (engine.slots_count, engine.kv_pages_count) == (
                command.slots_count,
                command.kv_pages_count,
            ) and engine.phase is Phase.AWAKE
        case Sleep():
            return engine.phase is Phase.ASLEEP
        case Wake():
            return engine.phase is Phase.AWAKE
        case _ as never:
            assert_never(never)


def _deferred(
    state: State, in_flight: InFlight, limits: Limits, now_s: float
) -> tuple[State, EngineCommand | None]:
    """Whatever has become free meanwhile is given back when the same generation comes again."""
    in_flight = replace(in_flight, is_deferred=True)
    if now_s - in_flight.sent_s < limits.resend_s:
        return replace(state, in_flight=in_flight), None
    return replace(state, in_flight=replace(in_flight, sent_s=now_s)), in_flight.command


def _sent_again(
    state: State, in_flight: InFlight, limits: Limits, now_s: float
) -> tuple[State, EngineCommand | None]:
    """The same generation again when its time is over, which is twice as long each time."""
    wake = in_flight.trigger is Trigger.WAKE
    first_s = limits.wake_resend_s if wake else limits.resend_s
    if now_s - in_flight.sent_s < first_s * (1 << (in_flight.sends_count - 1)):
        return state, None
    if in_flight.sends_count >= limits.sends_count:
        growth = state.growth
        if in_flight.grows:
            growth = _failed(growth, limits, now_s)
        return replace(state, in_flight=None, growth=growth), None
    again = replace(in_flight, sent_s=now_s, sends_count=in_flight.sends_count + 1)
    return replace(state, in_flight=again), in_flight.command


def _failed(growth: Growth, limits: Limits, now_s: float) -> Growth:
    """The memory is free, but not in one piece or not for us: later, and less of it."""
    wait_s = min(limits.retry_s * (1 << min(growth.failures_count, 16)), limits.retry_most_s)
    return replace(
        growth,
        failures_count=growth.failures_count + 1,
        retry_s=now_s + wait_s,
        share_ratio=max(growth.share_ratio / 2, _LEAST_SHARE_RATIO),
    )
