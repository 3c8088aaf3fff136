"""Controllers with one fault each. The checks of the simulation have to find every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from freetokend.policy.controller import Command, Resize, Snapshot, State, tick
from freetokend.policy.readings import GpuReading
from tests.sim.machine import Tick


def _with_limits(**changes: Any) -> Tick:
    def mutant(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
        limits = replace(snapshot.spec.limits, **changes)
        return tick(state, replace(snapshot, spec=replace(snapshot.spec, limits=limits)))

    return mutant


def _with_host_limits(**changes: Any) -> Tick:
    def mutant(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
        limits = replace(snapshot.spec.host_limits, **changes)
        return tick(state, replace(snapshot, spec=replace(snapshot.spec, host_limits=limits)))

    return mutant


def _takes_the_last_reading_for_an_unknown_one() -> Tick:
    last: list[GpuReading] = []

    def mutant(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
        gpu = snapshot.gpu
        if gpu is not None and gpu.taken_s == snapshot.now_s and (gpu.free_bytes or 0) < 1 << 60:
            last[:] = [gpu]
        if last:
            snapshot = replace(snapshot, gpu=replace(last[0], taken_s=snapshot.now_s))
        return tick(state, snapshot)

    return mutant


def _takes_what_lies_before_for_now() -> Tick:
    def mutant(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
        if snapshot.gpu is not None:
            gpu = replace(snapshot.gpu, taken_s=snapshot.now_s)
            snapshot = replace(snapshot, gpu=gpu)
        return tick(state, snapshot)

    return mutant


def _forgets_what_is_under_way() -> Tick:
    return lambda state, snapshot: tick(replace(state, in_flight=None), snapshot)


def _ignores_the_floor() -> Tick:
    def mutant(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
        engine = snapshot.engine
        if engine is not None:
            engine = replace(engine, shape=replace(engine.shape, top_k=1))
        return tick(state, replace(snapshot, engine=engine))

    return mutant


def _is_never_urgent() -> Tick:
    def mutant(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
        state, commands = tick(state, snapshot)
        return state, tuple(
            replace(command, urgent=False) if isinstance(command, Resize) else command
            for command in commands
        )

    return mutant


def _numbers_every_message_anew() -> Tick:
    sent = [0]

    def mutant(state: State, snapshot: Snapshot) -> tuple[State, tuple[Command, ...]]:
        state, commands = tick(state, snapshot)
        numbered: list[Command] = []
        for command in commands:
            if not isinstance(command, Resize):
                numbered.append(command)
                continue
            sent[0] = max(sent[0] + 1, command.generation)
            anew = replace(command, generation=sent[0])
            if state.in_flight is not None:
                flight = replace(state.in_flight, command=anew)
                state = replace(state, in_flight=flight, generation=sent[0])
            numbered.append(anew)
        return state, tuple(numbered)

    return mutant


def _forgets_holds() -> Tick:
    return lambda state, snapshot: tick(
        state, replace(snapshot, spec=replace(snapshot.spec, holds=()))
    )


MUTANTS: Final[Mapping[str, Callable[[], Tick]]] = MappingProxyType(
    {
        "the last reading in place of an unknown one": _takes_the_last_reading_for_an_unknown_one,
        "old readings as if they were of now": _takes_what_lies_before_for_now,
        "no hold before a growth": lambda: _with_limits(hold_s=0.0),
        "a hold that does not double": lambda: _with_limits(hold_most_s=30.0),
        "forgets what is under way": _forgets_what_is_under_way,
        "ignores the floor": _ignores_the_floor,
        "never sends again": lambda: _with_limits(resend_s=1e9),
        "a new generation for each message": _numbers_every_message_anew,
        "no limit on resizes": lambda: _with_limits(
            resizes_count=10**6, growth_count=10**6, sessions_count=10**6, operator_count=10**6
        ),
        "no cushion": lambda: _with_limits(cushion_bytes=0),
        "no margin": lambda: _with_limits(margin_bytes=-(1 << 30)),
        "never urgent": _is_never_urgent,
        "forgets holds": _forgets_holds,
        "unloads with memory to spare": lambda: _with_host_limits(
            low_bytes=40 << 30, critical_bytes=40 << 30
        ),
        "does not leave the ladder": lambda: _with_host_limits(descend_s=1e9),
    }
)
