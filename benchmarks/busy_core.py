"""Speed with busy neighbours: 0, 1 and 2 loops of equal priority on the cores of our threads.

usage: python -m benchmarks.busy_core [--quick] [--json FILE] [--format mxfp4]

The loops are children of this process: the same session, niceness and control group, each pinned
to one core of the workers. With as many loops as threads a fair share is 0.5. Threads that wait
for each other by spinning get far less: a thread that has lost its core keeps all others waiting.
The rival is ggml with as many threads, in the same run. A round is 0, 1 and 2 loops in turn, ours
and the rival alternating in each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.layer_rivals import rivals_of
from benchmarks.layer_shape import QWEN3
from benchmarks.memory import PoolBank
from benchmarks.our_layer import OurLayer
from benchmarks.result import Row, write
from benchmarks.rounds import Burst, CallSide, Side, foreground, is_busy, verdict
from freetokend.ftw.formats import parse_format
from freetokend.native.executor import Executor

THREADS_COUNT: Final = 2
# Of our undisturbed speed, with a loop on each core.
GOAL: Final = 0.4
OURS: Final = "ours"
_LOOP: Final = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass\n"


@contextmanager
def busy_loops(cpus: Sequence[int]) -> Iterator[None]:
    """A loop on each of the cpus."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP, str(cpu)]) for cpu in cpus]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def measure(
    sides: Sequence[Side], cpus: Sequence[int], rounds_count: int, burst_s: float
) -> dict[str, list[list[Burst]]]:
    """By side: per round the bursts with 0, 1 and 2 loops."""
    rates: dict[str, list[list[Burst]]] = {side.name: [] for side in sides}
    for side in sides:
        side.burst(burst_s / 3)
    for _ in range(rounds_count):
        found: dict[str, list[Burst]] = {side.name: [] for side in sides}
        for count in range(THREADS_COUNT + 1):
            with busy_loops(cpus[:count]):
                for side in sides:
                    side.burst(burst_s / 3)  # the scheduler takes a moment to settle
                    found[side.name].append(side.burst(burst_s))
        for side in sides:
            rates[side.name].append(found[side.name])
    return rates


def rows_of(bursts: dict[str, list[list[Burst]]], case: str, page_bytes: int) -> list[Row]:
    """What each side keeps, against its own undisturbed speed; "machine busy" where others were
    there besides our loops."""
    rows = []
    for name, played in bursts.items():
        busy = is_busy([round_[0] for round_ in played])
        rounds = [[burst.rate for burst in round_] for round_ in played]
        for count in range(1, THREADS_COUNT + 1):
            kept = [found[count] / found[0] for found in rounds]
            goal = GOAL if name == OURS and count == THREADS_COUNT else 0.0
            rows.append(
                Row(
                    case=f"{case}, {name} beside {count} busy loops",
                    ours=statistics.median(found[count] for found in rounds),
                    rival=f"{name} undisturbed",
                    rival_value=statistics.median(found[0] for found in rounds),
                    unit="layers/s",
                    ratio=statistics.median(kept),
                    goal=goal,
                    ratio_min=min(kept),
                    ratio_max=max(kept),
                    rounds_count=len(kept),
                    verdict=verdict(kept, goal, busy=busy),
                    page_bytes=page_bytes if name == OURS else 0,
                )
            )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short bursts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--format", default="int4_g32_f16")
    parser.add_argument("--first", action="store_true", help="before other sessions; needs root")
    options = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[:THREADS_COUNT]
    if len(cpus) < THREADS_COUNT:
        parser.error(f"{THREADS_COUNT} cpus are needed, there is one")
    weight_format = parse_format(options.format)
    layer = OurLayer(QWEN3, weight_format)
    with (
        Executor(cpus) as executor,
        PoolBank(layer.bank_bytes) as bank,
        rivals_of(weight_format, cpus, len(cpus), isa="auto", programs=("ggml",)) as rivals,
    ):
        layer.fill(bank)
        layer.check(executor, bank, 1)
        sides: list[Side] = [CallSide(OURS, layer.call(executor, bank, 1), 1.0, len(cpus))]
        sides += [rival.child for rival in rivals.batch(1)[:1]]
        with foreground(options.first):
            rates = measure(sides, cpus, 7, 0.3 if options.quick else 0.6)
        rows = rows_of(rates, f"layer {weight_format} 1 token", bank.page_bytes)
        write(rows, options.json, tuple(rivals.notes))


if __name__ == "__main__":
    main()
