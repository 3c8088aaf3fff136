"""One run: the simulated machine around the production controller, tick by tick."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from freetokend.core.units import GIB
from freetokend.policy.controller import (
    TICK_S,
    Command,
    DropIdlePools,
    DropSpill,
    EngineFacts,
    HostFacts,
    LoadModel,
    Phase,
    RefuseLongPrompts,
    RefuseWaiting,
    Resize,
    Sleep,
    Snapshot,
    State,
    UnloadModel,
    Wake,
)
from freetokend.policy.readings import GpuProcess, GpuReading, HostReading, PressureReading
from tests.sim.card import Card
from tests.sim.engine import Request, SimEngine
from tests.sim.plan import FAULTS_S, Fault, Plan, Stage

Tick = Callable[[State, Snapshot], tuple[State, tuple[Command, ...]]]

MODEL_HOST_BYTES = 20 * GIB
HOST_BYTES = 64 * GIB
_PIDS = {"game.exe": 100, "browser": 101, "compile": 102, "flapper": 103, "calm": 104}


class Machine(Stage):
    """The world of one seed. `calm`: nothing goes wrong any more and nobody takes anything."""

    def __init__(self, plan: Plan, tick: Tick) -> None:
        self.plan = plan
        self.chance = random.Random(f"{plan.seed} machine")
        self.tick = tick
        self.now_s = 1000.0
        self.start_s = self.now_s
        self.spec = plan.spec
        self.state = State()
        self.card = Card()
        self.engine: SimEngine | None = SimEngine(self.card, 1, self.now_s)
        self.boots = 1
        self.comes_back_s: float | None = None
        self.facts: EngineFacts | None = self.engine.facts(self.now_s)
        self.last_reading: GpuReading | None = None
        self.host_facts = HostFacts(
            spill_bytes=2 * GIB, idle_pools_bytes=4 * GIB, model_bytes=MODEL_HOST_BYTES
        )
        self.shortage_bytes = 0
        self.spike_until_s = 0.0
        self.bad_until_s = 0.0
        self.bad_kind: Fault | None = None
        self.minute = 29.0
        self.next_event = 0
        self.calm = False
        self.facts_lost = False
        self.lost_generation: int | None = None
        self.snapshot: Snapshot | None = None
        self.commands: tuple[Command, ...] = ()
        self.stalled_s = 0.0

    def has(self, fault: Fault) -> bool:
        return not self.calm and fault in self.plan.faults

    def others_hold(self, name: str, size_bytes: int) -> None:
        self.card.take(name, size_bytes)

    def request(self, request: Request) -> None:
        request.came_s = self.now_s
        if self.engine is None:
            request.answers.append("unavailable")
        elif self.host_facts.long_prompts_refused and request.tokens > 8000:
            request.answers.append("host memory")
        else:
            self.engine.waiting.append(request)

    def step(self) -> None:
        """Advance by one tick."""
        self.stalled_s = 0.0
        if self.has(Fault.STALL) and self.chance.random() < 0.004:
            self.stalled_s = self.chance.uniform(1, 6)
        self.now_s += TICK_S + self.stalled_s
        self.minute += (TICK_S + self.stalled_s) / 60
        self._events()
        self._engine_faults()
        self._host()
        if self.engine is not None:
            self.engine.advance(self.now_s)
        self.snapshot = self._snapshot()
        self.state, self.commands = self.tick(self.state, self.snapshot)
        for command in self.commands:
            self._carry_out(command)

    def _events(self) -> None:
        events = self.plan.events
        while self.next_event < len(events):
            at_s, event = events[self.next_event]
            if self.start_s + at_s > self.now_s:
                return
            event(self)
            self.next_event += 1

    def _engine_faults(self) -> None:
        if self.engine is None:
            if self.comes_back_s is not None and self.now_s >= self.comes_back_s:
                self.boots += 1
                self.comes_back_s = None
                self.engine = SimEngine(self.card, self.boots, self.now_s)
            return
        mid_resize = self.state.in_flight is not None
        if self.has(Fault.RESTART) and self.chance.random() < (0.02 if mid_resize else 0.001):
            self._end_engine(self.now_s + self.chance.uniform(1, 5))
        if self.has(Fault.PIECES):
            if self.chance.random() < 0.02:
                pieces = self.chance.choice([None, GIB // 4, GIB])
                self.card.pieces_bytes = pieces
        else:
            self.card.pieces_bytes = None

    def _end_engine(self, comes_back_s: float | None) -> None:
        if self.engine is not None:
            self.engine.die()
        self.engine = None
        self.facts = None
        self.comes_back_s = comes_back_s

    def _host(self) -> None:
        if self.has(Fault.HOST_SHORTAGE):
            if self.chance.random() < 0.01:
                self.shortage_bytes = self.chance.randrange(0, HOST_BYTES)
        else:
            self.shortage_bytes = 0
        if self.has(Fault.PRESSURE_SPIKE) and self.chance.random() < 0.01:
            self.spike_until_s = self.now_s + self.chance.uniform(0.5, 10)
        if self.calm:
            self.spike_until_s = 0.0

    @property
    def available_bytes(self) -> int:
        """Of the host's memory."""
        facts = self.host_facts
        ours = facts.spill_bytes + facts.idle_pools_bytes
        ours += MODEL_HOST_BYTES if facts.model_loaded else 0
        return max(HOST_BYTES - 4 * GIB - ours - self.shortage_bytes, 64 << 20)

    def _snapshot(self) -> Snapshot:
        engine = self.engine
        self.facts_lost = self.has(Fault.LOST) and self.chance.random() < 0.15
        if engine is None:
            self.facts = None
        elif not self.facts_lost:
            self.facts = engine.facts(self.now_s)
        minute = self.minute
        if self.has(Fault.WALL_CLOCK) and self.chance.random() < 0.02:
            self.minute = minute = self.chance.uniform(0, 1439)
        return Snapshot(
            now_s=self.now_s,
            spec=self.spec,
            engine=self.facts,
            gpu=self._gpu(),
            host=self._host_reading(),
            host_facts=self.host_facts,
            local_minute=int(minute) % 1440,
            local_weekday=2,
        )

    def good_reading(self) -> GpuReading:
        card = self.card
        processes = None
        if not self.has(Fault.NO_PROCESSES):
            processes = tuple(
                GpuProcess(pid=_PIDS[name], name=name, used_bytes=size)
                for name, size in card.others_bytes.items()
            )
        return GpuReading(
            uuid="GPU-0",
            name="simulated",
            taken_s=self.now_s,
            total_bytes=card.total_bytes,
            free_bytes=card.free_bytes,
            used_bytes=card.total_bytes - card.free_bytes,
            processes=processes,
        )

    def _gpu(self) -> GpuReading | None:
        kinds = [
            fault
            for fault in (
                Fault.GPU_TIMEOUT,
                Fault.GPU_STALE,
                Fault.GPU_BACKWARDS,
                Fault.GPU_SENTINEL,
            )
            if self.has(fault)
        ]
        if kinds and self.now_s >= self.bad_until_s and self.chance.random() < 0.02:
            self.bad_until_s = self.now_s + self.chance.choice([0.3, 1.0, 5.0])
            self.bad_kind = self.chance.choice(kinds)
        good = self.good_reading()
        if self.calm or self.now_s >= self.bad_until_s or self.bad_kind is None:
            self.last_reading = good
            return good
        match self.bad_kind:
            case Fault.GPU_STALE:
                return self.last_reading
            case Fault.GPU_BACKWARDS:
                # more memory than there is, but of before
                return replace(good, taken_s=self.now_s - 3.0, free_bytes=20 * GIB)
            case Fault.GPU_SENTINEL:
                return replace(good, free_bytes=(1 << 64) - 1)
            case _:
                return None

    @property
    def reading_is_good(self) -> bool:
        """Whether the controller could see this tick how the card is."""
        return (
            self.snapshot is not None
            and self.snapshot.gpu is self.last_reading
            and (self.last_reading is not None and self.last_reading.taken_s == self.now_s)
        )

    @property
    def reading_is_fresh(self) -> bool:
        """Whether it could see how the card was half a second ago or less."""
        reading = None if self.snapshot is None else self.snapshot.gpu
        return (
            reading is not None
            and reading is self.last_reading
            and self.now_s - reading.taken_s <= 0.5
        )

    def _host_reading(self) -> HostReading | None:
        spike = self.now_s < self.spike_until_s
        if self.has(Fault.CALM_HOST) and self.chance.random() < 0.05:
            return None
        return HostReading(
            taken_s=self.now_s,
            mem_total_bytes=HOST_BYTES,
            mem_available_bytes=self.available_bytes,
            memory_pressure=PressureReading(some_avg10=80.0 if spike else 1.0, full_avg10=0.0),
        )

    def _carry_out(self, command: Command) -> None:
        match command:
            case Resize() | Sleep() | Wake():
                self._send(command)
            case RefuseWaiting():
                if self.engine is not None:
                    self.engine.refuse_waiting(command.reason.text)
            case DropSpill():
                self.host_facts = replace(self.host_facts, spill_bytes=0)
            case DropIdlePools():
                self.host_facts = replace(self.host_facts, idle_pools_bytes=0)
            case RefuseLongPrompts():
                self.host_facts = replace(self.host_facts, long_prompts_refused=command.refuse)
            case UnloadModel():
                self._end_engine(None)
                self.host_facts = replace(self.host_facts, model_loaded=False)
            case LoadModel():
                self.comes_back_s = self.now_s + 5.0
                self.host_facts = replace(self.host_facts, model_loaded=True)

    def _send(self, command: Resize | Sleep | Wake) -> None:
        if self.engine is None:
            return
        if self.has(Fault.LOST) and self.chance.random() < 0.2:
            self.lost_generation = command.generation
            return
        if self.lost_generation is not None and command.generation >= self.lost_generation:
            self.lost_generation = None
        arrives_s = self.now_s + self.chance.uniform(0.005, 0.05)
        self.engine.receive(arrives_s, command)
        if self.has(Fault.TWICE) and self.chance.random() < 0.3:
            self.engine.receive(arrives_s + self.chance.uniform(0, 4), command)

    def become_calm(self) -> None:
        """No faults, no holds, no more events; others keep what they have at some even level."""
        self.calm = True
        self.next_event = len(self.plan.events)
        for name in list(self.card.others_bytes):
            self.card.take(name, 0)
        self.card.take("calm", self.chance.randrange(0, 14) * GIB)
        self.spec = replace(self.spec, holds=())
        self.minute = 600.0
        self.host_facts = replace(self.host_facts, spill_bytes=GIB)

    @property
    def awake(self) -> bool:
        return self.engine is not None and self.engine.phase is Phase.AWAKE

    @property
    def in_faults(self) -> bool:
        return self.now_s < self.start_s + FAULTS_S
