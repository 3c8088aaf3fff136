"""The seeds that once failed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FAILED_SEEDS: Final = Path(__file__).with_name("failed_seeds.txt")


def failed_seeds() -> list[int]:
    """Those of the file, each once."""
    lines = FAILED_SEEDS.read_text(encoding="utf-8").splitlines()
    return sorted({int(line) for line in lines if line and not line.startswith("#")})
