"""Prometheus metrics: a catalogue of names, a collector over the state, and event meters."""

from __future__ import annotations

from freetokend.control.metrics.registry import Metrics

__all__ = ["Metrics"]
