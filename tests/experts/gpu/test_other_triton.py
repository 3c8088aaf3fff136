"""The oldest Triton that is supported compiles and interprets what the installed one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.experts.gpu.test_slot_experts import FEW
from tests.support.other_triton import other_triton

OLDEST = "3.6"
PLANS = {"plan_kernel", "reserve_kernel", "release_kernel"}
MOVES = {"copy_records", "merge_rows", "ring_kernel", "await_kernel"}
EXPERTS = {"gate_up_rows", "down_rows", "gate_up_tiles", "down_tiles"}


def run_under(directory: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """Rows of a process that finds its Triton in this directory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.experts.gpu.other_version", *arguments],
        env=os.environ | {"PYTHONPATH": str(directory)} | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["version"].startswith(f"{OLDEST}.")
    assert Path(said["file"]).is_relative_to(directory)
    rows: list[dict[str, Any]] = said["rows"]
    return rows


@pytest.mark.slow
def test_interpreted_plans_are_the_oracles_under_the_oldest_triton() -> None:
    run_under(other_triton(OLDEST), "lives", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_kernels_compile_for_every_gpu_under_the_oldest_triton(tmp_path: Path) -> None:
    """For all five capabilities: this Triton knows them."""
    rows = run_under(
        other_triton(OLDEST), *FEW, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    for case in FEW:
        capability = int(case.split(":")[0])
        built = [row for row in rows if row["capability"] == capability]
        assert {row["kernel"] for row in built} == PLANS | MOVES | EXPERTS
        assert {row["target"] for row in built} == {capability}
    for row in rows:
        assert row["shared_bytes"] <= 99 << 10, row
        assert row["local"] == 0, row


def test_a_triton_that_cannot_be_had_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(AssertionError, match=r"Triton 3\.6 cannot be had from the package index"):
        other_triton(OLDEST, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
