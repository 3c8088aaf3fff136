"""Which socket is used, and what is said when there is none."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from freetokend.control import ControlPlane
from freetokend.core.errors import AccessError, Reason, UnavailableError
from freetokend.ctl import connection
from freetokend.ctl.connection import candidates, find_socket
from tests.ctl.conftest import Ctl


def test_candidates_in_order() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/t"}
    own = f"/t/freetokend-{os.getuid()}"
    assert candidates(None, environ, admin=False) == [
        "/run/user/7/freetokend/admin.sock",
        "/run/user/7/freetokend/monitor.sock",
        "/run/freetokend/admin.sock",
        "/run/freetokend/monitor.sock",
        f"{own}/admin.sock",
        f"{own}/monitor.sock",
    ]
    assert candidates(None, environ, admin=True) == [
        "/run/user/7/freetokend/admin.sock",
        "/run/freetokend/admin.sock",
        f"{own}/admin.sock",
    ]


def test_a_named_socket_is_the_only_one() -> None:
    environ = {"FREETOKEN_SOCKET": "unix:/a", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert candidates(None, environ, admin=True) == ["/a"]
    assert candidates("/b", environ, admin=False) == ["/b"]


def test_the_first_that_answers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.delenv("FREETOKEN_SOCKET", raising=False)
    directory = tmp_path / "freetokend"
    directory.mkdir()
    with (
        socket.socket(socket.AF_UNIX) as dead,
        socket.socket(socket.AF_UNIX) as monitor,
    ):
        dead.bind(str(directory / "admin.sock"))  # left behind: nobody listens
        monitor.bind(str(directory / "monitor.sock"))
        monitor.listen()
        assert find_socket(None) == str(directory / "monitor.sock")


def test_a_socket_that_denies_is_an_access_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root is never denied: answer as the kernel answers a user outside the group.
    monkeypatch.setattr(connection, "_connect_problem", lambda path: errno.EACCES)
    path = tmp_path / "admin.sock"
    path.touch(mode=0o660)
    os.chown(path, -1, os.getgid())
    with pytest.raises(AccessError, match="Use sudo") as caught:
        find_socket(str(path), admin=True)
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert "may not steer" in caught.value.message


def test_no_daemon_is_one_sentence_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        find_socket(str(tmp_path / "none.sock"))
    assert f"nobody listens on {tmp_path}/none.sock. Start it with" in caught.value.message
    with pytest.raises(UnavailableError):
        find_socket("/" + "x" * 200)  # longer than a socket's path can be


@pytest.mark.parametrize("verb", [["status"], ["top"], ["drain"], ["stop"], ["config", "show"]])
async def test_every_verb_says_that_no_daemon_runs(ctl: Ctl, verb: list[str]) -> None:
    done = await ctl(*verb, FREETOKEN_SOCKET="/nonexistent/admin.sock")
    assert done.code == 69
    assert done.out == ""
    assert done.err.startswith("freetokenctl: freetokend is not running: nobody listens on")
    assert done.err.count("\n") == 1


async def test_the_socket_is_found_from_the_environment(
    plane: ControlPlane, ctl: Ctl, runtime_dir: Path
) -> None:
    assert (await ctl("status")).code == 0
    named = f"unix:{runtime_dir}/monitor.sock"
    assert (await ctl("status", FREETOKEN_SOCKET=named, XDG_RUNTIME_DIR="/x")).code == 0
    assert (await ctl("--socket", f"{runtime_dir}/monitor.sock", "status")).code == 0


async def test_a_listener_that_is_no_daemon_does_not_hang_us(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    path = tmp_path / "s"

    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(garbage, path)
    done = await ctl("--socket", str(path), "status")
    assert done.code in (69, 75)
    assert "Traceback" not in done.err
    server.close()
