"""Measuring bandwidths while nobody is served, slice by slice. Torch-free.

A slice is short, and a look at what has arrived comes between two: a request waits for one slice at
most, and ends the measurement. What was measured until then is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import Reason
from freetokend.core.logs import EventLogger
from freetokend.link.bandwidth_messages import (
    BandwidthMeasured,
    BandwidthMessage,
    BandwidthProgress,
    MeasureBandwidth,
)
from freetokend.policy.bandwidth_profile import Figure

# About what a slice may take.
SLICE_S: Final = 0.025
MOST_LIMIT_S: Final = 60.0


class NotMeasurableError(Exception):
    """A part that cannot be measured here, and why."""


Slices = Iterator[Figure | None]
"""Each step is a slice; some give a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthParts:
    """What can be measured, by name, in this order; each call begins anew."""

    parts: Mapping[str, Callable[[], Slices]]


class _Run:
    def __init__(self, command: MeasureBandwidth, parts: list[str]) -> None:
        self.command = command
        self.left = parts
        self.slices: Slices | None = None
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self.spent_s = 0.0


class BandwidthCommands:
    """Owner of the measurement under way; there is at most one. Called by the loop's thread."""

    def __init__(
        self,
        parts: BandwidthParts,
        *,
        send: Callable[[BandwidthMessage], None],
        log: EventLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts.parts
        self._send = send
        self._log = log
        self._clock = clock
        self._run: _Run | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a slice waits to be measured."""
        return self._run is not None

    def take(self, command: MeasureBandwidth, *, idle: bool) -> None:
        """Begin. idle: nobody is served now; otherwise it ends before it has begun."""
        unknown = [name for name in command.parts if name not in self._parts]
        if unknown or not 0.0 < command.limit_s <= MOST_LIMIT_S:
            what = f"there is no part {unknown[0]!r}" if unknown else f"limit_s {command.limit_s:g}"
            self._refuse(
                command,
                Reason.INVALID_REQUEST,
                f"{what}: parts are {', '.join(self._parts)}, and the limit is above 0 and at most "
                f"{MOST_LIMIT_S:g} seconds",
            )
            return
        if self._run is not None:
            self._refuse(command, Reason.QUEUE_FULL, "another measurement is under way")
            return
        wanted = command.parts or tuple(self._parts)
        self._run = _Run(command, [name for name in self._parts if name in wanted])
        if not idle:
            self.interrupt("requests are being served")

    def _refuse(self, command: MeasureBandwidth, reason: Reason, message: str) -> None:
        self._send(
            BandwidthMeasured(run_id=command.run_id, error_reason=reason, error_message=message)
        )

    def interrupt(self, cause: str) -> None:
        """End the measurement, if there is one, with what was measured so far."""
        run = self._run
        if run is None:
            return
        self._end_part(run)
        self._run = None
        self._send(
            BandwidthMeasured(
                run_id=run.command.run_id,
                figures=tuple(run.figures),
                interrupted=cause,
                parts_left=tuple(run.left),
                notes=tuple(run.notes),
                duration_s=run.spent_s,
            )
        )
        self._log.info("bandwidth-measured", figures_count=len(run.figures), cause=cause or "done")

    def slice(self) -> None:
        """Measure one slice."""
        run = self._run
        if run is None:
            return
        if not run.left:
            self.interrupt("")
            return
        if run.spent_s >= run.command.limit_s:
            self.interrupt(f"the limit of {run.command.limit_s:g} s was reached")
            return
        began_s = self._clock()
        try:
            self._next(run, run.left[0])
        except NotMeasurableError as error:
            self._leave_out(run, str(error))
        except Exception as error:  # who cannot measure still serves
            self._log.exception("bandwidth-part-failed", part=run.left[0])
            self._leave_out(run, f"{type(error).__name__}: {error}")
        run.spent_s += self._clock() - began_s

    def _next(self, run: _Run, part: str) -> None:
        if run.slices is None:
            self._send(BandwidthProgress(run_id=run.command.run_id, part=part))
            run.slices = self._parts[part]()
        try:
            figure = next(run.slices)
        except StopIteration:
            run.slices = None
            run.left.pop(0)
            return
        if figure is not None and figure.is_possible():
            run.figures.append(figure)

    def _leave_out(self, run: _Run, why: str) -> None:
        run.notes.append(f"{run.left[0]}: {why}")
        self._end_part(run)
        run.left.pop(0)

    @staticmethod
    def _end_part(run: _Run) -> None:
        """Give back what the part holds."""
        close = getattr(run.slices, "close", None)
        run.slices = None
        if close is not None:
            close()
