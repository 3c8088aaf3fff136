"""Preflight: refuse before the first byte is fetched what cannot be written in the end."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from freetokend.demo.errors import DemoError, SourceError


def check_writable(directory: Path) -> None:
    """Raise DemoError unless files can be made in `directory`, which need not exist yet."""
    existing = _nearest_existing(directory)
    if not existing.is_dir():
        raise DemoError(
            f"cannot write to {directory}: {existing} is not a directory; "
            "choose another place with --out and --work."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DemoError(
            f"cannot write to {directory}: user {os.geteuid()} may not write in {existing}; change "
            "its permissions or choose another place with --out and --work."
        )


def check_disk_space(needed_bytes: Iterable[tuple[Path, int]]) -> None:
    """Raise SourceError when a file system lacks room for what is to be written on it.

    `needed_bytes` is per directory, existing or not; directories on one file system add up.
    """
    needed_on: defaultdict[int, int] = defaultdict(int)
    directory_on: dict[int, Path] = {}
    for directory, needed in needed_bytes:
        existing = _nearest_existing(directory)
        device = existing.stat().st_dev
        needed_on[device] += needed
        directory_on.setdefault(device, existing)
    for device, directory in directory_on.items():
        free = shutil.disk_usage(directory).free
        if free < needed_on[device]:
            raise SourceError(
                f"not enough disk space at {directory}: the build needs "
                f"{needed_on[device] / 1e6:.0f} MB and {free / 1e6:.0f} MB are free; free some "
                "space or choose another place with --out and --work."
            )


def _nearest_existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
