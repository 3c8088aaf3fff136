"""The real checkpoints keep their quality on held-out text, and show what wrong routing does.

Text: four windows of 256 tokens from Wikipedia articles that no calibration saw. The dense model
has perplexity 11.3 there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from freetokend.demo.errors import DemoError
from freetokend.demo.wheels import GENSIM_WHEEL, default_cache_dir, fetch_wheel
from tests.demo.mixtral_numpy import measure

pytestmark = pytest.mark.slow

WINDOWS = 4

# Another BLAS moves these in the fifth digit; a wrong weight or wrong routing moves them far more.
TOLERANCE = 0.002


@pytest.fixture(scope="module")
def text_wheel() -> Path:
    """The wheel with the held-out text (28 MB, downloaded once per user)."""
    try:
        return fetch_wheel(GENSIM_WHEEL, default_cache_dir(), lambda m: print(m, file=sys.stderr))
    except DemoError as error:
        pytest.fail(f"the held-out text is needed: {error}", pytrace=False)


def test_demo_variant(demo_dir: Path, text_wheel: Path) -> None:
    measured = measure(demo_dir, text_wheel, WINDOWS, [0])
    assert measured[0] == pytest.approx(12.668, rel=TOLERANCE)


def test_stress_variant_breaks_with_wrong_experts(stress_dir: Path, text_wheel: Path) -> None:
    measured = measure(stress_dir, text_wheel, WINDOWS, [0, 1])
    assert measured[0] == pytest.approx(18.183, rel=TOLERANCE)
    assert measured[1] == pytest.approx(231.1, rel=10 * TOLERANCE)
    assert measured[1] > 10 * measured[0]
