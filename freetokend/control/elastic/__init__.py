"""Elastic memory: the loop around the pure controller, its events, and resizes by hand.

`loop` watches, decides and resizes; `wants` is what people asked for; `by_hand` serves the
operator.
"""

from __future__ import annotations

from freetokend.control.elastic.actuator import EnginePort
from freetokend.control.elastic.by_hand import Asked, HandOutcome, HandResize, HandResizes
from freetokend.control.elastic.events import CacheSizes, ElasticEvent, EventKind, EventRing
from freetokend.control.elastic.loop import (
    ElasticLoop,
    ResizeMeter,
    ResizeResult,
    Surroundings,
)
from freetokend.control.elastic.status import ElasticStatus
from freetokend.control.elastic.wants import Wants, Wish

__all__ = [
    "Asked",
    "CacheSizes",
    "ElasticEvent",
    "ElasticLoop",
    "ElasticStatus",
    "EnginePort",
    "EventKind",
    "EventRing",
    "HandOutcome",
    "HandResize",
    "HandResizes",
    "ResizeMeter",
    "ResizeResult",
    "Surroundings",
    "Wants",
    "Wish",
]
