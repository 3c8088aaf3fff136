"""Runs named scenarios one by one in this process and tells how each ended, as JSON.

For code that needs a library loaded that the test process must not have.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping


def run_scenarios(scenarios: Mapping[str, Callable[[], None]]) -> int:
    """Print one line {"name", "failure"} for each; failure is "" or a traceback."""
    for name, scenario in scenarios.items():
        failure = ""
        try:
            scenario()
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps({"name": name, "failure": failure}), flush=True)
    return 0


def read_results(output: str) -> dict[str, str]:
    """Name -> failure; a scenario that took the process down is missing."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["name"]: row["failure"] for row in rows}
