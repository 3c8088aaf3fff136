"""What the machine grants this process: memory and CPUs, from /proc, /sys and the cgroup."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from freetokend.core.errors import Reason, ResourceError
from freetokend.policy.memory import HostMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFiles:
    """Where the kernel's files are; tests put recorded ones elsewhere."""

    proc: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    cpu_root: Path = Path("/sys/devices/system/cpu")

    def cgroups(self) -> tuple[Path, ...]:
        """This process's cgroup (v2) and its ancestors: a limit may stand at any of them."""
        for line in _lines(self.proc / "self/cgroup"):
            if line.startswith("0::/"):
                own = self.cgroup_root / line.removeprefix("0::/").strip()
                return (own, *(one for one in own.parents if one.is_relative_to(self.cgroup_root)))
        return ()


def host_memory(files: HostFiles) -> HostMemory:
    """Memory that can be taken now. Raises ResourceError when MemAvailable cannot be read: a
    guess could take the machine down."""
    available_bytes = None
    for line in _lines(files.proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            available_bytes = int(line.split()[1]) * 1024
    if available_bytes is None:
        raise ResourceError(
            "MemAvailable cannot be read from /proc/meminfo, so it is unknown what may be used. "
            "Make /proc visible to the service.",
            reason=Reason.HOST_MEMORY,
        )
    left = [
        one for one in (_cgroup_left_bytes(path) for path in files.cgroups()) if one is not None
    ]
    return HostMemory(
        mem_available_bytes=available_bytes, cgroup_available_bytes=min(left, default=None)
    )


def _cgroup_left_bytes(path: Path) -> int | None:
    limit, used = _number(path / "memory.max"), _number(path / "memory.current")
    if limit is None or used is None:
        return None
    reclaimable = 0
    for line in _lines(path / "memory.stat"):
        if line.startswith("inactive_file "):
            reclaimable = int(line.split()[1])
    return max(limit - max(used - reclaimable, 0), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoice:
    """The CPUs that the executor's threads are bound to, and why so many."""

    cpus: tuple[int, ...]
    reason: str


def choose_cpus(
    allowed: Sequence[int],
    core_of: Mapping[int, tuple[str, str]],
    quota_count: float | None,
    asked_count: int,
) -> CpuChoice:
    """One CPU per physical core first, then their siblings; never more than is allowed.

    `asked_count` 0: one thread per physical core. `core_of`: (package, core) of a CPU.
    """
    seen: set[tuple[str, str]] = set()
    first: list[int] = []
    siblings: list[int] = []
    for cpu in sorted(allowed):
        core = core_of.get(cpu, ("cpu", str(cpu)))
        (siblings if core in seen else first).append(cpu)
        seen.add(core)
    limit = len(first) + len(siblings)
    limit_reason = f"{limit} CPUs are allowed"
    if quota_count is not None and max(1, math.ceil(quota_count)) < limit:
        limit = max(1, math.ceil(quota_count))
        limit_reason = f"the control group grants {quota_count:.3g} CPUs"
    wanted = asked_count or len(first)
    reason = f"{asked_count} were asked for" if asked_count else "one per physical core"
    if wanted > limit:
        wanted, reason = limit, f"{reason}, but {limit_reason}"
    return CpuChoice(cpus=tuple((first + siblings)[:wanted]), reason=reason)


def read_cpu_choice(files: HostFiles, asked_count: int) -> CpuChoice:
    """`choose_cpus` with what this process may use now."""
    allowed = sorted(os.sched_getaffinity(0))
    quotas = [one for one in (_quota_count(path) for path in files.cgroups()) if one is not None]
    core_of = {cpu: core for cpu in allowed if (core := _core(files, cpu)) is not None}
    return choose_cpus(allowed, core_of, min(quotas, default=None), asked_count)


def cpu_name(files: HostFiles) -> str:
    """The processor's name for people."""
    for line in _lines(files.proc / "cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return os.uname().machine


def _core(files: HostFiles, cpu: int) -> tuple[str, str] | None:
    topology = files.cpu_root / f"cpu{cpu}" / "topology"
    core, package = _text(topology / "core_id"), _text(topology / "physical_package_id")
    return None if core is None or package is None else (package, core)


def _quota_count(path: Path) -> float | None:
    fields = (_text(path / "cpu.max") or "").split()
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return None
    return int(fields[0]) / max(int(fields[1]), 1)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _text(path: Path) -> str | None:
    lines = list(_lines(path))
    return lines[0].strip() if lines else None


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
