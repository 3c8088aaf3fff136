"""The newcomer's command, run as a newcomer runs it; the model is a tiny one of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_checkpoints import write_tiny_mixtral

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def quickstart(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "packaging/quickstart.sh"), *arguments],
        env={**os.environ, "FREETOKEND_QUICKSTART": str(work)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A short directory (Unix socket paths are limited); whatever still runs there is stopped."""
    directory = Path("/tmp") / f"ftk-qs-{os.getpid()}"
    yield directory
    quickstart(directory, "--stop")
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "0"], "1 to 65535"),
        (["--port", "http"], "1 to 65535"),
        (["--port"], "--port needs a number"),
        (["--model", "/nowhere/at/all"], "there is no such directory"),
        (["--wat"], "unknown argument: --wat"),
    ],
)
def test_wrong_arguments_are_one_clear_sentence(
    work: Path, arguments: list[str], words: str
) -> None:
    done = quickstart(work, *arguments)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_stop_without_a_daemon_says_so(work: Path) -> None:
    done = quickstart(work, "--stop")
    assert done.returncode == 0
    assert "was not running" in done.stderr


def test_a_pid_file_of_a_daemon_long_gone_is_no_noise(work: Path) -> None:
    work.mkdir()
    (work / "freetokend.pid").write_text("999999999\n")
    done = quickstart(work, "--stop")
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["== freetokend was not running"]


@pytest.mark.slow
def test_from_a_checkpoint_to_an_answer_and_a_stop(work: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "tiny-model"
    write_tiny_mixtral(checkpoint)
    port = free_port()
    arguments = ("--model", str(checkpoint), "--port", str(port))

    first = quickstart(work, *arguments)
    assert first.returncode == 0, first.stderr
    assert "Converting" in first.stderr
    assert "time to first token" in first.stdout
    assert "tiny-model" in first.stdout
    assert "--stop" in first.stdout
    pid = int((work / "freetokend.pid").read_text())

    second = quickstart(work, *arguments)
    assert second.returncode == 0, second.stderr
    assert f"already running (pid {pid})" in second.stderr
    assert "time to first token" in second.stdout

    # a run that cannot succeed leaves the daemon that serves alone
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken_port = other.getsockname()[1]
        taken = quickstart(work, "--model", str(checkpoint), "--port", str(taken_port))
    assert taken.returncode == 1
    assert f"port {taken_port} on 127.0.0.1 is taken" in taken.stderr
    assert Path(f"/proc/{pid}").exists()

    stopped = quickstart(work, "--stop")
    assert "has stopped" in stopped.stderr
    assert not Path(f"/proc/{pid}").exists()
