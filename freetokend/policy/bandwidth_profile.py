"""What was measured of a machine's bandwidths, by what it depends on, and how newer joins older.

One entry per weight format, bytes of an expert, driver and kernel build: what was measured with one
says nothing of another. An entry keeps its last measurements, each with its time and its source;
the newest value of a figure is the one that holds, and a measurement of some figures leaves the
others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Of an entry, and of a file: the oldest go first.
MOST_MEASUREMENTS: Final = 32
MOST_ENTRIES: Final = 64
MOST_FIGURES: Final = 64
_MOST_VALUE: Final = 1e15


class ProfileSource(StrEnum):
    """Who asked for a measurement: the start of an engine, a person, an idle interval, or nobody,
    because it was learned from steps."""

    BOOT = "boot"
    COMMAND = "command"
    IDLE = "idle"
    PASSIVE = "passive"


class FigureName(StrEnum):
    """What can be measured. CPU: the executor with the deployed experts; fills: pinned records into
    slots; beside: while the other of both runs."""

    HOST_READ = "host_read_bytes_per_s"
    CPU = "cpu_bytes_per_s"
    CPU_BESIDE = "cpu_beside_bytes_per_s"
    CPU_FIXED = "cpu_fixed_s"
    FILL = "fill_bytes_per_s"
    FILL_BESIDE = "fill_beside_bytes_per_s"
    FILL_FIXED = "fill_fixed_s"
    FILL_PAGEABLE = "fill_pageable_bytes_per_s"
    DISK_READ = "disk_read_bytes_per_s"

    @property
    def is_fixed_cost(self) -> bool:
        """Seconds, where the others are bytes per second."""
        return self in (FigureName.CPU_FIXED, FigureName.FILL_FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """threads_count: of the executor where a figure depends on it, otherwise 0."""

    name: FigureName
    value: float
    threads_count: int = 0

    def is_possible(self) -> bool:
        """Whether it can have been measured."""
        least = 0.0 if self.name.is_fixed_cost else 1.0
        return least <= self.value <= _MOST_VALUE and 0 <= self.threads_count <= 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What an entry is of. driver_version: empty without a GPU."""

    weight_format: str
    expert_bytes: int
    driver_version: str
    kernel_build: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Taken at this Unix time."""

    at_s: float
    source: ProfileSource
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEntry:
    """measurements: the newest last."""

    key: ProfileKey
    measurements: tuple[Measurement, ...]

    @property
    def newest_s(self) -> float:
        """When the last one was taken; minus infinity without any."""
        return max((one.at_s for one in self.measurements), default=-math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFigure:
    """The value of a figure that holds, with its time and source."""

    figure: Figure
    at_s: float
    source: ProfileSource


def with_measurement(
    entries: tuple[ProfileEntry, ...], key: ProfileKey, measurement: Measurement
) -> tuple[ProfileEntry, ...]:
    """The entries with one measurement more; those of other keys stay. Impossible figures are left
    out, and a measurement without any changes nothing."""
    figures = tuple(one for one in measurement.figures if one.is_possible())[:MOST_FIGURES]
    if not figures:
        return entries
    taken = Measurement(at_s=measurement.at_s, source=measurement.source, figures=figures)
    before = next((one.measurements for one in entries if one.key == key), ())
    # A clock that was set back does not make what was measured now older than what was before.
    merged = ProfileEntry(key=key, measurements=(*before, taken)[-MOST_MEASUREMENTS:])
    others = tuple(one for one in entries if one.key != key)
    return (*others, merged)[-MOST_ENTRIES:]


def entry_of(entries: Iterable[ProfileEntry], key: ProfileKey) -> ProfileEntry | None:
    """The one of this key."""
    return next((one for one in entries if one.key == key), None)


def known_figures(entry: ProfileEntry) -> tuple[KnownFigure, ...]:
    """Of each figure the value that was measured last, in the order of their names."""
    known: dict[tuple[FigureName, int], KnownFigure] = {}
    for one in entry.measurements:
        for figure in one.figures:
            known[figure.name, figure.threads_count] = KnownFigure(
                figure=figure, at_s=one.at_s, source=one.source
            )
    order = list(FigureName)
    return tuple(known[key] for key in sorted(known, key=lambda key: (order.index(key[0]), key[1])))
