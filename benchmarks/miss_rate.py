"""How often experts are missing: our cache against LRU, two placements and Belady's optimum.

usage: python -m benchmarks.miss_rate [--quick] [--json FILE] [--png FILE] [--trace FILE ...]

Replays identical traces (see `benchmarks.routing_cases`) at 5 to 100 % of the experts and at sizes
around one step's demand, layers x experts per token. Misses are distinct experts per layer of
decode steps that are not on the device, in percent of those needed. Exit code 1 when a gate fails:

- ours never misses more than a plain LRU;
- from 1.5 times a step's demand up to 75 % of the experts both placements miss at least 1.3 times
  as much as ours, below that the static one at least as much;
- on drawn traces the plain LRU misses what is published, within the tolerance.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.result import Row, write
from benchmarks.routing_cases import SYNTHETIC, Published, recorded_trace
from freetokend.traces.compare import Comparison, TraceComparison, slots_at, step_demand, table
from freetokend.traces.trace import RoutingTrace
from freetokend.traces.trace_file import read_trace

CAPACITIES: Final = (0.05, 0.11, 0.2, 0.3, 0.37, 0.5, 0.625, 0.75, 0.9, 1.0)
QUICK_CAPACITIES: Final = (0.05, 0.11, 0.37, 0.75)
# Sizes around the demand of one step, where a global LRU begins to hit.
DEMANDS: Final = (0.5, 1.0, 1.5)
AHEAD: Final = 1.3
AHEAD_UP_TO: Final = 0.75
LEAST_DEMAND: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trace; published figures where there are some."""

    name: str
    trace: RoutingTrace
    published: Published | None = None


@dataclass(kw_only=True)
class Outcome:
    """What was found for one case."""

    case: Case
    found: list[Comparison]
    failures: list[str] = field(default_factory=list)


def cases(files: Sequence[Path]) -> Iterator[Case]:
    """The traces given, else the recorded one and the drawn ones; made one at a time."""
    for file in files:
        yield Case(name=file.name, trace=read_trace(file))
    if not files:
        yield Case(name="demo model, recorded", trace=recorded_trace())
        for one in SYNTHETIC:
            yield Case(name=one.name, trace=one.trace(), published=one.published)


def sizes(case: Case, *, quick: bool) -> list[int]:
    """Numbers of slots to try, ascending."""
    shape = case.trace.shape
    ratios = QUICK_CAPACITIES if quick else CAPACITIES
    wanted = {slots_at(shape, ratio) for ratio in ratios}
    wanted |= {round(times * step_demand(shape)) for times in DEMANDS}
    return sorted(slots for slots in wanted if 1 <= slots <= shape.experts_count)


def failures(case: Case, one: Comparison) -> Iterator[str]:
    """The gates that this size fails."""
    where = f"{case.name} at {100 * one.capacity_ratio:.1f} %"
    if one.ours > one.lru:
        yield f"{where}: ours misses {one.ours:.4f}, LRU {one.lru:.4f}"
    if one.slots_count < LEAST_DEMAND * step_demand(case.trace.shape):
        if one.ours > one.static:
            yield f"{where}: ours misses {one.ours:.4f}, static {one.static:.4f}"
    elif one.capacity_ratio <= AHEAD_UP_TO:
        for name, rival in (("placement", one.placement), ("static", one.static)):
            if rival < AHEAD * one.ours:
                yield f"{where}: {name} misses {_times(rival, one.ours):.2f} times as much as ours"


def fit_failures(case: Case, found: Sequence[Comparison]) -> Iterator[str]:
    """Says where a drawn trace is not what it is said to be."""
    published = case.published
    if published is not None:
        one = _at_published(case, found)
        if abs(one.lru - published.lru) > published.lru_tolerance:
            yield f"{case.name}: LRU misses {one.lru:.3f}, to be {published.lru:.2f}"


def _at_published(case: Case, found: Sequence[Comparison]) -> Comparison:
    if case.published is None:
        raise ValueError(f"nothing is published about {case.name}")
    slots_count = slots_at(case.trace.shape, case.published.capacity_ratio)
    return next(one for one in found if one.slots_count == slots_count)


def _times(rival: float, ours: float) -> float:
    return rival / ours if ours else (1.0 if rival == 0 else 1e9)


def rows(case: Case, one: Comparison) -> Iterator[Row]:
    """One row per rival."""
    large = one.slots_count >= LEAST_DEMAND * step_demand(case.trace.shape)
    ahead = AHEAD if large and one.capacity_ratio <= AHEAD_UP_TO else 0.0
    goals = {"lru": 1.0, "placement": ahead, "static": ahead if large else 1.0, "optimum": 0.0}
    for rival, goal in goals.items():
        value = float(getattr(one, rival))
        ratio = _times(value, one.ours)
        yield Row(
            case=f"{case.name} {one.slots_count} slots",
            ours=100 * one.ours,
            rival=rival,
            rival_value=100 * value,
            unit="% missing",
            ratio=ratio,
            goal=goal,
            verdict="reported" if goal == 0 else "pass" if ratio >= goal else "miss",
        )


def replayed(case: Case, *, quick: bool) -> Outcome:
    """Replay one case at every size and print its table."""
    shape = case.trace.shape
    comparison = TraceComparison(case.trace)
    found = [comparison.at(slots) for slots in sizes(case, quick=quick)]
    print(
        f"\n{case.name} ({case.trace.source or 'drawn'}): {shape.experts_count} experts, "
        f"{step_demand(shape)} needed in a step of one token; misses in percent\n"
    )
    print(table(found), flush=True)
    if case.published is not None:
        one, published = _at_published(case, found), case.published
        print(
            f"at {100 * published.capacity_ratio:.0f} %, here and published: "
            f"LRU {100 * one.lru:.1f} and {100 * published.lru:.0f} (fitted); predicted: "
            f"placement {100 * one.placement:.1f} and {100 * published.placement:.0f}, "
            f"static {100 * one.static:.1f} and {100 * published.static:.0f}"
        )
    outcome = Outcome(case=case, found=found)
    for one in found:
        outcome.failures += failures(case, one)
    outcome.failures += fit_failures(case, found)
    return outcome


def draw(outcomes: Sequence[Outcome], path: Path) -> str:
    """Write the picture; returns what to tell about it."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return "no picture: matplotlib is not installed; `pip install matplotlib` and run again."
    figure, axes = pyplot.subplots(
        1, len(outcomes), figsize=(6 * len(outcomes), 4.5), squeeze=False, layout="constrained"
    )
    styles = {"static": ":", "placement": "-.", "lru": "--", "ours": "-", "optimum": "-"}
    for axis, outcome in zip(axes[0], outcomes, strict=True):
        at = [100 * one.capacity_ratio for one in outcome.found]
        for name, style in styles.items():
            values = [100 * getattr(one, name) for one in outcome.found]
            axis.plot(at, values, style, label=name, linewidth=2 if name == "ours" else 1.3)
        axis.set_title(outcome.case.name)
        axis.set_xlabel("slots, % of all experts")
        axis.set_ylim(0, 100)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("experts missing in decode, %")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"picture: {path}"


def main() -> int:
    """Replay, print, draw; 1 when a gate fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--png", type=Path, metavar="FILE", default=Path("miss_rate.png"))
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    options = parser.parse_args()
    outcomes = [replayed(case, quick=options.quick) for case in cases(options.trace)]
    found = [
        row for outcome in outcomes for one in outcome.found for row in rows(outcome.case, one)
    ]
    print()
    write(found, options.json, (draw(outcomes, options.png),))
    failed = [text for outcome in outcomes for text in outcome.failures]
    print("\n" + ("\n".join(f"gate failed: {text}" for text in failed) or "all gates pass"))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
