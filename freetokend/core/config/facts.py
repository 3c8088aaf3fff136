"""What `resolve` may know of the machine, and the one place that asks the machine for it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freetokend.core.host_facts import (
    HostFiles,
    allowed_cpus,
    cpu_quota_count,
    nvidia_cards,
    nvidia_driver_version,
    physical_cores_count,
)
from freetokend.core.logs import stderr_is_journal
from freetokend.core.runtime_dir import default_runtime_dir

POOL_MOUNT: Final = "/run/freetoken_pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """Measured facts; a value that could not be read is None, never a guess.

    `allowed_cpus_count` and `physical_cores_count` count what the affinity mask leaves;
    `cpu_quota_count` is the cgroup's limit in whole CPUs. `nvidia_driver` is the version of a
    loaded kernel driver ("" without one), `nvidia_cards` the PCI addresses of GPUs.
    """

    runtime_dir: str
    runtime_dir_reason: str
    state_dir: str
    state_dir_reason: str
    working_dir: str
    home_dir: str
    stderr_is_journal: bool
    allowed_cpus_count: int
    physical_cores_count: int
    cpu_quota_count: float | None
    huge_tmpfs_dir: str | None
    nvidia_driver: str
    nvidia_cards: tuple[str, ...]


def gather_facts() -> EnvironmentFacts:
    """Reads environment, /proc, /sys and cgroup files; opens nothing else and starts nothing."""
    runtime_dir, runtime_reason = default_runtime_dir(os.environ, os.getuid())
    state_dir, state_reason = _default_state_dir(os.getuid())
    files, cpus = HostFiles(), allowed_cpus()
    return EnvironmentFacts(
        runtime_dir=runtime_dir,
        runtime_dir_reason=runtime_reason,
        state_dir=state_dir,
        state_dir_reason=state_reason,
        working_dir=os.getcwd(),
        home_dir=os.environ.get("HOME", "/"),
        stderr_is_journal=stderr_is_journal(os.environ.get("JOURNAL_STREAM", ""), sys.stderr),
        allowed_cpus_count=len(cpus),
        physical_cores_count=physical_cores_count(files, cpus),
        cpu_quota_count=cpu_quota_count(files),
        huge_tmpfs_dir=_huge_tmpfs_dir(POOL_MOUNT),
        nvidia_driver=nvidia_driver_version(files),
        nvidia_cards=tuple(card.pci_address for card in nvidia_cards(files)),
    )


def _default_state_dir(uid: int) -> tuple[str, str]:
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return given, "STATE_DIRECTORY of the service manager"
    if uid == 0:
        return "/var/lib/freetokend", "started by root"
    xdg = os.environ.get("XDG_STATE_HOME", "")
    if xdg.startswith("/"):
        return f"{xdg.rstrip('/')}/freetokend", "XDG_STATE_HOME of this user"
    home = os.environ.get("HOME", "")
    if home.startswith("/"):
        return f"{home.rstrip('/')}/.local/state/freetokend", "below this user's home directory"
    runtime_dir, _ = default_runtime_dir(os.environ, uid)
    return f"{runtime_dir}/state", "not root, and HOME is not set"


def _huge_tmpfs_dir(directory: str) -> str | None:
    """`directory` if a writable tmpfs with huge=advise (or always) is mounted on it."""
    try:
        text = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[1] == directory and fields[2] == "tmpfs":
            huge = {"huge=advise", "huge=always"} & set(fields[3].split(","))
            return directory if huge and os.access(directory, os.W_OK) else None
    return None
