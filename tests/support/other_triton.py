"""Another version of Triton beside the installed one, fetched once per user for the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from freetokend.demo.wheels import default_cache_dir


def other_triton(version: str, root: Path | None = None) -> Path:
    """A directory to put first on the path of a process that is to work with this Triton.

    version: as "3.6": the newest of that line. root: instead of the user's cache. The first call
    fetches about 190 MB and takes 650 MB of disk. AssertionError, in a sentence, when the package
    cannot be had.
    """
    root = default_cache_dir() / "tests" if root is None else root
    # A wheel is for one version of Python.
    directory = root / f"triton-{version}-{sys.implementation.cache_tag}"
    if not directory.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _fetch(version, directory)
    os.utime(directory)  # what is used is not removed with what is old
    return directory


def _fetch(version: str, directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        made = Path(folder) / "site"
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--no-compile"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(made)]
        command.append(f"triton=={version}.*")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        told = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        assert done.returncode == 0, (
            f"Triton {version} cannot be had from the package index: {told.rstrip('.')}. This test "
            f"needs the network once; afterwards the package lies in {directory}."
        )
        made.rename(directory)
