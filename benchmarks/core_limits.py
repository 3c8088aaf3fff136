"""What bounds the layer with one token: cycles of the kernels, and the rate at which cores read.

usage: python -m benchmarks.core_limits [--quick] [--first] [--formats bf16,mxfp4]
                                        [--numerics exact] [--ceilings 20,30] [--json FILE]

One core each: dependent additions, which are one a cycle and tell the clock; independent ones and
multiply-adds, which tell how wide the core is at that moment; 1, 2 and 4 streams of reads; the
clearing of new pages. Then every format's kernel with one thread, from the second-level cache and
from memory. A core's share of the read ceiling of all cores sets the cycles in which 64 weights
arrive; those that the kernel takes (from the cache, or from memory where that was less) set the
share of the ceiling that is possible: min(1, arrival / kernel). It is a calculation: that a core
computes on while it waits for memory is assumed, so more is not possible and less may be. The
ceiling is the median of all those of the run that come within 85 % of the best; --ceilings also
tells the shares of others, such as were measured beside a layer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks import layer_goals
from benchmarks.core_sides import (
    CLEARING,
    CLOCK,
    FMA,
    STREAMS,
    WIDTH,
    ClearingSide,
    Core,
    Weights,
    cache_bytes,
    stream_name,
)
from benchmarks.expert_layer import FORMATS
from benchmarks.memory import CEILING_BYTES, CeilingSide, HugeMemory
from benchmarks.our_layer import Numerics
from benchmarks.peers.cache import PeerUnavailableError
from benchmarks.result import Row, write
from benchmarks.rounds import (
    LEAST_CEILING_SHARE,
    Outcome,
    Plan,
    Side,
    foreground,
    play,
)
from freetokend.ftw.formats import WeightFormat, parse_format
from freetokend.native.affinity import pinned_thread
from freetokend.native.executor import Executor
from freetokend.native.host import HUGE_PAGE_BYTES

FROM_CACHE: Final = "from the second-level cache"
FROM_MEMORY: Final = "from memory"
KERNEL: Final = "at the better of both"
SHARE: Final = "a core's share of the read ceiling"
ARRIVAL: Final = "arrival at a core's"
CYCLES: Final = "cycles for 64 weights"
REACHABLE: Final = "reachable"
OUT_OF_REACH: Final = "out of reach"
# So many times the last-level cache is certain to miss it.
_LAST_LEVELS: Final = 4
_LEAST_MEMORY_BYTES: Final = 256 << 20
_CLEARED_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One side of a comparison, per round."""

    name: str
    values: Sequence[float]


def row_of(
    ours: Measure,
    rival: Measure,
    unit: str,
    ratios: Sequence[float],
    *,
    busy: bool,
    goal: float = 0.0,
    page_bytes: int = 0,
) -> Row:
    """Medians of the rounds, and whether the calculation allows the goal."""
    ratio = statistics.median(ratios)
    found = REACHABLE if ratio >= goal else OUT_OF_REACH
    return Row(
        case=ours.name,
        ours=statistics.median(ours.values),
        rival=rival.name,
        rival_value=statistics.median(rival.values),
        unit=unit,
        ratio=ratio,
        goal=goal,
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        rounds_count=len(ratios),
        verdict="machine busy" if busy else found if goal else "reported",
        page_bytes=page_bytes,
    )


def core_rows(outcome: Outcome, share_rate: float) -> list[Row]:
    """Clock, width and streams; share_rate: a core's share of the ceiling, bytes/s."""
    gigahertz = [hertz / 1e9 for hertz in outcome.rates(CLOCK)]
    unit = Measure(name="1 GHz", values=[1.0])
    clock = Measure(name="clock", values=gigahertz)
    streams = [_read_row(stream_name(count), outcome, share_rate) for count in STREAMS]
    return [
        row_of(clock, unit, "GHz", gigahertz, busy=outcome.busy),
        per_cycle_row(WIDTH, WIDTH, outcome),
        per_cycle_row(FMA, FMA, outcome),
        *streams,
    ]


def clearing_row(outcome: Outcome, share_rate: float, page_bytes: int) -> Row:
    """New pages of one thread."""
    return replace(_read_row(CLEARING, outcome, share_rate), page_bytes=page_bytes)


def _read_row(name: str, outcome: Outcome, share_rate: float) -> Row:
    ours = Measure(name=name, values=[rate / 1e9 for rate in outcome.rates(name)])
    share = Measure(name=SHARE, values=[share_rate / 1e9])
    shares = [rate / share_rate for rate in outcome.rates(name)]
    return row_of(ours, share, "GB/s", shares, busy=outcome.busy)


def steady_rate(ceilings: Sequence[float]) -> float:
    """The median of those that count as undisturbed."""
    best = max(ceilings)
    return statistics.median(rate for rate in ceilings if rate >= LEAST_CEILING_SHARE * best)


def per_cycle_row(case: str, side: str, outcome: Outcome) -> Row:
    """A side's operations in a cycle."""
    clock = outcome.rates(CLOCK)
    found = Measure(name=case, values=ratios(outcome.rates(side), clock))
    one = Measure(name=CLOCK, values=[1.0] * len(clock))
    return row_of(found, one, "a cycle", found.values, busy=outcome.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A format's kernel."""

    weight_format: WeightFormat
    numerics: Numerics
    bytes_per_64: float

    @property
    def goal(self) -> float:
        """The layer's share of the read ceiling with one token."""
        return layer_goals.Case(
            kind=self.weight_format.kind,
            fast=self.numerics == "fast",
            held_to_avx2=False,
            tokens=1,
            page_bytes=HUGE_PAGE_BYTES,
        ).ceiling_goal()

    def rows(self, outcome: Outcome, share_rates: Sequence[float], page_bytes: int) -> list[Row]:
        """What memory costs one core, the width meanwhile, and the shares that are possible.

        share_rates: a core's shares of the ceilings, bytes/s; a row for each.
        """
        clock = outcome.rates(CLOCK)

        def cycles(name: str) -> list[float]:
            return [64 * hertz for hertz in ratios(clock, outcome.rates(name))]

        name = f"{self.weight_format} {self.numerics}"
        cached = Measure(name=f"{name} {FROM_CACHE}", values=cycles(FROM_CACHE))
        cold = Measure(name=f"{name} {FROM_MEMORY}, one core", values=cycles(FROM_MEMORY))
        kept = ratios(cached.values, cold.values)
        # What a kernel takes from memory it does not exceed by itself.
        least = [min(pair) for pair in zip(cached.values, cold.values, strict=True)]
        kernel = Measure(name=f"{name} {KERNEL}", values=least)
        rows = [
            row_of(cold, cached, CYCLES, kept, busy=outcome.busy, page_bytes=page_bytes),
            per_cycle_row(f"{name}: {WIDTH} meanwhile", WIDTH, outcome),
        ]
        for rate in share_rates:
            arrival = Measure(
                name=f"{ARRIVAL} {rate / 1e9:.1f} GB/s",
                values=[self.bytes_per_64 * hertz / rate for hertz in clock],
            )
            possible = [min(1.0, ratio) for ratio in ratios(arrival.values, least)]
            rows.append(
                row_of(kernel, arrival, CYCLES, possible, busy=outcome.busy, goal=self.goal)
            )
        return rows


def table(rows: Sequence[Row], ceilings: Sequence[float]) -> str:
    """The kernels, a line each: cycles for 64 weights, and the shares of the ceilings (bytes/s)
    that they allow."""
    shares = [f"possible of {ceiling / 1e9:.1f} GB/s" for ceiling in ceilings]
    names = ["kernel", "goal", "additions", "from memory", "from cache", "arrival", *shares]
    lines = [names, ["---"] * len(names)]
    for index, cold in enumerate(rows):
        if not cold.rival.endswith(FROM_CACHE):
            continue
        width, *kernels = rows[index + 1 : index + 2 + len(ceilings)]
        first = kernels[0]
        lines.append(
            [
                cold.rival.removesuffix(f" {FROM_CACHE}"),
                f"{first.goal:g}" if first.goal else "-",
                *(f"{value:.1f}" for value in (width.ours, cold.ours, cold.rival_value)),
                f"{first.rival_value:.1f}",
                *(f"{row.ratio:.2f} ({row.ratio_min:.2f}..{row.ratio_max:.2f})" for row in kernels),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Bench:
    """What all cases share; `executor` has one thread, `readers` all cores."""

    def __init__(self, executor: Executor, readers: Executor, *, quick: bool, first: bool) -> None:
        self._executor = executor
        self._core = Core()
        self._plan = Plan(burst_s=0.02, ceiling_s=0.05) if quick else Plan(burst_s=0.1)
        self._first = first
        self._ceiling_memory = HugeMemory(CEILING_BYTES)
        self._ceiling = CeilingSide(readers, self._ceiling_memory)
        self._ceilings: list[float] = []
        self._threads_count = readers.threads_count
        size = max(_LEAST_MEMORY_BYTES, _LAST_LEVELS * cache_bytes(0))
        self._weights_memory = HugeMemory(size)
        self._found: list[Callable[[Sequence[float]], list[Row]]] = []
        self.notes: list[str] = []

    def core(self) -> None:
        """Width, streams, clearing."""
        streams = [self._core.reads(self._ceiling_memory, count) for count in STREAMS]
        outcome = self._play("core", [*self._additions(), self._core.fma(), *streams])
        side = ClearingSide(_CLEARED_BYTES)
        cleared = self._play(CLEARING, [side])
        self._found.append(
            lambda shares: [
                *core_rows(outcome, shares[0]),
                clearing_row(cleared, shares[0], side.page_bytes),
            ]
        )

    def format(self, weight_format: WeightFormat, numerics: Numerics) -> None:
        """One kernel, both ways."""
        if numerics == "fast" and not self._executor.has_fast(str(weight_format)):
            self.notes.append(f"{weight_format}: no int8 activations on {self._executor.isa}")
            return
        weights = Weights(weight_format, numerics)
        case = KernelCase(
            weight_format=weight_format, numerics=numerics, bytes_per_64=weights.bytes_per_64
        )
        sides = [
            *self._additions(),
            weights.in_cache(self._executor, cache_bytes(2), FROM_CACHE),
            weights.in_memory(self._executor, self._weights_memory, FROM_MEMORY),
        ]
        outcome = self._play(f"{weight_format} {numerics}", sides)
        page_bytes = self._weights_memory.page_bytes
        self._found.append(lambda shares: case.rows(outcome, shares, page_bytes))

    def ceiling_rate(self) -> float:
        """Of the whole run, bytes/s."""
        rate = steady_rate(self._ceilings)
        self.notes.append(
            f"read ceiling {rate / 1e9:.1f} GB/s with {self._threads_count} threads, from "
            f"{min(self._ceilings) / 1e9:.1f} to {max(self._ceilings) / 1e9:.1f}"
        )
        return rate

    def rows(self, ceilings: Sequence[float]) -> list[Row]:
        """All that was found, by these ceilings."""
        shares = [rate / self._threads_count for rate in ceilings]
        return [row for found in self._found for row in found(shares)]

    def _additions(self) -> list[Side]:
        return [self._core.additions(CLOCK), self._core.additions(WIDTH)]

    def _play(self, name: str, sides: Sequence[Side]) -> Outcome:
        with foreground(self._first):
            outcome = play(sides, self._ceiling, self._plan)
        self._ceilings += outcome.rates(CeilingSide.name)
        print(f"  {name}: {outcome.disturbance()}", flush=True)
        return outcome


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round."""
    return [mine / other for mine, other in zip(ours, others, strict=True)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="short bursts")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    arguments.add_argument(
        "--formats", type=_formats, default=_formats(",".join(FORMATS)), help="none: only the core"
    )
    arguments.add_argument("--numerics", choices=("exact", "fast"), default="exact")
    arguments.add_argument(
        "--ceilings", type=_rates, default=[], help="such as 20,30: GB/s of other runs"
    )
    arguments.add_argument("--cpus", default="", help="such as 0,1; default: all allowed ones")
    arguments.add_argument("--isa", default="auto")
    arguments.add_argument("--first", action="store_true", help="before other sessions; needs root")
    return arguments


def _formats(names: str) -> list[WeightFormat]:
    return [] if names == "none" else [parse_format(name) for name in names.split(",")]


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError("ceilings are above 0 GB/s")
    return rates


def main() -> int:
    """Measure and print; exit status 1 where the machine lacks what that needs."""
    options = parser().parse_args()
    chosen = [int(cpu) for cpu in options.cpus.split(",") if cpu]
    cpus = chosen or sorted(os.sched_getaffinity(0))
    with (
        pinned_thread(cpus[0]),
        Executor(cpus[:1], isa=options.isa) as executor,
        Executor(cpus, isa=options.isa) as readers,
    ):
        try:
            bench = Bench(executor, readers, quick=options.quick, first=options.first)
        except (PeerUnavailableError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        bench.core()
        for weight_format in options.formats:
            bench.format(weight_format, options.numerics)
    ceilings = [bench.ceiling_rate(), *(1e9 * rate for rate in options.ceilings)]
    rows = bench.rows(ceilings)
    write(rows, options.json, tuple(bench.notes))
    print(table(rows, ceilings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
