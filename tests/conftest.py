"""What every test area shares: the --full switch and the CPU-seconds per area."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

AREA_CPU_KEY = pytest.StashKey[defaultdict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="also run long fuzzing and the larger matrices"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[AREA_CPU_KEY] = defaultdict(float)
    # Deadlines measure the machine's other load, not our code. Examples come from a fixed seed
    # per test, so that a run that was green stays green; --full looks at new ones.
    settings.register_profile(
        "freetokend",
        deadline=None,
        derandomize=not config.getoption("--full"),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("freetokend")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `full` in the ordinary run, so that none counts as skipped."""
    if config.getoption("--full"):
        return
    chosen = [item for item in items if item.get_closest_marker("full") is None]
    left_out = [item for item in items if item.get_closest_marker("full") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before_s = _cpu_s()
    try:
        return (yield)
    finally:
        area = Path(item.nodeid.split("::")[0]).parts
        name = area[1] if len(area) > 2 else "tests"
        item.config.stash[AREA_CPU_KEY][name] += _cpu_s() - before_s


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    spent = config.stash[AREA_CPU_KEY]
    if not spent:
        return
    terminalreporter.section("CPU-seconds per area")
    for name, seconds in sorted(spent.items(), key=lambda entry: -entry[1]):
        terminalreporter.write_line(f"{name:<14} {seconds:8.1f}")
    terminalreporter.write_line(f"{'all':<14} {sum(spent.values()):8.1f}")
