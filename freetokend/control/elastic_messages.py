"""The controller's values as the protobuf messages of the control plane, and back."""

from __future__ import annotations

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.control.elastic.by_hand import Asked, HandResize
from freetokend.control.elastic.events import CacheSizes, ElasticEvent
from freetokend.control.elastic.status import ElasticStatus
from freetokend.policy.controller import Hold


def elastic_status(status: ElasticStatus, now_s: float) -> pb.ElasticStatus | None:
    """None before the first tick."""
    if status.ticked_s is None:
        return None
    # A keyword that is None leaves its field unset.
    return pb.ElasticStatus(
        enabled=status.enabled,
        reason_code=status.standing.code.value,
        reason=status.standing.text,
        actual=_sizes(status.actual),
        target=_sizes(status.target),
        budget_bytes=None if status.budget_bytes is None else max(status.budget_bytes, 0),
        required_free_bytes=status.required_free_bytes,
        generation=status.generation,
        in_flight=status.in_flight,
        recent_resizes_count=status.recent_resizes_count,
        holds=[hold_status(hold) for hold in status.holds],
        tick_age_s=max(0.0, now_s - status.ticked_s),
        asleep=status.asleep,
    )


def hold_status(hold: Hold) -> pb.HoldStatus:
    """One lease."""
    return pb.HoldStatus(
        hold_id=hold.hold_id,
        vram_bytes=hold.size_bytes,
        reason=hold.reason,
        pids=sorted(hold.pids),
    )


def event_message(event: ElasticEvent) -> pb.Event:
    """One event."""
    return pb.Event(
        event_index=event.event_id,
        time_s=event.time_s,
        kind=f"EVENT_KIND_{event.kind.name}",
        code=event.code,
        text=event.text,
        generation=event.generation,
        before=_sizes(event.before),
        after=_sizes(event.after),
    )


def asked_of(request: pb.ResizeRequest) -> Asked:
    """What a request asks for; with none of its sizes, nothing."""
    match request.WhichOneof("size"):
        case "slots_count":
            return Asked(slots_count=request.slots_count)
        case "slots_ratio":
            return Asked(slots_ratio=request.slots_ratio)
        case "vram_bytes":
            return Asked(vram_bytes=request.vram_bytes)
        case "kv_tokens":
            return Asked(kv_tokens=request.kv_tokens)
        case "preset":
            return Asked(preset=request.preset)
        case _:
            return Asked()


def resize_response(resized: HandResize) -> pb.ResizeResponse:
    """What became of it."""
    return pb.ResizeResponse(
        outcome=f"RESIZE_OUTCOME_{resized.outcome.name}",
        before=_sizes(resized.before),
        target=_sizes(resized.target),
        after=_sizes(resized.after),
        generation=resized.generation,
        stall_s=resized.stall_s,
        safe_point_wait_s=resized.wait_s,
        reason_code=resized.code,
        reason=resized.text,
    )


def _sizes(sizes: CacheSizes | None) -> pb.ElasticSizes | None:
    if sizes is None:
        return None
    return pb.ElasticSizes(
        slots_count=sizes.slots_count,
        kv_pages_count=sizes.kv_pages_count,
        size_bytes=sizes.size_bytes,
    )
