"""Prints one table from the JSON files that the benchmarks write.

usage: python benchmarks/report.py FILE...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

_COLUMNS: Final = ("case", "ours", "rival", "rival_value", "unit", "ratio", "goal")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of one result file. Raises ValueError naming the file when it is none."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(set(_COLUMNS) <= set(row) for row in rows):
        raise ValueError(f"{path} is not a benchmark result: it needs rows with {_COLUMNS}")
    return rows


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text; `ratio` above 1 is better for us, whatever the unit."""
    lines = [_COLUMNS, *(tuple(_cell(row[column]) for column in _COLUMNS) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main() -> int:
    """Print the table; exit status 1 for a file that is no result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    try:
        print(table([row for path in arguments.files for row in rows_of(path)]))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
