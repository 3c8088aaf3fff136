"""A recording of the choice of experts as the messages of the Admin service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.link.trace_messages import TracedStep, TraceEnded, TraceStarted


class Recording(Protocol):
    """See `link.trace_requests.TraceRecording`."""

    async def next(self) -> TracedStep | TraceEnded: ...

    def close(self) -> None: ...


async def recorded(
    started: TraceStarted, recording: Recording, *, duration_s: float, steps_count: int
) -> AsyncIterator[pb.RecordTraceResponse]:
    """The sizes, the steps, and the end: a limit (0: none), or what the recording says."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + duration_s if duration_s else None
    yield pb.RecordTraceResponse(
        started=pb.TraceShape(
            layers_count=started.layers_count,
            experts_per_layer_count=started.experts_per_layer_count,
            experts_per_token_count=started.experts_per_token_count,
            source=started.source,
        )
    )
    told_count = 0
    ended = pb.TraceEnd(cause="the steps that were asked for are recorded")
    while not steps_count or told_count < steps_count:
        found = await _next(recording, deadline_s)
        if found is None:
            ended = pb.TraceEnd(cause="the time that was asked for is over")
            break
        if isinstance(found, TraceEnded):
            ended = pb.TraceEnd(cause=found.error_message, error_reason=found.error_reason.value)
            break
        told_count += 1
        yield _step(found)
    recording.close()
    ended.steps_count = told_count
    yield pb.RecordTraceResponse(ended=ended)


async def _next(recording: Recording, deadline_s: float | None) -> TracedStep | TraceEnded | None:
    """None when the time is over, whatever waits."""
    if deadline_s is not None and asyncio.get_running_loop().time() >= deadline_s:
        return None
    try:
        async with asyncio.timeout_at(deadline_s):
            return await recording.next()
    except TimeoutError:
        return None


def _step(step: TracedStep) -> pb.RecordTraceResponse:
    return pb.RecordTraceResponse(
        step=pb.TracedStep(
            parts=[
                pb.RoutedRows(
                    is_prefill=part.is_prefill,
                    rows_count=part.rows_count,
                    expert_ids=part.expert_ids,
                )
                for part in step.parts
            ]
        )
    )
