"""The checks of a GPU on the host device: they pass, and each of them can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.kvcache.batch import KvStore
from freetokend.policy.fill_table import FillRates, fill_all_table
from tests.experts.gpu.bf16_banks import drawn_bank
from tests.gpu import (
    checks,
    engine_checks,
    kernel_checks,
    neighbour_checks,
    split_checks,
    sweep_checks,
)
from tests.gpu.bench import HOST_SHAPE, Bench, host_kind
from tests.gpu.judge import STEPS, Judge
from tests.gpu.rows import GPU, Row, not_run, summary
from tests.kvcache.gpu.contexts import Contexts
from tests.support.device_model import DensePages, DensePagesView

ROOT = Path(__file__).parents[2]


def test_all_pass_on_the_host_device(tmp_path: Path) -> None:
    told = tmp_path / "rows.json"
    done = subprocess.run(
        ["bash", "tests/gpu/run.sh", "--device", "host", "--json", str(told)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads(told.read_text())
    run = [row for row in rows if not row["missing"]]
    assert len(run) >= 24
    assert all(row["passed"] for row in run)
    left_out = [row for row in rows if row["missing"]]
    assert {row["missing"] for row in left_out} == {GPU}
    assert all("not run: " in row["measured"] and not row["passed"] for row in left_out)
    last = done.stdout.splitlines()[-1]
    assert last == summary_of(len(run), len(left_out))


def summary_of(run_count: int, left_out_count: int) -> str:
    return (
        f"{run_count} of {run_count} checks passed on host; {left_out_count} not run "
        f"({left_out_count} for lack of {GPU})"
    )


@pytest.mark.slow
def test_whole_steps_by_the_interpreted_kernels_of_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.interpreted"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    left_out = [row for row in rows if row["missing"]]
    assert [(row["check"], row["missing"]) for row in left_out] == [
        ("a resize stalls less than a step", GPU)
    ]
    assert len(rows) - len(left_out) == 5
    assert all(row["passed"] for row in rows if row not in left_out), rows


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench(host_kind(HOST_SHAPE.layers), HOST_SHAPE)
    yield one
    one.close()


def failed(bench: Bench) -> set[str]:
    """Names of the checks that did not pass."""
    return {row.check for row in checks.run_checks(bench) if row.failed}


def test_a_fill_that_copies_nothing_is_found(bench: Bench) -> None:
    ops = bench.dispatch._ops
    # Frozen, so that nothing else can do what this does.
    object.__setattr__(ops, "fill", lambda fills, fills_count: None)
    found = failed(bench)
    assert "resident slots that differ from the pool" in found
    assert any("logits beside the CPU" in name for name in found)
    assert any("whatever part" in name for name in found)
    assert any("replayed" in name for name in found)
    assert any("the measured table" in name for name in found)


def test_chunks_that_stream_nothing_or_too_much_are_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(row.passed for row in sweep_checks.streamed(bench))
    fill = bench.fill
    bench.fill = lambda fills, fills_count: None
    assert not any(row.passed for row in sweep_checks.streamed(bench))
    bench.fill = fill
    hold = sweep_checks.Chunk.hold
    monkeypatch.setattr(sweep_checks.Chunk, "hold", lambda chunk, count: hold(chunk, 3))
    assert not any(row.passed for row in sweep_checks.chunks(bench))


def test_a_planner_that_is_slow_or_idle_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", iter(range(1 << 30)).__next__)
    judge = Judge(bench)
    assert not any(row.passed for row in checks.plan_times(bench, judge))


def test_a_capture_that_fails_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def capture(self, run: object) -> None:
            raise RuntimeError("no capture today")

    object.__setattr__(bench.kind, "backend", Refusing)
    judge = Judge(bench)
    assert not checks.graphs(bench, judge)[0].passed


def test_memory_that_is_not_there_is_found(bench: Bench) -> None:
    class Boasting:
        """An arena that says it grew."""

        def __init__(self, reserved_bytes: int) -> None:
            self.committed_bytes = 0

        def grow_to(self, length_bytes: int) -> None:
            self.committed_bytes = length_bytes

        def claimed_bytes(self) -> int:
            return self.committed_bytes

        def close(self) -> None:
            pass

    object.__setattr__(bench.kind, "arena", Boasting)
    judge = Judge(bench)
    assert not checks.refused_growth(bench, judge)[0].passed


def test_a_wrong_merge_and_a_wrong_attention_are_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right_merge, right_attention = bench.merge, bench.attention

    def backwards(y_gpu: torch.Tensor, y_cpu: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
        return right_merge(y_gpu.flip(1), y_cpu.flip(1), physical.flip(1))

    def scaled(contexts: Contexts) -> KvStore:
        store = right_attention(contexts)
        assert isinstance(store, DensePages)
        attend = DensePagesView.attend
        monkeypatch.setattr(
            DensePagesView, "attend", lambda *given: attend(*given[:-1], 1.01 * given[-1])
        )
        return store

    assert all(row.passed for row in kernel_checks.merged(bench))
    monkeypatch.setattr(Bench, "merge", staticmethod(backwards))
    monkeypatch.setattr(bench, "attention", scaled)
    assert not any(row.passed for row in kernel_checks.merged(bench))
    assert not any(row.passed for row in kernel_checks.attention(bench))


def test_numbers_that_are_none_are_found(bench: Bench) -> None:
    judge = Judge(bench)
    logits = [one.logits for one in bench.references(STEPS)]
    assert judge.error(logits) == 0
    logits[3] = logits[3].clone()
    logits[3][0, 0] = float("nan")
    assert judge.error(logits) == float("inf")
    logits[3] = torch.zeros_like(logits[3])
    assert judge.error(logits) == pytest.approx(1)


def test_experts_that_are_drawn_at_once_are_like_the_others(bench: Bench) -> None:
    """A GPU's bank is too large for the careful way."""
    shape = HOST_SHAPE
    sizes = {"layers": shape.layers, "experts": shape.experts}
    drawn = drawn_bank(**sizes, hidden=shape.hidden, inter=shape.inter)
    assert drawn.mapped.bank == bench.facts
    x = torch.randn(4, shape.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    routed = torch.arange(shape.experts, dtype=torch.int32).repeat(4, 1).contiguous()
    weights = torch.ones(routed.shape)
    ours, theirs = (
        torch.linalg.vector_norm(
            CpuExpertDispatch(bench.executor, one.mapped).dispatch(1, x, routed, weights)
        )
        for one in (drawn, bench.bank)
    )
    assert float(ours / theirs) == pytest.approx(1, abs=0.2)


RATES = FillRates(
    record_bytes=1 << 20,
    fill_bytes_per_s=9e9,
    fill_alone_bytes_per_s=1e10,
    cpu_bytes_per_s=3e10,
    cpu_alone_bytes_per_s=4e10,
    cpu_slowdown_ratios=(1.0, 1.1, 1.3, 1.8, 3.0),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"fill_bytes_per_s": 1.2e10},
        {"cpu_bytes_per_s": 5e10},
        {"cpu_bytes_per_s": 0.0},
        {"cpu_alone_bytes_per_s": float("inf")},
        {"fill_alone_bytes_per_s": 3e10},
        {"fill_alone_bytes_per_s": 9e8, "fill_bytes_per_s": 9e8},
    ],
)
def test_rates_that_cannot_be_are_found(changes: dict[str, float]) -> None:
    assert split_checks.rates_row(RATES, 1e10).passed
    wrong = replace(RATES, **changes)  # type: ignore[arg-type]
    assert not split_checks.rates_row(wrong, 1e10).passed


def test_a_table_that_is_not_the_best_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_checks.table_row(RATES, 64).passed
    monkeypatch.setattr(split_checks, "fill_table", lambda rates, most: fill_all_table(most) * 5)
    assert not split_checks.table_row(RATES, 64).passed
    monkeypatch.setattr(split_checks, "fill_table", lambda rates, most: ((0,) * (most + 1),) * 5)
    assert not split_checks.table_row(RATES, 64).passed


@pytest.mark.parametrize(
    ("half_s", "table_s", "passed"),
    [(0.8, 0.8, [True, True]), (1.1, 1.0, [False, True]), (0.8, 1.1, [True, False])],
)
def test_branches_that_do_not_help_each_other_are_found(
    half_s: float, table_s: float, passed: list[bool]
) -> None:
    rows = split_checks.branch_rows("a step", {0.0: 1.0, 0.5: half_s, 1.0: 1.2}, table_s)
    assert [row.passed for row in rows] == passed


def test_a_cache_that_does_not_give_way_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(bench)
    assert neighbour_checks.neighbour(bench, judge)[0].passed
    monkeypatch.setattr(neighbour_checks.Neighbour, "taken_bytes", lambda one: 0)
    assert not neighbour_checks.neighbour(bench, judge)[0].passed


def test_a_check_without_its_package_is_not_run_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (row,) = engine_checks.engine(bench)
    assert (row.passed, row.failed, row.missing) == (False, False, "nvidia-ml-py")
    assert str(row).startswith("---- tokens of an engine on the device: not run: ")


def test_what_was_not_run_is_in_the_summary_and_can_be_required() -> None:
    good = Row(check="a", measured="1", gate="1", passed=True)
    bad = replace(good, passed=False)
    left = [not_run("b", GPU, "why"), not_run("c", "flashinfer", "it is not installed")]
    assert summary([good], "host") == ("1 of 1 checks passed on host", 0)
    text, status = summary([good, *left], "host", ["nvidia-ml-py"])
    assert status == 0
    assert text == (
        "1 of 1 checks passed on host; 2 not run (1 for lack of a GPU, 1 for lack of flashinfer)"
    )
    text, status = summary([good, *left], "host", ["flashinfer"])
    assert (status, text.endswith("; required: flashinfer")) == (1, True)
    assert summary([good, bad], "host") == ("1 of 2 checks passed on host", 1)


def test_packages_of_the_control_plane_are_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", checks)
    assert not checks.imports(bench, Judge(bench))[0].passed


def test_a_check_that_breaks_is_a_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(bench: Bench, judge: Judge) -> list[Row]:
        raise ValueError("broken")

    monkeypatch.setattr(checks, "CHECKS", (breaks,))
    (row,) = checks.run_checks(bench)
    assert (row.passed, row.measured) == (False, "ValueError: broken")
