"""Typed values of a measurement of bandwidths, which an engine makes while nobody is served."""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.errors import Reason
from freetokend.policy.bandwidth_profile import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureBandwidth:
    """Measure in at most limit_s of work; parts: those of this name, or all when it is empty."""

    run_id: str
    parts: tuple[str, ...] = ()
    limit_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthProgress:
    """A part begins."""

    run_id: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthMeasured:
    """The end, exactly one each. figures: also of a run that did not come to its end, which is when
    `interrupted` says why. parts_left: those that were not measured. notes: what could not be
    measured here, and why."""

    run_id: str
    figures: tuple[Figure, ...] = ()
    interrupted: str = ""
    parts_left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    error_reason: Reason | None = None
    error_message: str = ""


BandwidthMessage = BandwidthProgress | BandwidthMeasured
"""What the engine tells of a measurement."""
