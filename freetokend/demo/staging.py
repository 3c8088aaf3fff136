"""A directory that appears whole or not at all: written beside its place, synced, then renamed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PARTIAL_SUFFIX = ".partial"


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` to write in; removed afterwards unless it was renamed.

    It is locked while its writer lives, so that the next one can tell the leftovers of a writer
    that was killed (1.4 GB each) from the work of one that is running.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}."
    for leftover in target.parent.glob(f"{prefix}*{_PARTIAL_SUFFIX}"):
        _remove_if_abandoned(leftover)
    staging = Path(tempfile.mkdtemp(prefix=prefix, suffix=_PARTIAL_SUFFIX, dir=target.parent))
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # mkdtemp makes it private to its owner; the finished model is for the service user too.
        staging.chmod(0o755)
        yield staging
    finally:
        os.close(descriptor)
        shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, target: Path) -> None:
    """Rename into place, durably. Replaces an empty directory; any other one is an OSError."""
    sync_directory(staging)
    staging.rename(target)
    sync_directory(target.parent)


def write_synced(path: Path, text: str) -> None:
    """Create a text file and fsync it."""
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_abandoned(staging: Path) -> None:
    try:
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # its writer has just renamed or removed it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # in use
    else:
        shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(descriptor)
