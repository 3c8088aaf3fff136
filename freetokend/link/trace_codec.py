"""The recordings' part of link.proto to values and back; total as `codec` is."""

from __future__ import annotations

from typing import assert_never

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.link.protocol_errors import decode_reason
from freetokend.link.trace_messages import (
    RoutedRows,
    TracedStep,
    TraceEnded,
    TraceMessage,
    TraceStarted,
)


def encode_trace(message: TraceMessage) -> pb.EngineMessage:
    """Engine to control."""
    match message:
        case TraceStarted():
            return pb.EngineMessage(
                trace_started=pb.TraceStarted(
                    trace_id=message.trace_id,
                    layers_count=message.layers_count,
                    experts_per_layer_count=message.experts_per_layer_count,
                    experts_per_token_count=message.experts_per_token_count,
                    source=message.source,
                    error_reason="" if message.error_reason is None else message.error_reason.value,
                    error_message=message.error_message,
                )
            )
        case TracedStep():
            parts = [
                pb.RoutedRows(
                    is_prefill=part.is_prefill,
                    rows_count=part.rows_count,
                    expert_ids=part.expert_ids,
                )
                for part in message.parts
            ]
            return pb.EngineMessage(
                traced_step=pb.TracedStep(trace_id=message.trace_id, parts=parts)
            )
        case TraceEnded():
            return pb.EngineMessage(
                trace_ended=pb.TraceEnded(
                    trace_id=message.trace_id,
                    error_reason=message.error_reason.value,
                    error_message=message.error_message,
                )
            )
        case _:
            assert_never(message)


def decode_trace_started(started: pb.TraceStarted) -> TraceStarted:
    """Raises `LinkProtocolError` for a reason that does not exist."""
    return TraceStarted(
        trace_id=started.trace_id,
        layers_count=started.layers_count,
        experts_per_layer_count=started.experts_per_layer_count,
        experts_per_token_count=started.experts_per_token_count,
        source=started.source,
        error_reason=decode_reason(started.error_reason) if started.error_reason else None,
        error_message=started.error_message,
    )


def decode_traced_step(step: pb.TracedStep) -> TracedStep:
    """Whether the ids are as many as the sizes say is for who reads them."""
    return TracedStep(
        trace_id=step.trace_id,
        parts=tuple(
            RoutedRows(
                is_prefill=part.is_prefill, rows_count=part.rows_count, expert_ids=part.expert_ids
            )
            for part in step.parts
        ),
    )


def decode_trace_ended(ended: pb.TraceEnded) -> TraceEnded:
    """Raises `LinkProtocolError` for a reason that does not exist."""
    return TraceEnded(
        trace_id=ended.trace_id,
        error_reason=decode_reason(ended.error_reason),
        error_message=ended.error_message,
    )
