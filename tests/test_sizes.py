"""Files and functions stay short enough to be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
AREAS = ("freetokend", "tests", "benchmarks")
MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 70
# Made by the compiler of protocol buffers.
GENERATED = ROOT / "freetokend" / "api"


def too_long(name: str, source: str) -> Iterator[str]:
    """What of a file is too long."""
    lines_count = len(source.splitlines())
    if lines_count > MOST_FILE_LINES:
        yield f"{name} has {lines_count} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MOST_FUNCTION_LINES:
                yield f"{name}: {node.name} has {count} lines"


def test_files_and_functions_are_short() -> None:
    files = [
        path
        for area in AREAS
        for path in sorted((ROOT / area).rglob("*.py"))
        if not path.is_relative_to(GENERATED)
    ]
    assert len(files) > 100
    found = [
        one for path in files for one in too_long(str(path.relative_to(ROOT)), path.read_text())
    ]
    assert found == []


def test_what_is_too_long_is_found() -> None:
    function = "async def long():\n" + "    pass\n" * MOST_FUNCTION_LINES
    assert list(too_long("a", function)) == [f"a: long has {MOST_FUNCTION_LINES + 1} lines"]
    assert list(too_long("a", function.removesuffix("    pass\n"))) == []
    assert list(too_long("b", "\n" * (MOST_FILE_LINES + 1))) == [
        f"b has {MOST_FILE_LINES + 1} lines"
    ]
