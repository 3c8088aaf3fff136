"""The order of sweeps and their copies, over the fake libcuda."""

from __future__ import annotations

import pytest

from tests.device.scenarios_on_fake import read_results
from tests.experts.gpu.sweep_scenarios import SCENARIOS
from tests.fakes.libcuda import build_fake_libcuda, run_with_fake


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All scenarios in one process that finds the fake; name -> failure."""
    library = build_fake_libcuda(tmp_path_factory.mktemp("libcuda"))
    finished = run_with_fake(library, "tests.experts.gpu.sweep_scenarios")
    told = read_results(finished.stdout)
    assert finished.returncode == 0, f"after {len(told)} scenarios: {finished.stderr[-2000:]}"
    return told


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_fake(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]
