"""The messages of a recording of the choice of experts; part of `messages`."""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.errors import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrace:
    """Record which experts are chosen from the next step on; answered by `TraceStarted`."""

    trace_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTrace:
    """End that recording, without an answer."""

    trace_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStarted:
    """The sizes of what is recorded (layers are those with experts), or why nothing is."""

    trace_id: str
    layers_count: int = 0
    experts_per_layer_count: int = 0
    experts_per_token_count: int = 0
    source: str = ""
    error_reason: Reason | None = None
    error_message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """`expert_ids`: u16 little endian [layers][rows][k], 65535 where a layer skipped the row."""

    is_prefill: bool
    rows_count: int
    expert_ids: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """The experts of one step: rows of prompts, then rows that write."""

    trace_id: str
    parts: tuple[RoutedRows, ...]

    @property
    def ids_bytes(self) -> int:
        return sum(len(part.expert_ids) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEnded:
    """The engine ended the recording by itself; the steps before are complete."""

    trace_id: str
    error_reason: Reason
    error_message: str


TraceCommand = StartTrace | StopTrace
"""What control asks of a recording."""

TraceMessage = TraceStarted | TracedStep | TraceEnded
"""What the engine tells of it."""
