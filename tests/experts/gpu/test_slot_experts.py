"""Experts from slots in Triton: interpreted beside float64 and the executor, and compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetokend.ftw.formats import Kind, parse_format
from freetokend.policy.kernel_choice import CAPABILITIES

# One format each, and every kind of code; the others with --full.
FEW = ("86:int4_g128_f16_zp", "89:q6_K", "90:mxfp4", "100:fp8_block", "120:q4_K")
FEW_INTERPRETED = (
    "bf16",
    "fp8_block",
    "mxfp4",
    "nvfp4",
    "int4_g64_bf16_zp",
    "int4_g128_f16",
    "int8_g32_f16_zp",
    "q4_K",
    "q6_K",
)
FORMATS = (
    "bf16",
    "fp8_block",
    "mxfp4",
    "nvfp4",
    "int4_g32_f16",
    "int4_g64_bf16",
    "int4_g128_bf16_zp",
    "int8_g32_f16",
    "int8_g128_f16_zp",
    "q4_K",
    "q6_K",
)


def run_module(name: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """What a module says, in a process of its own: how Triton works is settled at its import."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.experts.gpu.{name}", *arguments],
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    assert rows
    return rows


def check_errors(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        # A middle is the bf16 next to the exact number; no other rounding is above fp32's.
        assert row["middle_units"] < 1.01, row
        assert row["down"] < 5e-7, row
        # Numbers of the middle next to a boundary may go either way.
        assert row["executor"] < 2e-3, row
        assert row["oracle"] < 2e-3, row


@pytest.mark.slow
def test_interpreted_kernels_are_float64_and_the_executor() -> None:
    check_errors(run_module("interpreted", "1", *FEW_INTERPRETED, TRITON_INTERPRET="1"))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 8))
def test_more_interpreted_inputs(seed: int) -> None:
    check_errors(run_module("interpreted", str(seed), TRITON_INTERPRET="1"))


def check_compiled(cases: list[str], folder: Path) -> None:
    rows = run_module("compiled", *cases, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder))
    # One kernel of each kind whatever the number of tokens.
    assert len(rows) == 4 * len(cases)
    assert {f"{row['capability']}:{row['format']}" for row in rows} == set(cases)
    for row in rows:
        tiles = row["kernel"].endswith("_tiles")
        assert row["target"] == row["capability"], row
        assert row["shared_bytes"] <= 99 << 10, row
        assert (row["spilled_bytes"], row["local"]) == (0, 0), row
        assert row["wide_offsets"], row
        assert row["flushes"] is False, row
        assert row["tensor_cores"] is tiles, row
        assert tiles or row["vectors"], row


@pytest.mark.slow
def test_kernels_compile_for_every_gpu(tmp_path: Path) -> None:
    check_compiled(list(FEW), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_compiles_for_every_gpu(name: str, tmp_path: Path) -> None:
    capabilities = [10 * major + minor for major, minor in CAPABILITIES]
    check_compiled([f"{one}:{name}" for one in capabilities], tmp_path)


def test_the_matrix_is_that_of_the_table() -> None:
    few = [case.split(":")[0] for case in FEW]
    assert few == [f"{major}{minor}" for major, minor in CAPABILITIES]
    kinds = {parse_format(name).kind for name in FORMATS}
    assert kinds == {parse_format(name).kind for name in FEW_INTERPRETED} == set(Kind)
