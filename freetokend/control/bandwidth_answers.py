"""Bandwidths as the protobuf messages of the control plane."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.control.bandwidth import BandwidthKeeper
from freetokend.core.cache_stats import Bandwidth
from freetokend.core.errors import InvalidInputError
from freetokend.link.bandwidth_messages import BandwidthMeasured
from freetokend.link.messages import EngineSnapshot
from freetokend.policy.bandwidth_profile import (
    Figure,
    FigureName,
    KnownFigure,
    ProfileEntry,
    ProfileSource,
    known_figures,
)
from freetokend.policy.profiling import LIMIT_S

_MOST_LIMIT_S: Final = 60.0
_MOST_PARTS: Final = 16


def bandwidth_response(
    keeper: BandwidthKeeper, snapshot: EngineSnapshot
) -> pb.GetBandwidthResponse:
    """Everything that is known, with ages up to now."""
    now_s, present = keeper.wall_s(), keeper.entry()
    stored = keeper.stored
    split = None if snapshot.cache is None else snapshot.cache.split
    absent_reason = ""
    if present is None:
        absent_reason = (
            "no engine is ready"
            if keeper.key() is None
            else "nothing was measured yet of what is served: that is done as soon as nobody is "
            "served, or by `freetokenctl bandwidth run`"
        )
    return pb.GetBandwidthResponse(
        entries=[_entry(one, now_s, is_served=one is present) for one in stored.entries],
        passive=[] if split is None else [_passive(one) for one in split.bandwidths],
        problem=stored.problem,
        absent_reason=absent_reason,
    )


def _entry(entry: ProfileEntry, now_s: float, *, is_served: bool) -> pb.BandwidthEntry:
    return pb.BandwidthEntry(
        weight_format=entry.key.weight_format,
        expert_bytes=entry.key.expert_bytes,
        driver_version=entry.key.driver_version,
        kernel_build=entry.key.kernel_build,
        is_served=is_served,
        measurements_count=len(entry.measurements),
        figures=[_known(one, now_s) for one in known_figures(entry)],
    )


def _known(known: KnownFigure, now_s: float) -> pb.BandwidthFigure:
    return _figure(known.figure, known.source.value, max(now_s - known.at_s, 0.0))


def _figure(figure: Figure, source: str, age_s: float) -> pb.BandwidthFigure:
    fixed = figure.name.is_fixed_cost
    return pb.BandwidthFigure(
        name=figure.name.value,
        bytes_per_s=0.0 if fixed else figure.value,
        fixed_s=figure.value if fixed else 0.0,
        threads_count=figure.threads_count,
        source=source,
        age_s=age_s,
    )


def _passive(told: Bandwidth) -> pb.BandwidthFigure:
    name = {
        ("fill", True): FigureName.FILL_BESIDE,
        ("fill", False): FigureName.FILL,
        ("cpu", True): FigureName.CPU_BESIDE,
    }.get((told.link, told.beside), FigureName.CPU)
    return _figure(Figure(name=name, value=told.bytes_per_s), told.source, told.age_s)


async def measuring(
    keeper: BandwidthKeeper, request: pb.MeasureBandwidthRequest
) -> AsyncIterator[pb.MeasureBandwidthResponse]:
    """A measurement that somebody asked for, part by part, then its result."""
    limit_s = request.limit_s or LIMIT_S
    if not 0.0 < limit_s <= _MOST_LIMIT_S:
        raise InvalidInputError(
            f"limit_s = {limit_s:g} is out of range; it must be above 0, at most {_MOST_LIMIT_S:g}",
            param="limit_s",
        )
    if len(request.parts) > _MOST_PARTS:
        raise InvalidInputError(
            f"{len(request.parts)} parts are too many; at most {_MOST_PARTS}", param="parts"
        )
    begun: asyncio.Queue[str] = asyncio.Queue()
    run = asyncio.create_task(
        keeper.measure(
            ProfileSource.COMMAND,
            parts=tuple(request.parts),
            limit_s=limit_s,
            progress=begun.put_nowait,
        ),
        name="bandwidth-measured",
    )
    try:
        while not run.done():
            next_part = asyncio.create_task(begun.get(), name="bandwidth-part")
            await asyncio.wait({run, next_part}, return_when=asyncio.FIRST_COMPLETED)
            if next_part.done():
                yield pb.MeasureBandwidthResponse(part=next_part.result())
            else:
                next_part.cancel()
        while not begun.empty():
            yield pb.MeasureBandwidthResponse(part=begun.get_nowait())
        yield pb.MeasureBandwidthResponse(result=_result(run.result()))
    finally:
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await run


def _result(measured: BandwidthMeasured) -> pb.BandwidthResult:
    return pb.BandwidthResult(
        figures=[_figure(one, ProfileSource.COMMAND.value, 0.0) for one in measured.figures],
        interrupted=measured.interrupted,
        parts_left=measured.parts_left,
        notes=measured.notes,
        duration_s=measured.duration_s,
    )
