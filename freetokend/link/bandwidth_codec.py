"""The measurement of bandwidths in link.proto to values and back; total as `codec` is."""

from __future__ import annotations

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.link.bandwidth_messages import (
    BandwidthMeasured,
    BandwidthMessage,
    BandwidthProgress,
    MeasureBandwidth,
)
from freetokend.link.protocol_errors import LinkProtocolError, decode_reason
from freetokend.policy.bandwidth_profile import Figure, FigureName


def encode_measure(message: MeasureBandwidth) -> pb.ControlMessage:
    """Control to engine."""
    return pb.ControlMessage(
        measure_bandwidth=pb.MeasureBandwidth(
            run_id=message.run_id, parts=message.parts, limit_s=message.limit_s
        )
    )


def decode_measure(message: pb.MeasureBandwidth) -> MeasureBandwidth:
    """The engine's side."""
    return MeasureBandwidth(
        run_id=message.run_id, parts=tuple(message.parts), limit_s=message.limit_s
    )


def encode_bandwidth(message: BandwidthMessage) -> pb.EngineMessage:
    """Engine to control."""
    if isinstance(message, BandwidthProgress):
        return pb.EngineMessage(
            bandwidth_progress=pb.BandwidthProgress(run_id=message.run_id, part=message.part)
        )
    return pb.EngineMessage(
        bandwidth_measured=pb.BandwidthMeasured(
            run_id=message.run_id,
            figures=[
                pb.BandwidthFigure(
                    name=one.name.value,
                    bytes_per_s=0.0 if one.name.is_fixed_cost else one.value,
                    fixed_s=one.value if one.name.is_fixed_cost else 0.0,
                    threads_count=one.threads_count,
                )
                for one in message.figures
            ],
            interrupted=message.interrupted,
            parts_left=message.parts_left,
            notes=message.notes,
            duration_s=message.duration_s,
            error_reason="" if message.error_reason is None else message.error_reason.value,
            error_message=message.error_message,
        )
    )


def decode_bandwidth(message: pb.EngineMessage) -> BandwidthMessage:
    """Control's side. `LinkProtocolError` for a figure or a reason that does not exist."""
    if message.HasField("bandwidth_progress"):
        progress = message.bandwidth_progress
        return BandwidthProgress(run_id=progress.run_id, part=progress.part)
    return _measured(message.bandwidth_measured)


def _measured(message: pb.BandwidthMeasured) -> BandwidthMeasured:
    return BandwidthMeasured(
        run_id=message.run_id,
        figures=tuple(_figure(one) for one in message.figures),
        interrupted=message.interrupted,
        parts_left=tuple(message.parts_left),
        notes=tuple(message.notes),
        duration_s=message.duration_s,
        error_reason=decode_reason(message.error_reason) if message.error_reason else None,
        error_message=message.error_message,
    )


def _figure(figure: pb.BandwidthFigure) -> Figure:
    try:
        name = FigureName(figure.name)
    except ValueError:
        raise LinkProtocolError(f"the engine measured an unknown {figure.name[:64]!r}") from None
    value = figure.fixed_s if name.is_fixed_cost else figure.bytes_per_s
    return Figure(name=name, value=value, threads_count=figure.threads_count)
