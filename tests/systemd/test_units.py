"""The unit files under systemd's own checks; nothing is installed or started."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from freetokend.core.config.facts import POOL_MOUNT
from freetokend.core.errors import REACTIONS, Reason

UNITS = Path(__file__).parents[2] / "systemd"
SERVICE = UNITS / "freetokend.service"
MOUNT = UNITS / "run-freetoken_pool.mount"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    assert shutil.which(command[0]), f"{command[0]} is missing: install the package systemd"
    return subprocess.run(command, capture_output=True, text=True, check=False)


def settings(unit: Path) -> list[tuple[str, str]]:
    pairs = [line.partition("=") for line in unit.read_text().splitlines() if line[:1].isalpha()]
    return [(name, value) for name, _, value in pairs]


def setting(unit: Path, name: str) -> list[str]:
    return [value for key, value in settings(unit) if key == name]


@pytest.fixture
def verifiable(tmp_path: Path) -> Path:
    """The service with an ExecStart= that exists here: `verify` looks the program up."""
    program = tmp_path / "freetokend"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    text = SERVICE.read_text()
    assert "ExecStart=/usr/bin/freetokend\n" in text
    copy = tmp_path / SERVICE.name
    copy.write_text(text.replace("ExecStart=/usr/bin/freetokend\n", f"ExecStart={program}\n"))
    return copy


@pytest.mark.parametrize("unit", ["service", "mount"])
def test_systemd_accepts_every_directive(verifiable: Path, unit: str) -> None:
    path = verifiable if unit == "service" else MOUNT
    done = run("systemd-analyze", "verify", "--man=yes", str(path))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_wrong_directive_would_be_found(verifiable: Path) -> None:
    verifiable.write_text(verifiable.read_text() + "\nNoSuchDirective=1\n")
    done = run("systemd-analyze", "verify", "--man=no", str(verifiable))
    assert "NoSuchDirective" in done.stderr


def test_the_exposure_is_low(verifiable: Path) -> None:
    done = run(
        *("systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager"),
        str(verifiable),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout


@pytest.mark.parametrize("unit", [SERVICE, MOUNT], ids=lambda unit: unit.name)
def test_every_directive_has_a_reason_beside_it(unit: Path) -> None:
    """A comment above each block of directives, so that nobody has to guess."""
    explained = False
    for line in unit.read_text().splitlines():
        if line.startswith("#"):
            explained = True
        elif not line or line.startswith("["):
            explained = False
        else:
            plain = line.startswith(("Description=", "Documentation=", "What=", "WantedBy="))
            assert explained or plain, f"{unit.name}: {line} has no reason beside it"


def test_errors_that_a_restart_cannot_mend_prevent_it() -> None:
    prevented = {int(code) for code in setting(SERVICE, "RestartPreventExitStatus")[0].split()}
    hopeless = (
        Reason.CONFIG_INVALID,
        Reason.MODEL_INVALID,
        Reason.MODEL_UNSUPPORTED,
        Reason.INVALID_REQUEST,
    )
    assert prevented == {REACTIONS[reason].exit_code for reason in hopeless}
    for mendable in (
        Reason.INTERNAL,
        Reason.ENGINE_FAILED,
        Reason.IO_FAILED,
        Reason.HOST_MEMORY,
        Reason.ADDRESS_IN_USE,
    ):
        assert REACTIONS[mendable].exit_code not in prevented


def test_what_the_daemon_relies_on() -> None:
    assert setting(SERVICE, "Type") == ["notify"]
    assert setting(SERVICE, "LimitMEMLOCK") == ["infinity"]
    assert setting(SERVICE, "DeviceAllow") == ["char-nvidia* rw"]
    assert setting(SERVICE, "RuntimeDirectory") == ["freetokend"]
    assert setting(SERVICE, "RuntimeDirectoryMode") == ["0755"]
    assert int(setting(SERVICE, "WatchdogSec")[0]) > 0
    assert setting(SERVICE, "MemoryDenyWriteExecute") == []
    groups = setting(SERVICE, "SupplementaryGroups")
    assert groups[0] in (UNITS / "sysusers.d" / "freetokend.conf").read_text()


def test_the_mount_is_where_the_daemon_looks(tmp_path: Path) -> None:
    assert setting(MOUNT, "Where") == [POOL_MOUNT]
    escaped = run("systemd-escape", "--path", "--suffix=mount", POOL_MOUNT).stdout.strip()
    assert escaped == MOUNT.name
    assert f"-{POOL_MOUNT}" in setting(SERVICE, "ReadWritePaths")
    assert "huge=advise" in setting(MOUNT, "Options")[0].split(",")


def test_users_groups_and_directories_are_made(tmp_path: Path) -> None:
    """In a root directory of the test's own."""
    for kind in ("sysusers.d", "tmpfiles.d"):
        directory = tmp_path / "usr" / "lib" / kind
        directory.mkdir(parents=True)
        shutil.copy(UNITS / kind / "freetokend.conf", directory)
    (tmp_path / "etc").mkdir()
    done = run("systemd-sysusers", f"--root={tmp_path}")
    assert done.returncode == 0, done.stderr
    passwd = (tmp_path / "etc" / "passwd").read_text()
    uid = re.search(
        r"^freetokend:x:(\d+):(\d+):.*:/var/lib/freetokend:/usr/sbin/nologin$", passwd, re.M
    )
    assert uid is not None
    group = (tmp_path / "etc" / "group").read_text()
    assert re.search(r"^freetoken-admin:x:\d+:freetokend$", group, re.M)

    done = run("systemd-tmpfiles", "--create", f"--root={tmp_path}")
    assert done.returncode == 0, done.stderr
    models = (tmp_path / "var" / "lib" / "freetokend" / "models").stat()
    assert stat.S_IMODE(models.st_mode) == 0o750
    assert (models.st_uid, models.st_gid) == (int(uid[1]), int(uid[2]))
    assert (tmp_path / "etc" / "freetokend" / "freetokend.toml.d").is_dir()
