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

    `ratio` above 1 is better for us whatever the unit; `goal` is the ratio we want, 0 where there
    is none. Of the rounds it comes from: the least and the greatest ratio, how many counted, and
    `verdict`, "pass", "miss", "machine busy" (too many rounds were disturbed to tell), "reported"
    (there is no goal) or "" for a benchmark without rounds. `page_bytes`: the pages under our
    weights, 0 where that means nothing.
    """

    case: str
    ours: float
    rival: str
    rival_value: float
    unit: str
    ratio: float
    goal: float
    ratio_min: float = 0.0
    ratio_max: float = 0.0
    rounds_count: int = 0
    verdict: str = ""
    page_bytes: int = 0

    def text(self) -> str:
        """One line for people."""
        line = (
            f"{self.case}: {self.ours:.4g} {self.unit} against {self.rival} "
            f"{self.rival_value:.4g} {self.unit}, ratio {self.ratio:.3f}"
        )
        if self.rounds_count:
            line += f" ({self.ratio_min:.3f}..{self.ratio_max:.3f}, {self.rounds_count} rounds)"
        if self.page_bytes:
            line += f", pages of {self.page_bytes >> 10} KiB"
        if self.goal:
            line += f", goal {self.goal:g}"
        return f"{line}: {self.verdict}" if self.verdict else line


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


def result(rows: list[Row], notes: tuple[str, ...] = ()) -> dict[str, object]:
    """What goes into the JSON file. `notes`: versions of rivals, why one is missing, page sizes."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cpus_count": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "revision": _revision(),
        "notes": list(notes),
        "rows": [asdict(row) for row in rows],
    }


def write(rows: list[Row], path: Path | None, notes: tuple[str, ...] = ()) -> None:
    """Print the rows and notes; write the JSON file when one is asked for."""
    for row in rows:
        print(row.text())
    for note in notes:
        print(f"note: {note}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result(rows, notes), indent=1) + "\n", encoding="utf-8")
