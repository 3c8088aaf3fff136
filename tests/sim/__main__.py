"""Runs the simulation: python -m tests.sim [--seeds N] [--first SEED] [--jobs N]

Each run is the seed's alone: the same seed on the same revision is the same run. Seeds that fail
are printed with the revision and added to tests/sim/failed_seeds.txt.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.sim.run import simulate
from tests.sim.seeds import FAILED_SEEDS


def revision() -> str:
    """Of the working tree, "-dirty" where it differs from it."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()


def main() -> int:
    """0: every seed held."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    failed: list[int] = []
    reached_s: list[float] = []
    with ProcessPoolExecutor(max_workers=arguments.jobs) as pool:
        for verdict in pool.map(simulate, seeds, chunksize=4):
            if verdict.violations:
                failed.append(verdict.seed)
                print(f"seed {verdict.seed} at {revision()}: {verdict.violations[0]}", flush=True)
                print(f"  faults: {', '.join(verdict.faults)}", flush=True)
            elif verdict.reached_s is not None:
                reached_s.append(verdict.reached_s)
    if failed:
        with FAILED_SEEDS.open("a", encoding="utf-8") as file:
            file.writelines(f"{seed}\n" for seed in failed)
    print(
        f"{len(seeds)} seeds at {revision()}: {len(failed)} failed; the target was reached within "
        f"{max(reached_s, default=0):.0f} s of calm"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
