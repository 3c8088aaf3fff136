"""Fills, merges and doorbells in Triton: beside what they must do, pretended, and compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from freetokend.experts.gpu.doorbells import await_doorbell, ring_doorbell
from freetokend.experts.gpu.fill_kernel import fill_records
from freetokend.experts.gpu.merge_kernel import merge_branches
from freetokend.policy.kernel_choice import CAPABILITIES
from tests.fakes.cuda_guard import pretend_cuda
from tests.support.device_model import OnlyOn


def run_module(name: str, *arguments: str, **environment: str) -> str:
    """What a module says, in a process of its own: how Triton works is settled at its import."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.experts.gpu.{name}", *arguments],
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_interpreted_fills_and_merges() -> None:
    assert run_module("moves", "1", TRITON_INTERPRET="1") == "moved\n"


def test_interpreted_doorbells() -> None:
    assert run_module("bells", "1", TRITON_INTERPRET="1") == "rung\n"


@pytest.mark.slow
def test_they_compile_for_every_gpu(tmp_path: Path) -> None:
    capabilities = [10 * major + minor for major, minor in CAPABILITIES]
    said = run_module(
        "compiled_moves",
        *map(str, capabilities),
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    rows = json.loads(said)
    wide = {
        "copy_records": ["expert_id", "slot"],
        "merge_rows": ["token"],
        "ring_kernel": [],
        "await_kernel": [],
    }
    store, load = "st.release.sys.global.u32", "ld.acquire.sys.global.u32"
    # Nothing exchanges a word: the layer, then the number; looks, then whether it was late.
    ordered = {"ring_kernel": [store, store], "await_kernel": [load, load, store]}
    # One kernel each, whatever the sizes of lists and batches.
    assert [(row["capability"], row["kernel"]) for row in rows] == [
        (capability, kernel) for capability in capabilities for kernel in wide
    ]
    for row in rows:
        assert row["target"] == row["capability"], row
        assert row["shared_bytes"] <= 99 << 10, row
        assert (row["spilled_bytes"], row["local"]) == (0, 0), row
        assert row["widened"] == wide[row["kernel"]], row
        assert row["ordered"] == ordered.get(row["kernel"], []), row
        if row["kernel"] in ordered:
            continue
        assert min(row["loads_16"], row["stores_16"]) > 0, row
        if row["kernel"] == "copy_records":
            # All that a thread copies of a chunk is in flight at once.
            assert row["loads_16"] == row["stores_16"] == 4, row


def test_they_run_on_a_pretended_gpu(tmp_path: Path) -> None:
    device = pretend_cuda(tmp_path)
    with FakeTensorMode(), OnlyOn("cuda") as mode:
        fills = torch.zeros(8, 2, dtype=torch.int32, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        fill_records(fills, count, 0x7F0000000000, 0x7E0000000000, 4096)
        y = torch.zeros(3, 2, 64, device=device)
        out = merge_branches(y, y, fills.view(-1)[:6].view(3, 2))
        assert (tuple(out.shape), out.dtype, out.device) == ((3, 64), torch.float32, device)
        turns = torch.zeros(2, dtype=torch.int32, device=device)
        ring_doorbell(turns, 0x7F0000000000, 1, interpreted=False)
        await_doorbell(turns, 0x7F0000000000, 1000, interpreted=False)
    names = ("fill_records", "merge_branches", "ring_doorbell", "await_doorbell")
    assert {f"freetokend::{name}" for name in names} <= mode.names
