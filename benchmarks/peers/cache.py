"""Where rivals are fetched and built: a cache outside the repository, filled on demand."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class PeerUnavailableError(Exception):
    """A rival cannot be had here; the text says why and what would help."""


def cache_directory() -> Path:
    """FREETOKEND_PEERS, or freetokend/peers in the user's cache directory; created."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(os.environ.get("FREETOKEND_PEERS") or Path(base) / "freetokend" / "peers")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time builds the rival `name`."""
    with open(cache_directory() / f".{name}.lock", "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(
    command: Sequence[str | Path], what: str, *, environment: Mapping[str, str] | None = None
) -> str:
    """Run a step of a build; its output. Raises PeerUnavailableError with the last lines."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        raise PeerUnavailableError(f"{what}: cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise PeerUnavailableError(
            f"{what}: exit status {done.returncode} of {' '.join(map(str, command))}\n{tail}"
        )
    return done.stdout


def downloaded(requirement: str, pattern: str, *, source: bool) -> Path:
    """A distribution from the package index, kept; `pattern` is the glob of its file name.

    `source`: its source archive instead of a wheel. The archive's own build back end is not run.
    """
    directory = cache_directory() / "downloads"
    directory.mkdir(exist_ok=True)
    if found := sorted(directory.glob(pattern)):
        return found[-1]
    kind = "--no-binary=:all:" if source else "--only-binary=:all:"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind]
    run([*command, "--dest", directory, requirement], f"download of {requirement}")
    found = sorted(directory.glob(pattern))
    if not found:
        raise PeerUnavailableError(f"pip downloaded {requirement} but no {pattern}")
    return found[-1]


def _extract(tar: tarfile.TarFile, directory: Path) -> None:
    """All files below `directory`; refuses names that lead out of it."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(directory, filter="data")
        return
    # Python 3.11.2, which Debian 12 has, knows no filters
    inside = directory.resolve()
    for member in tar:
        if not (inside / member.name).resolve().is_relative_to(inside):
            raise PeerUnavailableError(f"{directory} is not where {member.name} would go: left out")
        if member.isfile() or member.isdir():
            tar.extract(member, directory)


def unpacked(archive: Path) -> Path:
    """The directory of a source archive's contents (its single top directory)."""
    target = cache_directory() / "sources"
    target.mkdir(exist_ok=True)
    top = target / archive.name.removesuffix(".tar.gz")
    if not top.exists():
        partial = target / f"{top.name}.partial"
        with tarfile.open(archive) as tar:
            _extract(tar, partial)
        (partial / top.name).rename(top)
        partial.rmdir()
    return top
