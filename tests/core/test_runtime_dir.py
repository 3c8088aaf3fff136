"""A daemon and its client must find the same directory."""

from __future__ import annotations

import pytest

from freetokend.core.runtime_dir import client_runtime_dirs, default_runtime_dir


@pytest.mark.parametrize(
    ("environ", "uid", "directory"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/x"}, 7, "/run/a"),
        ({"XDG_RUNTIME_DIR": "/run/user/7/"}, 7, "/run/user/7/freetokend"),
        ({"XDG_RUNTIME_DIR": "relative"}, 0, "/run/freetokend"),
        ({}, 0, "/run/freetokend"),
        ({}, 7, "/tmp/freetokend-7"),
        ({"TMPDIR": "/var/tmp/"}, 7, "/var/tmp/freetokend-7"),
        ({"TMPDIR": "here"}, 7, "/tmp/freetokend-7"),
    ],
)
def test_directory_of_a_daemon(environ: dict[str, str], uid: int, directory: str) -> None:
    found, reason = default_runtime_dir(environ, uid)
    assert found == directory
    assert reason
    assert client_runtime_dirs(environ, uid)[0] == directory


def test_a_client_also_looks_for_the_system_daemon() -> None:
    assert client_runtime_dirs({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == (
        "/run/user/7/freetokend",
        "/run/freetokend",
        "/tmp/freetokend-7",
    )
    assert client_runtime_dirs({}, 0) == ("/run/freetokend", "/tmp/freetokend-0")
