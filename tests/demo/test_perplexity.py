"""The real checkpoints keep their quality on held-out text, and show what wrong routing does.

Text: four windows of 256 tokens from Wikipedia articles that no calibration saw. The dense model
has perplexity 11.3 there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo.mixtral_numpy import measure

pytestmark = pytest.mark.slow

WINDOWS = 4

# Another BLAS moves these in the fifth digit; a wrong weight or wrong routing moves them far more.
TOLERANCE = 0.002


def test_demo_variant(demo_dir: Path, text_wheel: Path) -> None:
    measured = measure(demo_dir, text_wheel, WINDOWS, [0])
    assert measured[0] == pytest.approx(12.668, rel=TOLERANCE)


def test_stress_variant_breaks_with_wrong_experts(stress_dir: Path, text_wheel: Path) -> None:
    measured = measure(stress_dir, text_wheel, WINDOWS, [0, 1])
    assert measured[0] == pytest.approx(18.183, rel=TOLERANCE)
    assert measured[1] == pytest.approx(231.1, rel=10 * TOLERANCE)
    assert measured[1] > 10 * measured[0]
