"""Arrows point down: the import contracts hold, would be noticed if not, and torch stays out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = ROOT / ".importlinter"

TORCH_FREE = (
    "daemon",
    "serving",
    "control",
    "link",
    "ctl",
    "ftw",
    "native",
    "core",
    "policy",
    "scripted",
    "demo",
    "api",
)

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), *sorted({"torch", "triton", "transformers"} & set(sys.modules)))
"""


# The finder of an editable install would find the checkout's own package first.
LINT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in `directory`, with nothing kept between runs."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--config", str(CONTRACTS), "--no-cache"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_contract_is_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/units.py", "import freetokend.policy"),
        ("serving/__init__.py", "import freetokend.control"),
        ("models/__init__.py", "import freetokend.kvcache"),
        ("ctl/main.py", "import freetokend.link"),
        ("control/__init__.py", "import freetokend.tensor"),
        ("link/__init__.py", "def late():\n    import freetokend.engine"),
        ("ftw/__init__.py", "import freetokend.api.control.v1.control_pb2"),
    ],
)
def test_an_arrow_up_or_sideways_is_found(tmp_path: Path, module: str, line: str) -> None:
    copy = tmp_path / "freetokend"
    shutil.copytree(
        ROOT / "freetokend", copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.npz")
    )
    with (copy / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Broken contracts" in done.stdout


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_module_of_the_control_process_loads_torch(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, f"freetokend.{package}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, *loaded = done.stdout.split()
    assert int(count) > 0
    assert loaded == []
