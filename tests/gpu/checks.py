"""Checks of the engine layer on a device: one row each, with a gate, and an exit status.

    python -m tests.gpu.checks --device host|cuda [--require PACKAGE] [--json FILE]

Random weights are made here; nothing of the control plane is needed. Gates of speed hold for a
GPU; the host device is held to those of values and bytes, and to loose ones of time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from freetokend.device.arena import ArenaError
from freetokend.experts.plan.contract import PlanInputs, PlanOutputs, PlanShape, Stat
from freetokend.experts.residency import ResidencyState
from tests.gpu.bench import CUDA_SHAPE, HOST_SHAPE, Bench, cuda_kind, host_kind
from tests.gpu.engine_checks import engine
from tests.gpu.judge import LOGITS_ERROR, STEPS, Judge
from tests.gpu.kernel_checks import attention, fill_rate, flashinfer, merged
from tests.gpu.neighbour_checks import neighbour
from tests.gpu.rows import GPU, OPTIONAL_PACKAGES, Row, not_run, summary
from tests.gpu.split_checks import branches, contended, split_by_table
from tests.gpu.start_checks import starts
from tests.gpu.sweep_checks import chunks, streamed

LEAST_JUDGED_SHARE: Final = 0.3
_FORBIDDEN: Final = ("grpc", "fastapi", "flashinfer", "uvicorn")


def parity(bench: Bench, judge: Judge) -> list[Row]:
    """Steps of three sequences with 37 and with 11 % of the experts in slots."""
    share = judge.judged_share
    rows = [
        Row(
            check="rows without a tie of experts",
            measured=f"{share:.0%}",
            gate=f">= {LEAST_JUDGED_SHARE:.0%}",
            passed=share >= LEAST_JUDGED_SHARE,
        )
    ]
    for share in (0.37, 0.11):
        bench.pool.resize(bench.slots_of(share))
        bench.dispatch.totals.zero_()
        worst = judge.error_now(bench)
        totals = bench.dispatch.totals.sum(0).tolist()
        worked = totals[Stat.FILLS] > 0 and totals[Stat.EVICTIONS] > 0
        rows.append(
            Row(
                check=f"logits beside the CPU's, {share:.0%} of the experts in slots",
                measured=f"{worst:.1e}, {totals[Stat.FILLS]} fills, {totals[Stat.CPU]} on the CPU",
                gate=f"<= {LOGITS_ERROR:.0e}, and fills and evictions happened",
                passed=worst <= LOGITS_ERROR and worked,
            )
        )
    return rows


def split(bench: Bench, judge: Judge) -> list[Row]:
    """The same step filled, computed on the CPU, and half of each."""
    bench.pool.resize(bench.slots_of(0.37))
    found = []
    program = bench.program()
    for part in (0.0, 0.5, 1.0):
        bench.split_misses(part)
        bench.dispatch.totals.zero_()
        pages = bench.pages()
        logits = [bench.run(program, pages, at) for at in range(STEPS)]
        found.append((judge.error(logits), bench.dispatch.totals.sum(0).tolist()))
    worst = max(error for error, _ in found)
    fills = [totals[Stat.FILLS] for _, totals in found]
    return [
        Row(
            check="logits whatever part of the misses is filled",
            measured=f"{worst:.1e}, fills {fills}",
            gate=f"<= {LOGITS_ERROR:.0e}, fills 0 < some < most",
            passed=worst <= LOGITS_ERROR and 0 == fills[0] < fills[1] < fills[2],
        )
    ]


def graphs(bench: Bench, judge: Judge) -> list[Row]:
    """Replays, with a resize of the cache before each of them."""
    bench.pool.resize(bench.slots_of(0.37))
    program = bench.program()
    pages = bench.pages()
    graphed = bench.graphed(program, pages)
    logits, step_s, resize_s = [], [], []
    for at in range(STEPS):
        began_s = time.perf_counter()
        bench.pool.resize(bench.slots_of(0.37 if at % 2 else 0.2))
        resized_s = time.perf_counter()
        logits.append(bench.run(graphed, pages, at))
        step_s.append(time.perf_counter() - resized_s)
        resize_s.append(resized_s - began_s)
        bench.pool.check_integrity()
    counts, worst = graphed.counts(), judge.error(logits)
    expected = (1, STEPS - 1, ())
    got = (counts.captures_count, counts.replays_count, counts.failures)
    rows = [
        Row(
            check="replayed steps while the cache is resized",
            measured=f"{worst:.1e}, (captures, replays, failures) {got}",
            gate=f"<= {LOGITS_ERROR:.0e}, {expected}",
            passed=worst <= LOGITS_ERROR and got == expected,
        )
    ]
    stalls = "a resize stalls less than a step"
    if bench.kind.driver is None:
        rows.append(not_run(stalls, GPU, "memory of the host is filled while it is committed"))
    else:
        stall, step = max(resize_s[2:]), statistics.median(step_s[2:])
        rows.append(
            Row(
                check=stalls,
                measured=f"{stall * 1e6:.0f} us, a step {step * 1e6:.0f} us",
                gate="< 1 step",
                passed=stall < step,
            )
        )
    return rows


def bells(bench: Bench, judge: Judge) -> list[Row]:
    """Replays that start the CPU by a doorbell."""

    def replay() -> tuple[float, float]:
        bench.pool.resize(bench.slots_of(0.37))
        bench.split_misses(0.0)
        pages = bench.pages()
        graphed = bench.graphed(bench.program(), pages)
        logits = [bench.run(graphed, pages, at) for at in range(STEPS)]
        bench.split_misses(1.0)
        return judge.error(logits), LOGITS_ERROR

    return starts(bench, replay)


def contents(bench: Bench, judge: Judge) -> list[Row]:
    """What lies in the slots after all that."""
    bench.pool.resize(bench.slots_of(0.37))
    bench.run(bench.program(), bench.pages(), 0)
    bench.kind.synchronize()
    report = bench.pool.verify(bench.bank.mapped)
    return [
        Row(
            check="resident slots that differ from the pool",
            measured=f"{len(report.differences)} of {report.compared_count}",
            gate="0 of more than 0",
            passed=not report.differences and report.compared_count > 0,
        )
    ]


def claims(bench: Bench, judge: Judge) -> list[Row]:
    """Bytes that the driver, or the kernel, shows more and less."""
    bench.pool.resize(0)
    before, free_before = bench.pool.claimed_bytes(), _free_bytes(bench)
    bench.pool.resize(bench.facts.experts_count)
    claim = bench.pool.committed_bytes
    grown, free_grown = bench.pool.claimed_bytes(), _free_bytes(bench)
    bench.pool.resize(0)
    after = bench.pool.claimed_bytes()
    shown = min(grown - before, free_before - free_grown if free_before else grown - before)
    return [
        Row(
            check="bytes shown of those claimed",
            measured=f"{shown} of {claim}, {after - before} after",
            gate=">= 95 %, 0 after",
            passed=0.95 * claim <= shown and after == before,
        )
    ]


def _free_bytes(bench: Bench) -> int:
    return 0 if bench.kind.driver is None else bench.kind.driver.memory().free_bytes


def refused_growth(bench: Bench, judge: Judge) -> list[Row]:
    """More than the device has is refused, and leaves everything as it was."""
    arena = bench.kind.arena(1 << 45)
    arena.grow_to(1)
    held = arena.claimed_bytes()
    try:
        arena.grow_to(1 << 45)
    except ArenaError as error:
        outcome = f"refused, {error.available_bytes} bytes were free"
    else:
        outcome = "granted"
    kept = arena.claimed_bytes()
    arena.close()
    return [
        Row(
            check="a growth beyond the memory",
            measured=f"{outcome}; {held} bytes held before, {kept} after",
            gate="refused, the same bytes held",
            passed=outcome.startswith("refused") and held == kept > 0,
        )
    ]


def plan_times(bench: Bench, judge: Judge) -> list[Row]:
    """One call with all misses, in caches of growing size."""
    gate_us = 100.0 if bench.kind.driver is not None else 2000.0
    shape = PlanShape(
        moe_layers_count=bench.shape.layers,
        experts_per_layer_count=256,
        top_k=8,
        tokens_capacity=1,
        cpu_kernel=True,
    )
    return [_plan_time(bench, shape, slots, gate_us) for slots in (512, 4096, 16384)]


def _plan_time(bench: Bench, shape: PlanShape, slots_count: int, gate_us: float) -> Row:
    device = bench.kind.device
    experts_count = shape.moe_layers_count * shape.experts_per_layer_count
    state = ResidencyState.empty(
        experts_count=experts_count, slots_capacity=slots_count, device=device
    )
    state.slots_count.fill_(slots_count)
    planner, outputs = bench.kind.planner(state, shape), PlanOutputs.empty(shape, device)
    given = [
        PlanInputs(
            routed=torch.arange(8 * at, 8 * at + 8, dtype=torch.int32, device=device).view(1, 8),
            valid_tokens=torch.ones(1, dtype=torch.int32, device=device),
            fillable=torch.ones(shape.moe_layers_count, dtype=torch.int32, device=device),
            fill_count=torch.arange(257, dtype=torch.int32, device=device).view(1, -1),
        )
        for at in range(20)
    ]
    best_us, fills_count = float("inf"), 0
    planner.plan(0, given[0], outputs)
    for inputs in given[1:]:
        bench.kind.synchronize()
        began_s = time.perf_counter()
        planner.plan(0, inputs, outputs)
        bench.kind.synchronize()
        best_us = min(best_us, (time.perf_counter() - began_s) * 1e6)
        fills_count += int(outputs.fills_count)
    return Row(
        check=f"a plan of 8 misses in {slots_count} slots, with its launch",
        measured=f"{best_us:.0f} us, {fills_count} fills",
        gate=f"<= {gate_us:.0f} us, {8 * 19} fills",
        passed=best_us <= gate_us and fills_count == 8 * 19,
    )


def imports(bench: Bench, judge: Judge) -> list[Row]:
    """Nothing of the control plane was needed."""
    found = [name for name in _FORBIDDEN if name in sys.modules]
    return [
        Row(
            check="packages of the control plane",
            measured=", ".join(found) or "none",
            gate="none",
            passed=not found,
        )
    ]


CHECKS: Final[tuple[Callable[[Bench, Judge], list[Row]], ...]] = (
    parity,
    split,
    graphs,
    bells,
    split_by_table,
    contents,
    neighbour,
    claims,
    refused_growth,
    plan_times,
    lambda bench, judge: fill_rate(bench),
    lambda bench, judge: streamed(bench),
    lambda bench, judge: chunks(bench),
    lambda bench, judge: merged(bench),
    lambda bench, judge: attention(bench),
    lambda bench, judge: contended(bench),
    lambda bench, judge: branches(bench),
    lambda bench, judge: engine(bench),
    imports,
    lambda bench, judge: flashinfer(bench),
)


def run_checks(bench: Bench) -> list[Row]:
    """All of them; one that breaks is a row that did not pass."""
    rows, judge = [], Judge(bench)
    for check in CHECKS:
        try:
            found = check(bench, judge)
        except Exception as error:
            traceback.print_exc()
            measured = f"{type(error).__name__}: {error}"
            found = [Row(check=check.__name__, measured=measured, gate="runs", passed=False)]
        for row in found:
            print(row, flush=True)
        rows += found
    return rows


def main(arguments: list[str]) -> int:
    """0 when every check that ran passed, and none was left out for lack of what is required."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh")
    parser.add_argument("--device", choices=("host", "cuda"), required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        choices=OPTIONAL_PACKAGES,
        help="fail when a check was not run for lack of this package; may be repeated",
    )
    options = parser.parse_args(arguments)
    make, shape = {"host": (host_kind, HOST_SHAPE), "cuda": (cuda_kind, CUDA_SHAPE)}[options.device]
    bench = Bench(make(shape.layers), shape)
    rows = run_checks(bench)
    bench.close()
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    text, status = summary(rows, options.device, options.require)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
