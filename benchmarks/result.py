"""The one shape of a benchmark result: rows, the machine, the revision."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison of ours with a rival or a ceiling from the same run.

    `ratio` above 1 is better for us whatever the unit; `goal` is the ratio we want.
    """

    case: str
    ours: float
    rival: str
    rival_value: float
    unit: str
    ratio: float
    goal: float


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _revision() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here, as in an unpacked source archive
        return "unknown"
    return done.stdout.strip() or "unknown"


def result(rows: list[Row]) -> dict[str, object]:
    """What goes into the JSON file."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cpus_count": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "revision": _revision(),
        "rows": [asdict(row) for row in rows],
    }


def write(rows: list[Row], path: Path | None) -> None:
    """Print the rows; write the JSON file when one is asked for."""
    for row in rows:
        print(
            f"{row.case}: {row.ours:.4g} {row.unit} against {row.rival} {row.rival_value:.4g} "
            f"{row.unit}, ratio {row.ratio:.3f} (goal {row.goal:g})"
        )
    if path is not None:
        path.write_text(json.dumps(result(rows), indent=1) + "\n", encoding="utf-8")
