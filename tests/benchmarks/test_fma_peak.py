"""The arithmetic ceiling computes what it says and is not optimised away."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.fma_peak import FmaSide
from freetokend.native.executor import available_isas


@pytest.mark.skipif(
    shutil.which("gcc") is None or "avx2" not in available_isas(),
    reason="needs gcc and AVX2",
)
def test_the_peak_is_that_of_vector_units() -> None:
    side = FmaSide(sorted(os.sched_getaffinity(0))[:1], 1e9)
    try:
        bursts = [side.burst(0.05) for _ in range(5)]
    finally:
        side.close()
    # As much of the time as the thread had a core.
    rate = max(burst.rate / max(burst.cpu_share, 0.05) for burst in bursts)
    # One lane at a time gives less than 8, and no CPU with AVX2 does more than 4 vectors a cycle.
    assert 8 < rate < 4 * 16 * 7
