"""The engine's counters and gauges of link.proto to values and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.link.messages import EngineStats

# The names are the same on both sides, all of them; the tests of the codec hold that.
_FIELDS: Final = tuple(field.name for field in fields(EngineStats))


def encode_stats(stats: EngineStats) -> pb.EngineStats:
    """Part of reports and heartbeats."""
    return pb.EngineStats(**{name: getattr(stats, name) for name in _FIELDS})


def decode_stats(stats: pb.EngineStats) -> EngineStats:
    """See `encode_stats`."""
    return EngineStats(**{name: getattr(stats, name) for name in _FIELDS})
