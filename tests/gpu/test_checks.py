"""The checks of a GPU on the host device: they pass, and each of them can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from freetokend.kvcache.batch import KvStore
from tests.gpu import checks, kernel_checks, sweep_checks
from tests.gpu.bench import HOST_SHAPE, Bench, host_kind
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
    assert len(rows) >= 20
    assert all(row["passed"] for row in rows)


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
    assert len(rows) == 5
    assert all(row["passed"] for row in rows), rows


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench(host_kind(HOST_SHAPE.layers), HOST_SHAPE)
    yield one
    one.close()


def failed(bench: Bench) -> set[str]:
    """Names of the checks that did not pass."""
    return {row.check for row in checks.run_checks(bench) if not row.passed}


def test_a_fill_that_copies_nothing_is_found(bench: Bench) -> None:
    ops = bench.dispatch._ops
    # Frozen, so that nothing else can do what this does.
    object.__setattr__(ops, "fill", lambda fills, fills_count: None)
    found = failed(bench)
    assert "resident slots that differ from the pool" in found
    assert any("logits beside the CPU" in name for name in found)
    assert any("whatever part" in name for name in found)
    assert any("replayed" in name for name in found)


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
    judge = checks.Judge(bench)
    assert not any(row.passed for row in checks.plan_times(bench, judge))


def test_a_capture_that_fails_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def capture(self, run: object) -> None:
            raise RuntimeError("no capture today")

    object.__setattr__(bench.kind, "backend", Refusing)
    judge = checks.Judge(bench)
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
    judge = checks.Judge(bench)
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
    judge = checks.Judge(bench)
    logits = [one.logits for one in bench.references(checks.STEPS)]
    assert judge.error(logits) == 0
    logits[3] = logits[3].clone()
    logits[3][0, 0] = float("nan")
    assert judge.error(logits) == float("inf")
    logits[3] = torch.zeros_like(logits[3])
    assert judge.error(logits) == pytest.approx(1)


def test_packages_of_the_control_plane_are_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", checks)
    assert not checks.imports(bench, checks.Judge(bench))[0].passed


def test_a_check_that_breaks_is_a_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(bench: Bench, judge: checks.Judge) -> list[checks.Row]:
        raise ValueError("broken")

    monkeypatch.setattr(checks, "CHECKS", (breaks,))
    (row,) = checks.run_checks(bench)
    assert (row.passed, row.measured) == (False, "ValueError: broken")
