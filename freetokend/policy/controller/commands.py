"""What the controller decides: commands, each with the reason for it.

Whoever carries one out may do so twice: a generation is done once, and the others say how things
shall be, not how they shall change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ReasonCode(StrEnum):
    """Why something is done, or is not. Stable: events, metrics and the journal show it."""

    STEADY = "steady"
    NO_ENGINE = "no-engine"
    IN_FLIGHT = "in-flight"
    GPU_UNKNOWN = "gpu-unknown"
    VRAM_TAKEN = "vram-taken"
    HOLD = "hold"
    PROCESS_RULE = "process-rule"
    WINDOW = "window"
    VRAM_LIMIT = "vram-limit"
    FLOOR = "floor"
    RATE_LIMIT = "rate-limit"
    BACK_OFF = "back-off"
    WAITING = "waiting"
    VRAM_FREE = "vram-free"
    OPERATOR = "operator"
    SESSIONS = "sessions"
    IDLE = "idle"
    ASLEEP = "asleep"
    REQUEST = "request"
    CARD_BUSY = "card-busy"
    NO_ANSWER = "no-answer"
    HOST_MEMORY = "host-memory"
    HOST_MEMORY_CALM = "host-memory-calm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """`text`: a sentence with the numbers, for people."""

    code: ReasonCode
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Have exactly so many slots and KV pages: first what shrinks, then what grows, at one safe
    point. A growth that fails leaves both as they were. KV pages in use stay: then the answer is
    "deferred", nothing grows, and the rest is done when the same generation comes again. urgent: a
    layer boundary inside a prefill chunk will do."""

    generation: int
    slots_count: int
    kv_pages_count: int
    urgent: bool
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """Give the card back, keep the pool."""

    generation: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Take the card again, with so many slots and KV pages."""

    generation: int
    slots_count: int
    kv_pages_count: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseWaiting:
    """Answer what waits for the engine to wake: not now, and why."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class DropSpill:
    """Give back what is kept of KV in host memory."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class DropIdlePools:
    """Give back the pools of models that nobody uses."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseLongPrompts:
    """Whether new long prompts are refused."""

    refuse: bool
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Give the model's pool back; requests are answered that it is gone, and why."""

    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Load the model again."""

    reason: Reason


EngineCommand = Resize | Sleep | Wake
"""Sent to the engine, answered by generation."""

HostCommand = DropSpill | DropIdlePools | RefuseLongPrompts | UnloadModel | LoadModel
"""Rungs of the host memory ladder, up or down."""

Command = EngineCommand | RefuseWaiting | HostCommand
