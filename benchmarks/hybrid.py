"""The split of missing experts between fills and the CPU, judged by a declared device clock.

usage: python -m benchmarks.hybrid [--quick] [--json FILE]

The host device's slots, link and executor share their cores, so its wall clock cannot judge a
split. Both branches run for real here, through the engine's cache, and every result is compared
with that of the pool alone, bit by bit; how long a layer takes is charged by `DeviceClock`: times
printed are the clock's, not this machine's. Cells: 1, 4 and 16 tokens in a step; link to CPU rates
1:4 to 2:1; with and without contention for memory; with empty slots (256 experts, 8 per token,
every q of every call tried), and on the trace recorded from the demo model with slots for 37 % (a
replay with every constant q, and with every eighth of the misses). Exit code 1 when a gate fails:

- results are those of the pool;
- the table's q takes at most 3 % longer than the best q, in every cell;
- at equal rates without contention the split is at least 1.2 times as fast as the better single
  path, filling everything or leaving everything to the CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.cached_bank import RandomBank
from benchmarks.device_clock import DeviceClock
from benchmarks.result import Row, write
from benchmarks.routing_cases import recorded_trace
from benchmarks.split_cases import (
    COLD_SHAPE,
    WARM_STEPS,
    Call,
    FillTable,
    cold_calls,
    constant_table,
    recorded_steps,
    replayed_calls,
    share_table,
)
from freetokend.native.executor import Executor
from freetokend.policy.fill_table import fill_table
from freetokend.traces.trace import TraceShape

TOKENS: Final = (1, 4, 16)
# Link by CPU.
RATE_RATIOS: Final = (("1:4", 0.25), ("1:2", 0.5), ("1:1", 1.0), ("2:1", 2.0))
# The declared device: experts of Qwen3.6-35B-A3B in 4 bits, memory of a desktop, of an RTX 5090.
RECORD_BYTES: Final = 1_769_472
CPU_BYTES_PER_S: Final = 40e9
SLOT_BYTES_PER_S: Final = 1790e9
FILL_FIXED_S: Final = 5e-6
CPU_FIXED_S: Final = 5e-6
TABLE_LIMIT: Final = 1.03
AHEAD: Final = 1.2
EIGHTHS: Final = tuple(part / 8 for part in range(1, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Seconds per layer, by the clock."""

    case: str
    table_s: float
    best_s: float
    best_name: str
    fill_only_s: float
    cpu_only_s: float
    judged_ahead: bool

    @property
    def single_s(self) -> float:
        return min(self.fill_only_s, self.cpu_only_s)


def clock(link_by_cpu: float, *, contention: bool) -> DeviceClock:
    """The declared device with this link."""
    return DeviceClock(
        record_bytes=RECORD_BYTES,
        link_bytes_per_s=link_by_cpu * CPU_BYTES_PER_S,
        cpu_bytes_per_s=CPU_BYTES_PER_S,
        slot_bytes_per_s=SLOT_BYTES_PER_S,
        fill_fixed_s=FILL_FIXED_S,
        cpu_fixed_s=CPU_FIXED_S,
        contention=contention,
    )


def clocks() -> Iterator[tuple[str, DeviceClock, bool]]:
    """All devices, and whether the split is judged against the single paths there."""
    for contention in (False, True):
        for name, ratio in RATE_RATIOS:
            label = f"{name}, contention {'residual' if contention else 'off'}"
            yield label, clock(ratio, contention=contention), ratio == 1.0 and not contention


def charged_s(device: DeviceClock, calls: Sequence[Call]) -> float:
    """Seconds per layer."""
    return statistics.fmean(device.layer_s(call.load) for call in calls)


def cold_cells(calls: Sequence[Sequence[Call]], tokens_count: int) -> Iterator[Cell]:
    """calls[i][q]. The best q is that of each call."""
    for label, device, judged in clocks():
        table = fill_table(device.rates(), COLD_SHAPE.experts_per_layer)
        chosen, best = [], []
        for by_fills in calls:
            misses = by_fills[0].load.misses_count
            row = table[min(by_fills[0].bucket, len(table) - 1)]
            chosen.append(by_fills[row[misses]])
            best.append(min(by_fills, key=lambda call: device.layer_s(call.load)))
        q = statistics.fmean(call.load.fills_count for call in best)
        m = statistics.fmean(call.load.misses_count for call in best)
        yield Cell(
            case=f"cold, {tokens_count} tokens, {label}",
            table_s=charged_s(device, chosen),
            best_s=charged_s(device, best),
            best_name=f"q = {q:.1f} of {m:.1f}",
            fill_only_s=charged_s(device, [by_fills[-1] for by_fills in calls]),
            cpu_only_s=charged_s(device, [by_fills[0] for by_fills in calls]),
            judged_ahead=judged,
        )


def rivals(experts_count: int) -> dict[str, FillTable]:
    """Every constant q and every eighth; the last one fills everything."""
    tables: dict[str, FillTable] = {
        f"q = {fills}": constant_table(fills, experts_count) for fills in range(1, experts_count)
    }
    tables |= {f"q = {share:g} m": share_table(share, experts_count) for share in EIGHTHS}
    return tables


def recorded_cells(
    replay: Callable[[FillTable | None], list[Call]], shape: TraceShape, tokens_count: int
) -> Iterator[Cell]:
    """Every replay goes its own way: what is filled now is there later."""
    played = {name: replay(table) for name, table in rivals(shape.experts_per_layer).items()}
    cpu_only = replay(None)
    by_table: dict[FillTable, list[Call]] = {}
    for label, device, judged in clocks():
        table = fill_table(device.rates(), shape.experts_per_layer)
        if table not in by_table:
            by_table[table] = replay(table)
        costs = {name: charged_s(device, calls) for name, calls in played.items()}
        table_s = charged_s(device, by_table[table])
        best = min(costs, key=lambda name: costs[name])
        yield Cell(
            case=f"recorded, {tokens_count} tokens, {label}",
            table_s=table_s,
            best_s=min(costs[best], table_s),
            best_name=best,
            fill_only_s=costs[f"q = {EIGHTHS[-1]:g} m"],
            cpu_only_s=charged_s(device, cpu_only),
            judged_ahead=judged,
        )


def measured_cells(*, quick: bool) -> Iterator[Cell]:
    """All cells; the banks have the smallest experts there can be."""
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    tokens = TOKENS[:2] if quick else TOKENS
    calls_count, steps_count = (4, 32) if quick else (8, 96)
    with Executor(cpus) as executor:
        with _small_bank(COLD_SHAPE) as bank:
            for tokens_count in tokens:
                calls = cold_calls(bank, executor, tokens_count, calls_count)
                yield from cold_cells(calls, tokens_count)
        with _small_bank(recorded_trace().shape) as bank:
            for tokens_count in tokens:
                steps = recorded_steps(tokens_count, WARM_STEPS + steps_count)

                def replay(
                    table: FillTable | None, steps: list[NDArray[np.uint16]] = steps
                ) -> list[Call]:
                    return replayed_calls(bank, executor, steps, table)

                yield from recorded_cells(replay, bank.routing, tokens_count)


def _small_bank(shape: TraceShape) -> RandomBank:
    return RandomBank(shape, hidden_size=64, intermediate_size=32, weight_format="int4_g32_f16")


def rows(cell: Cell) -> Iterator[Row]:
    """The table against the best q, and beside the single paths."""
    paths = (
        (f"best ({cell.best_name})", cell.best_s, 1 / TABLE_LIMIT),
        ("fill only", cell.fill_only_s, AHEAD if cell.judged_ahead else 0.0),
        ("CPU only", cell.cpu_only_s, AHEAD if cell.judged_ahead else 0.0),
    )
    for rival, value, goal in paths:
        ratio = value / cell.table_s
        yield Row(
            case=cell.case,
            ours=1e6 * cell.table_s,
            rival=rival,
            rival_value=1e6 * value,
            unit="us a layer by the clock",
            ratio=ratio,
            goal=goal,
            verdict="reported" if not goal else "pass" if ratio >= goal else "miss",
        )


def main() -> int:
    """Run, charge, print; 1 when a gate fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cells and steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    cells = list(measured_cells(quick=options.quick))
    found = [row for cell in cells for row in rows(cell)]
    note = (
        f"device clock: records of {RECORD_BYTES} bytes, CPU {CPU_BYTES_PER_S / 1e9:g} GB/s, slots "
        f"{SLOT_BYTES_PER_S / 1e9:g} GB/s, {1e6 * FILL_FIXED_S:g} us before the first fill and "
        f"{1e6 * CPU_FIXED_S:g} us before the CPU begins; every result equal to the pool's"
    )
    write(found, options.json, (note,))
    failed = [f"{one.case} against {one.rival}" for one in found if one.verdict == "miss"]
    print("\n" + ("\n".join(f"gate failed: {text}" for text in failed) or "all gates pass"))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
