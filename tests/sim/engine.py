"""The simulated engine: sizes, safe points, requests, and the answers to commands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import assert_never

from freetokend.policy.controller import (
    Answer,
    EngineFacts,
    Outcome,
    Phase,
    Resize,
    SessionNeeds,
    Sleep,
    Wake,
)
from freetokend.policy.controller.commands import EngineCommand
from freetokend.policy.controller.division import bytes_of_pages, bytes_of_slots
from freetokend.policy.kv_sizing import pages_for
from freetokend.policy.vram_budget import VramWishes, plan_vram
from tests.sim.card import CONTEXT_BYTES, FIXED_BYTES, SHAPE, Card

STEP_S = 0.04
LAYER_S = 0.1
CHUNK_S = 3.0
WAKE_S = 1.5
PATIENCE_S = 90.0


@dataclass(slots=True)
class Request:
    """A request: `answers` has how it ended, once if all is well."""

    tokens: int
    work_s: float
    came_s: float
    answers: list[str] = field(default_factory=list)
    runs_until_s: float | None = None

    @property
    def pages(self) -> int:
        return pages_for(self.tokens, SHAPE.kv_page_tokens)


class SimEngine:
    """Owns its part of the card. Between two looks it does what came, at safe points."""

    def __init__(self, card: Card, boot_count: int, now_s: float) -> None:
        self.card = card
        self.boot_count = boot_count
        self.phase = Phase.AWAKE
        self.slots = 0
        self.pages = 0
        self.fixed_held_bytes = 0
        self.newest_generation = 0
        self.answer: Answer | None = None
        self.done: Answer | None = None
        self.inbox: list[tuple[float, EngineCommand]] = []
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.chunk_start_s: float | None = None
        self.idle_since_s = now_s
        self.wakes_s: float | None = None
        self.executed: list[tuple[float, EngineCommand, Answer]] = []
        self._boot()

    def _boot(self) -> None:
        """As a start does: the memory is divided by what is free then."""
        free_bytes = self.card.free_bytes
        least = CONTEXT_BYTES + FIXED_BYTES
        if free_bytes >= least + plan_floor_bytes() + SHAPE.cushion_bytes:
            facts = replace(SHAPE, free_bytes=free_bytes - CONTEXT_BYTES)
            plan = plan_vram(facts, VramWishes())
            self.slots, self.pages = plan.slots_count, plan.kv_pages_count
            self.fixed_held_bytes = least
        else:
            self.phase = Phase.ASLEEP
            self.fixed_held_bytes = min(CONTEXT_BYTES, free_bytes)
        self.card.engine_bytes = self.fixed_held_bytes + self.elastic_bytes

    @property
    def slots_bytes(self) -> int:
        return bytes_of_slots(SHAPE, self.slots)

    @property
    def kv_bytes(self) -> int:
        return bytes_of_pages(SHAPE, self.pages)

    @property
    def elastic_bytes(self) -> int:
        return self.slots_bytes + self.kv_bytes

    @property
    def used_pages(self) -> int:
        return sum(request.pages for request in self.running)

    def facts(self, now_s: float) -> EngineFacts:
        live = [*self.running, *self.waiting]
        return EngineFacts(
            boot_count=self.boot_count,
            phase=self.phase,
            shape=SHAPE,
            slots_count=self.slots,
            slots_bytes=self.slots_bytes,
            slots_capacity_count=SHAPE.experts_count,
            kv_pages_count=self.pages,
            kv_pages_used_count=self.used_pages,
            kv_pages_capacity_count=pages_for(SHAPE.model_context_tokens, SHAPE.kv_page_tokens)
            * SHAPE.max_running_count,
            kv_bytes=self.kv_bytes,
            fixed_held_bytes=self.fixed_held_bytes,
            newest_generation=self.newest_generation,
            answer=self.answer,
            running_count=len(self.running),
            waiting_count=len(self.waiting),
            idle_s=0.0 if live else now_s - self.idle_since_s,
            needs=SessionNeeds(
                longest_context_tokens=max((r.tokens for r in self.running), default=0),
                waiting_prompt_tokens=sum(r.tokens for r in self.waiting),
            ),
        )

    def receive(self, arrives_s: float, command: EngineCommand) -> None:
        self.inbox.append((arrives_s, command))

    def advance(self, now_s: float) -> None:
        """Everything up to now: commands at their safe points, then requests."""
        if self.wakes_s is not None and now_s >= self.wakes_s:
            self.wakes_s = None
            self.phase = Phase.AWAKE
        while self.inbox:
            self.inbox.sort(key=lambda entry: entry[0])
            due_s, index = min(
                (self._safe_point_s(arrives_s, command), index)
                for index, (arrives_s, command) in enumerate(self.inbox)
            )
            if due_s > now_s:
                break
            self._run(due_s, self.inbox.pop(index)[1])
        self._serve(now_s)

    def _safe_point_s(self, at_s: float, command: EngineCommand) -> float:
        if self.wakes_s is not None:
            return max(at_s, self.wakes_s)
        if not self.running or self.phase is Phase.ASLEEP:
            return at_s
        start_s = self.chunk_start_s
        if start_s is not None and start_s <= at_s < start_s + CHUNK_S:
            if isinstance(command, Resize) and command.urgent:
                return start_s + math.ceil((at_s - start_s) / LAYER_S) * LAYER_S
            return start_s + CHUNK_S
        return math.ceil(at_s / STEP_S) * STEP_S

    def _run(self, at_s: float, command: EngineCommand) -> None:
        """One command, as the link has it: a generation is done once, an older one is not."""
        if self.done is not None and self.done.generation == command.generation:
            self.answer = self.done
            return
        if command.generation < self.newest_generation:
            self._reply(at_s, command, Outcome.SUPERSEDED)
            return
        self.newest_generation = command.generation
        match command:
            case Resize():
                self._reply(at_s, command, self._resized(command))
            case Sleep():
                self._reply(at_s, command, self._slept(at_s))
            case Wake():
                self._reply(at_s, command, self._woken(at_s, command))
            case _ as never:
                assert_never(never)

    def _reply(self, at_s: float, command: EngineCommand, outcome: Outcome) -> None:
        self.answer = Answer(generation=command.generation, outcome=outcome)
        if outcome in (Outcome.DONE, Outcome.UNCHANGED):
            self.done = self.answer
        self.executed.append((at_s, command, self.answer))

    def _resized(self, command: Resize) -> Outcome:
        if self.phase is Phase.ASLEEP:
            return Outcome.UNCHANGED
        before_bytes = self.elastic_bytes
        before = (self.slots, self.pages)
        deferred = command.kv_pages_count < min(self.used_pages, self.pages)
        self.slots, self.pages = command.slots_count, command.kv_pages_count
        if deferred:
            self.slots = min(before[0], command.slots_count)
            self.pages = min(before[1], self.used_pages)
        gain_bytes = self.elastic_bytes - before_bytes
        if gain_bytes <= 0:
            self.card.release(-gain_bytes)
        elif not self.card.allocate(gain_bytes):
            self.slots, self.pages = before
            return Outcome.FAILED
        return Outcome.DEFERRED if deferred else Outcome.DONE

    def _slept(self, at_s: float) -> Outcome:
        if self.running or self.waiting:
            return Outcome.DEFERRED
        self.card.release(self.elastic_bytes + self.fixed_held_bytes - CONTEXT_BYTES)
        self.slots = self.pages = 0
        self.fixed_held_bytes = CONTEXT_BYTES
        self.phase = Phase.ASLEEP
        self.idle_since_s = at_s
        return Outcome.DONE

    def _woken(self, at_s: float, command: Wake) -> Outcome:
        if self.phase is Phase.AWAKE:
            return Outcome.UNCHANGED
        wanted_bytes = (
            FIXED_BYTES
            + CONTEXT_BYTES
            - self.fixed_held_bytes
            + bytes_of_slots(SHAPE, command.slots_count)
            + bytes_of_pages(SHAPE, command.kv_pages_count)
        )
        if not self.card.allocate(wanted_bytes):
            return Outcome.FAILED
        self.slots, self.pages = command.slots_count, command.kv_pages_count
        self.fixed_held_bytes = FIXED_BYTES + CONTEXT_BYTES
        self.wakes_s = at_s + WAKE_S
        return Outcome.DONE

    def _serve(self, now_s: float) -> None:
        for request in [r for r in self.running if (r.runs_until_s or 0.0) <= now_s]:
            self.running.remove(request)
            request.answers.append("done")
            self.idle_since_s = now_s
        if self.chunk_start_s is not None and now_s >= self.chunk_start_s + CHUNK_S:
            self.chunk_start_s = None
        for request in list(self.waiting):
            fits = request.pages + self.used_pages <= self.pages
            if self.phase is Phase.AWAKE and fits and len(self.running) < SHAPE.max_running_count:
                self.waiting.remove(request)
                self.running.append(request)
                request.runs_until_s = now_s + request.work_s
                if self.chunk_start_s is None and request.tokens > 1024:
                    self.chunk_start_s = now_s
            elif now_s - request.came_s > PATIENCE_S:
                self.waiting.remove(request)
                request.answers.append("no room")

    def refuse_waiting(self, why: str) -> None:
        for request in self.waiting:
            request.answers.append(why)
        self.waiting.clear()

    def die(self) -> None:
        """Every request ends, the driver takes all memory back."""
        for request in [*self.running, *self.waiting]:
            request.answers.append("engine died")
        self.running.clear()
        self.waiting.clear()
        self.card.engine_bytes = 0


def plan_floor_bytes() -> int:
    """One token's experts and a short context."""
    return granule_bytes(SHAPE.top_k, pages_for(4096, SHAPE.kv_page_tokens))


def granule_bytes(slots: int, pages: int) -> int:
    """The memory that so many slots and pages take."""
    return bytes_of_slots(SHAPE, slots) + bytes_of_pages(SHAPE, pages)
