"""The plan call in Triton: interpreted beside the oracle, and compiled for the GPUs we serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_module(name: str, *arguments: int, **environment: str) -> str:
    """Output of a module in a process of its own: how Triton works is settled at its import."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.experts.plan.{name}", *map(str, arguments)],
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_interpreted_lives_are_the_oracles() -> None:
    assert run_module("interpreted", 0, 14, 30, TRITON_INTERPRET="1") == "14 lives agree\n"


@pytest.mark.full
def test_many_interpreted_lives_are_the_oracles() -> None:
    assert run_module("interpreted", 1000, 200, 40, TRITON_INTERPRET="1") == "200 lives agree\n"


@pytest.mark.slow
def test_kernels_compile_for_every_gpu(tmp_path: Path) -> None:
    out = run_module(
        "compiled",
        *(86, 89, 90, 100, 120),
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
        TRITON_DEFAULT_FP_FUSION="0",
    )
    rows = json.loads(out)
    kernels = ["plan_kernel", "release_kernel", "reserve_kernel", "reserve_kernel"]
    for capability in (86, 89, 90, 100, 120):
        # One kernel of each kind whatever the layer, and a reserve for some experts.
        built = [row for row in rows if row["capability"] == capability]
        assert sorted(row["kernel"] for row in built) == kernels
    for row in rows:
        assert row["shared_bytes"] <= 99 << 10, row
        assert (row["spilled_bytes"], row["local"]) == (0, 0), row
