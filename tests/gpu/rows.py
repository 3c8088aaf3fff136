"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a check measured, and whether that keeps to its gate."""

    check: str
    measured: str
    gate: str
    passed: bool
