"""Where the sockets lie, who may use them, and what earlier daemons leave behind."""

from __future__ import annotations

import grp
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from freetokend.control import ControlPlane, serve_control
from freetokend.control.sockets import SocketPlace, is_listened_on, prepare_directory
from freetokend.core.errors import ConfigError, UnavailableError
from tests.control.fakes import FakeGateway, FakeOperations, config, facts


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def sockets_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.is_socket()]


async def test_modes_are_the_roles_whatever_the_umask(runtime_dir: Path) -> None:
    former = os.umask(0o077)
    try:
        plane = await serve_control(
            gateway=FakeGateway(),
            config=config(runtime_dir),
            facts=facts(),
            operations=FakeOperations(),
            version="1",
        )
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(former)
    assert mode(runtime_dir / "admin.sock") == 0o660
    assert mode(runtime_dir / "monitor.sock") == 0o666
    await plane.stop(0.0)
    assert sockets_in(runtime_dir) == []


def test_a_socket_is_closed_to_others_until_it_has_its_group_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "s"
    place = SocketPlace(str(path), mode=0o660)
    place.claim()
    seen: list[int] = []
    with socket.socket(socket.AF_UNIX) as server:

        def bind() -> None:
            server.bind(str(path))
            seen.append(mode(path))

        place.bind(bind)
    assert seen == [0o600]
    assert mode(path) == 0o660
    place.release()
    place.release()
    assert not path.exists()


def test_the_admin_group_owns_the_socket(tmp_path: Path) -> None:
    # A group that this process may give files to: any of its own.
    group = grp.getgrgid(os.getgid())
    path = tmp_path / "s"
    place = SocketPlace(str(path), mode=0o660, group=group.gr_name)
    place.claim()
    with socket.socket(socket.AF_UNIX) as server:
        place.bind(lambda: server.bind(str(path)))
    assert path.stat().st_gid == group.gr_gid
    place.release()


def test_an_unknown_group_is_named_and_nobody_gets_in(tmp_path: Path) -> None:
    path = tmp_path / "s"
    place = SocketPlace(str(path), mode=0o660, group="no-such-group")
    place.claim()
    with (
        socket.socket(socket.AF_UNIX) as server,
        pytest.raises(ConfigError, match='"no-such-group" does not exist') as caught,
    ):
        place.bind(lambda: server.bind(str(path)))
    assert caught.value.param == "control.admin_group"
    assert mode(path) == 0o600
    place.release()
    assert not path.exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert not is_listened_on(str(path))
    place = SocketPlace(str(path), mode=0o600)
    place.claim()
    assert not path.exists()
    place.release()


def test_a_listener_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(UnavailableError, match="another freetokend is running"):
            SocketPlace(str(path), mode=0o600).claim()
        assert is_listened_on(str(path))


def test_what_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    place = SocketPlace(str(path), mode=0o600)
    with pytest.raises(ConfigError, match="it is not a socket"):
        place.claim()
    assert path.read_text() == "precious"


async def test_a_second_daemon_is_refused_and_the_first_goes_on(
    plane: ControlPlane, runtime_dir: Path
) -> None:
    with pytest.raises(UnavailableError, match=r"listens on .*admin\.sock"):
        await serve_control(
            gateway=FakeGateway(),
            config=config(runtime_dir),
            facts=facts(),
            operations=FakeOperations(),
            version="2",
        )
    assert is_listened_on(str(runtime_dir / "admin.sock"))
    assert is_listened_on(str(runtime_dir / "monitor.sock"))


KILLED_DAEMON = """
import asyncio, os, sys
from pathlib import Path
from tests.control.fakes import FakeGateway, FakeOperations, config, facts
from freetokend.control import serve_control

async def main():
    await serve_control(gateway=FakeGateway(), config=config(Path(sys.argv[1])), facts=facts(),
                        operations=FakeOperations(), version="1")
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.fixture
def left_behind(runtime_dir: Path) -> Path:
    """A runtime directory in which a daemon was killed."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_DAEMON, str(runtime_dir)], capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr.decode()
    assert sockets_in(runtime_dir) != []
    return runtime_dir


async def test_a_daemon_starts_after_one_that_was_killed(left_behind: Path) -> None:
    plane = await serve_control(
        gateway=FakeGateway(),
        config=config(left_behind),
        facts=facts(),
        operations=FakeOperations(),
        version="1",
    )
    assert is_listened_on(str(left_behind / "admin.sock"))
    await plane.stop(0.0)


def test_the_directory_is_open_for_monitors_but_private_in_tmp(tmp_path: Path) -> None:
    former = os.umask(0o022)
    try:
        prepare_directory(str(tmp_path / "a" / "run"))
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        prepare_directory(str(shared / "run"))
    finally:
        os.umask(former)
    assert mode(tmp_path / "a" / "run") == 0o755
    assert mode(shared / "run") == 0o700


def test_a_directory_that_others_control_is_refused(tmp_path: Path) -> None:
    everybody = tmp_path / "everybody"
    everybody.mkdir()
    everybody.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    for path, why in ((everybody, "everybody may write"), (link, "not a directory")):
        with pytest.raises(ConfigError, match=why):
            prepare_directory(str(path))
    with pytest.raises(ConfigError, match="cannot be made"):
        prepare_directory(str(file / "below"))
