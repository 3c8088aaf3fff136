"""A small card and an engine on it, as the controller is told of them; tests change what they need.

Ten slots of 1 GiB at most, KV pages of 16 MiB, 2 GiB of fixed costs, and a card of 16 GiB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freetokend.core.units import GIB, MIB
from freetokend.policy.controller import (
    Answer,
    Command,
    EngineFacts,
    Outcome,
    Phase,
    Resize,
    Snapshot,
    Spec,
    State,
    Wake,
    tick,
)
from freetokend.policy.readings import GpuReading, HostReading
from freetokend.policy.vram_budget import VramFacts, VramWishes

SHAPE = VramFacts(
    free_bytes=None,
    own_bytes=0,
    dense_bytes=1536 * MIB,
    workspace_bytes=512 * MIB,
    state_bytes=0,
    graph_bytes=0,
    record_bytes=64 * MIB,
    experts_count=160,
    experts_per_layer_count=16,
    top_k=2,
    kv_page_bytes=16 * MIB,
    kv_page_tokens=256,
    model_context_tokens=32_768,
    max_running_count=2,
)
KV_FLOOR_PAGES = 16  # 4,096 tokens
NOON = 720


def engine(**changes: Any) -> EngineFacts:
    """One that has 100 slots and 64 pages: 6.25 and 1 GiB."""
    facts = EngineFacts(
        boot_count=1,
        phase=Phase.AWAKE,
        shape=SHAPE,
        slots_count=100,
        slots_bytes=100 * SHAPE.record_bytes,
        slots_capacity_count=SHAPE.experts_count,
        kv_pages_count=64,
        kv_pages_used_count=0,
        kv_pages_capacity_count=256,
        kv_bytes=64 * SHAPE.kv_page_bytes,
        fixed_held_bytes=2 * GIB,
    )
    return replace(facts, **changes)


def with_sizes(facts: EngineFacts, slots: int, pages: int) -> EngineFacts:
    return replace(
        facts,
        slots_count=slots,
        slots_bytes=slots * SHAPE.record_bytes,
        kv_pages_count=pages,
        kv_bytes=pages * SHAPE.kv_page_bytes,
    )


def asleep(**changes: Any) -> EngineFacts:
    facts = with_sizes(engine(fixed_held_bytes=0, phase=Phase.ASLEEP), 0, 0)
    return replace(facts, **changes)


class World:
    """The controller with a clock of its own and a card whose other programs are set by hand."""

    def __init__(self, spec: Spec | None = None, facts: EngineFacts | None = None) -> None:
        self.now_s = 100.0
        # All that the card has room for: what is asked is what there is, until a test says more.
        self.spec = spec if spec is not None else Spec(wishes=as_it_is())
        self.engine: EngineFacts | None = engine() if facts is None else facts
        self.free_bytes: int | None = 2 * GIB
        self.reading: dict[str, Any] = {}
        self.state = State()
        self.gpu_fails = False
        self.host: HostReading | None = None
        self.more: dict[str, Any] = {}

    def snapshot(self) -> Snapshot:
        gpu = None
        if not self.gpu_fails:
            reading: dict[str, Any] = {
                "uuid": "GPU",
                "name": "card",
                "taken_s": self.now_s,
                "total_bytes": 24 * GIB,
                "free_bytes": self.free_bytes,
                "processes": (),
            }
            gpu = GpuReading(**(reading | self.reading))
        return Snapshot(
            now_s=self.now_s,
            spec=self.spec,
            engine=self.engine,
            gpu=gpu,
            host=self.host,
            local_minute=NOON,
            local_weekday=0,
            **self.more,
        )

    def tick(self, after_s: float = 0.25) -> tuple[Command, ...]:
        """The next tick; what it commands."""
        self.now_s += after_s
        self.state, commands = tick(self.state, self.snapshot())
        return commands

    def ticks(self, for_s: float) -> list[Command]:
        """Ticks for so long; all that they command."""
        commands: list[Command] = []
        for _ in range(round(for_s * 4)):
            commands += self.tick()
        return commands

    def one(self, commands: tuple[Command, ...] | list[Command]) -> Resize:
        """The only command, a resize."""
        assert len(commands) == 1, commands
        assert isinstance(commands[0], Resize)
        return commands[0]

    def until(self, for_s: float) -> Resize:
        """The first command within so long, a resize."""
        for _ in range(round(for_s * 4)):
            commands = self.tick()
            if commands:
                return self.one(commands)
        raise AssertionError(f"nothing within {for_s} s")

    def obey(self, command: Command, outcome: Outcome = Outcome.DONE) -> None:
        """The engine does it (or says that it does not), and the card shows it."""
        assert self.engine is not None
        assert isinstance(command, Resize | Wake)
        before_bytes = self.engine.elastic_bytes
        if outcome is Outcome.DONE:
            self.engine = with_sizes(self.engine, command.slots_count, command.kv_pages_count)
        self.engine = replace(
            self.engine,
            newest_generation=command.generation,
            answer=Answer(generation=command.generation, outcome=outcome),
        )
        if self.free_bytes is not None:
            self.free_bytes -= self.engine.elastic_bytes - before_bytes


def as_it_is(slots: int = 100, pages: int = 64) -> VramWishes:
    return VramWishes(slots_count=slots, kv_bytes=pages * SHAPE.kv_page_bytes)
