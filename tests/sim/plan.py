"""What happens in one run, all of it drawn from the seed before the run begins."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from freetokend.core.units import GIB, MIB
from freetokend.policy.controller import Hold, ProcessRule, Spec, Window
from freetokend.policy.vram_budget import Preset, VramWishes
from tests.sim.engine import Request

FAULTS_S = 150.0


class Fault(StrEnum):
    """What can go wrong; each seed has some of them."""

    GPU_TIMEOUT = "gpu-timeout"
    GPU_STALE = "gpu-stale"
    GPU_BACKWARDS = "gpu-backwards"
    GPU_SENTINEL = "gpu-sentinel"
    NO_PROCESSES = "no-processes"
    PIECES = "pieces"
    LOST = "lost"
    TWICE = "twice"
    RESTART = "restart"
    STALL = "stall"
    WALL_CLOCK = "wall-clock"
    PRESSURE_SPIKE = "pressure-spike"
    HOST_SHORTAGE = "host-shortage"
    CALM_HOST = "calm-host"


@dataclass(slots=True)
class Plan:
    """`events`: at these times others take or give memory, and people say or send something."""

    seed: int
    faults: frozenset[Fault]
    spec: Spec
    events: list[tuple[float, Callable[[Stage], None]]]
    requests: list[Request] = field(default_factory=list)


class Stage(Protocol):
    """What events act on: the machine gives it its meaning."""

    spec: Spec

    def others_hold(self, name: str, size_bytes: int) -> None: ...

    def request(self, request: Request) -> None: ...


def draw(seed: int) -> Plan:
    """The run of this seed."""
    chance = random.Random(seed)
    faults = frozenset(fault for fault in Fault if chance.random() < 0.4)
    plan = Plan(seed=seed, faults=faults, spec=_spec(chance), events=[])
    for trace in (_game, _browser, _compile_job, _flapper, _hold, _operator):
        if chance.random() < 0.5:
            plan.events += trace(chance)
    if chance.random() < 0.8:
        _requests(chance, plan)
    plan.events.sort(key=lambda event: event[0])
    return plan


def _spec(chance: random.Random) -> Spec:
    preset = chance.choice([Preset.AUTO, Preset.AUTO, Preset.CHAT, Preset.AGENT, Preset.MINIMUM])
    rules = (ProcessRule(name="Game.exe", keep_free_bytes=4 * GIB),)
    window = Window(name="evening", start_minute=30, end_minute=32, keep_free_bytes=6 * GIB)
    return Spec(
        wishes=VramWishes(preset=preset),
        rules=rules if chance.random() < 0.3 else (),
        windows=(window,) if chance.random() < 0.3 else (),
        sleep_idle_s=chance.choice([None, None, 20.0]),
        sleep_over_budget=chance.random() < 0.3,
    )


_Events = list[tuple[float, Callable[[Stage], None]]]


def _holds(name: str, size_bytes: int) -> Callable[[Stage], None]:
    return lambda stage: stage.others_hold(name, size_bytes)


def _game(chance: random.Random) -> _Events:
    """A game starts, loads in steps, plays, and ends."""
    start_s = chance.uniform(5, FAULTS_S - 40)
    size_bytes = chance.randrange(3 * GIB, 20 * GIB)
    steps = chance.randrange(1, 12)
    events = [
        (start_s + step * chance.uniform(0.1, 0.6), _holds("game.exe", size_bytes * step // steps))
        for step in range(1, steps + 1)
    ]
    events.append((start_s + chance.uniform(20, 100), _holds("game.exe", 0)))
    return events


def _browser(chance: random.Random) -> _Events:
    """A little more, a little less, all the time."""
    held_bytes, at_s, events = 200 * MIB, 0.0, []
    while at_s < FAULTS_S:
        at_s += chance.expovariate(1 / 4)
        held_bytes = min(max(held_bytes + chance.randrange(-200, 260) * MIB, 0), 2 * GIB)
        events.append((at_s, _holds("browser", held_bytes)))
    return events


def _compile_job(chance: random.Random) -> _Events:
    """Short peaks, one after the other, up to several a second."""
    at_s, events = chance.uniform(5, 60), []
    for _ in range(chance.randrange(3, 25)):
        events.append((at_s, _holds("compile", chance.randrange(100, 5000) * MIB)))
        at_s += chance.uniform(0.2, 6)
        events.append((at_s, _holds("compile", 0)))
        at_s += chance.uniform(0.1, 8)
    return events


def _flapper(chance: random.Random) -> _Events:
    """Takes much and gives it back in a rhythm that suits no governor."""
    at_s, period_s, events = 0.0, chance.uniform(20, 45), []
    while at_s < FAULTS_S:
        events.append((at_s, _holds("flapper", chance.randrange(2, 8) * GIB)))
        events.append((at_s + chance.uniform(0.3, 3), _holds("flapper", 0)))
        at_s += period_s
    return events


def _hold(chance: random.Random) -> _Events:
    """An operator holds memory for a while."""
    hold = Hold(hold_id="h", size_bytes=chance.randrange(1, 12) * GIB, reason="rendering")

    def begin(stage: Stage) -> None:
        stage.spec = replace(stage.spec, holds=(hold,))

    def end(stage: Stage) -> None:
        stage.spec = replace(stage.spec, holds=())

    start_s = chance.uniform(5, 80)
    return [(start_s, begin), (start_s + chance.uniform(5, 60), end)]


def _operator(chance: random.Random) -> _Events:
    """Sizes asked for by hand, more often than is wise; sleep and wake."""
    events: _Events = []
    for _ in range(chance.randrange(1, 12)):
        wishes = VramWishes(
            slots_count=chance.choice([None, chance.randrange(1, 1025)]),
            kv_bytes=chance.choice([None, chance.randrange(1, 3000) * 3 * MIB]),
        )

        def ask(stage: Stage, wishes: VramWishes = wishes) -> None:
            stage.spec = replace(stage.spec, wishes=wishes, revision=stage.spec.revision + 1)

        events.append((chance.uniform(5, FAULTS_S), ask))

    def sleep(stage: Stage) -> None:
        stage.spec = replace(stage.spec, sleep_ticket=stage.spec.sleep_ticket + 1)

    def wake(stage: Stage) -> None:
        stage.spec = replace(stage.spec, wake_ticket=stage.spec.wake_ticket + 1)

    if chance.random() < 0.5:
        events += [(chance.uniform(5, 80), sleep), (chance.uniform(40, FAULTS_S), wake)]
    return events


def _requests(chance: random.Random, plan: Plan) -> None:
    at_s = 0.0
    every_s = chance.choice([2.0, 10.0, 30.0])
    while at_s < FAULTS_S:
        at_s += chance.expovariate(1 / every_s)
        tokens = chance.choice([300, 2000, 9000, 30_000])
        request = Request(tokens=tokens, work_s=chance.uniform(0.5, 15), came_s=at_s)
        plan.requests.append(request)
        plan.events.append((at_s, _sends(request)))


def _sends(request: Request) -> Callable[[Stage], None]:
    return lambda stage: stage.request(request)
