"""What `resolve` may know of the machine, and the one place that asks the machine for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from freetokend.core.logs import stderr_is_journal
from freetokend.core.runtime_dir import default_runtime_dir

POOL_MOUNT: Final = "/run/freetoken_pool"

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """Measured facts; a value that could not be read is None, never a guess.

    `allowed_cpus_count` and `physical_cores_count` count what the affinity mask leaves;
    `cpu_quota_count` is the cgroup's limit in whole CPUs. `nvidia_driver` is the version of a
    loaded kernel driver ("" without one).
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
    memory_total_bytes: int | None
    memory_limit_bytes: int | None
    huge_tmpfs_dir: str | None
    nvidia_driver: str


def gather_facts() -> EnvironmentFacts:
    """Reads environment, /proc, /sys and cgroup files; opens nothing else and starts nothing."""
    runtime_dir, runtime_reason = default_runtime_dir(os.environ, os.getuid())
    state_dir, state_reason = _default_state_dir(os.getuid())
    cpus = sorted(os.sched_getaffinity(0))
    cgroups = list(_own_cgroups())
    return EnvironmentFacts(
        runtime_dir=runtime_dir,
        runtime_dir_reason=runtime_reason,
        state_dir=state_dir,
        state_dir_reason=state_reason,
        working_dir=os.getcwd(),
        home_dir=os.environ.get("HOME", "/"),
        stderr_is_journal=stderr_is_journal(os.environ.get("JOURNAL_STREAM", ""), sys.stderr),
        allowed_cpus_count=len(cpus),
        physical_cores_count=_physical_cores(cpus),
        cpu_quota_count=_smallest(_quota(_first_line(path / "cpu.max")) for path in cgroups),
        memory_total_bytes=_memory_total_bytes(),
        memory_limit_bytes=_smallest(_limit(_first_line(path / "memory.max")) for path in cgroups),
        huge_tmpfs_dir=_huge_tmpfs_dir(POOL_MOUNT),
        nvidia_driver=_nvidia_driver(),
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


def _first_line(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return None


def _physical_cores(cpus: Iterable[int]) -> int:
    """Distinct (package, core) pairs among `cpus`; a CPU without topology counts as a core."""
    cores: set[tuple[str, str]] = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        core = _first_line(topology / "core_id")
        package = _first_line(topology / "physical_package_id")
        known = core is not None and package is not None
        cores.add((str(package), str(core)) if known else ("cpu", str(cpu)))
    return len(cores)


def _memory_total_bytes() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    for line in text.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _own_cgroups() -> Iterable[Path]:
    """This process's cgroup v2 directory and its ancestors: a limit may stand at any of them."""
    root = Path("/sys/fs/cgroup")
    try:
        text = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        if line.startswith("0::/"):
            own = root / line.removeprefix("0::/")
            yield own
            yield from (path for path in own.parents if path.is_relative_to(root))


def _limit(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _quota(text: str | None) -> float | None:
    fields = (text or "").split()
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return None
    return int(fields[0]) / max(1, int(fields[1]))


def _smallest(values: Iterable[_Number | None]) -> _Number | None:
    return min((value for value in values if value is not None), default=None)


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


def _nvidia_driver() -> str:
    line = _first_line(Path("/proc/driver/nvidia/version"))
    if line is None:
        return ""
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun ..."
    versions = [word for word in line.split() if word[0].isdecimal() and "." in word]
    return versions[0] if versions else "unknown version"
