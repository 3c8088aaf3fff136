"""What the machine grants this process: memory, CPUs and what hangs on its PCI bus.

The one reader of these facts in /proc, /sys and the control groups, for both processes. A limit
may stand at any control group from our own up to the root, in version 2 and in version 1; the
tightest counts. Nothing is opened but those files, and nothing is decided here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freetokend.core.errors import Reason, ResourceError

# Version 1 writes "no limit" as the largest number of whole pages.
_NO_LIMIT_BYTES: Final = 1 << 62
_NVIDIA_VENDOR: Final = 0x10DE
_DISPLAY_CLASS: Final = 0x03


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFiles:
    """Where the kernel's files are; tests put recorded ones elsewhere."""

    proc: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    cpu_root: Path = Path("/sys/devices/system/cpu")
    pci_root: Path = Path("/sys/bus/pci/devices")
    node_root: Path = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What the machine allows this service to take now.

    mem_available_bytes: MemAvailable. cgroup_available_bytes: the tightest limit less usage on the
    way up, or None when there is no limit. cap_bytes: the configured cap on the pool, or None.
    """

    mem_available_bytes: int
    cgroup_available_bytes: int | None = None
    cap_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """A control group's memory: the limit that the kernel holds it to, and the usage that it could
    not drop at once."""

    limit_bytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        """What the group may still take."""
        return max(self.limit_bytes - self.used_bytes, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """The most CPUs this process gets at once, and why in words that follow "but"."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaCard:
    """A display controller of NVIDIA. `driver`: the kernel driver bound to it, "" for none."""

    pci_address: str
    driver: str


def read_host_memory(files: HostFiles, cap_bytes: int | None = None) -> HostMemory:
    """Memory that can be taken now; `cap_bytes` is handed through.

    Raises `ResourceError` when MemAvailable cannot be read: a guess could take the machine down.
    """
    available_bytes = meminfo_bytes(files).get("MemAvailable")
    if available_bytes is None:
        raise ResourceError(
            f"MemAvailable cannot be read from {files.proc / 'meminfo'}, so it is unknown how "
            "much memory may be used: make /proc visible to the service",
            reason=Reason.HOST_MEMORY,
        )
    group = group_memory(files)
    return HostMemory(
        mem_available_bytes=available_bytes,
        cgroup_available_bytes=None if group is None else group.left_bytes,
        cap_bytes=cap_bytes,
    )


def meminfo_bytes(files: HostFiles) -> dict[str, int]:
    """The sizes of /proc/meminfo by their names there; none when it cannot be read."""
    sizes = {}
    for line in _lines(files.proc / "meminfo"):
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            sizes[name] = int(words[0]) * 1024
    return sizes


def group_memory(files: HostFiles) -> GroupMemory | None:
    """Of the control groups from our own up to the root, the one that leaves least; None when none
    has a limit. Above memory.high the kernel does not kill but stops whoever allocates, and the
    weights cannot be dropped: it is as much a limit as memory.max."""
    groups = [
        memory
        for group in control_groups(files, "memory")
        if (memory := _memory_of(group)) is not None
    ]
    return min(groups, key=lambda memory: memory.left_bytes, default=None)


def allowed_cpus() -> tuple[int, ...]:
    """The CPUs of this process's affinity mask, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cores_of(files: HostFiles, cpus: Iterable[int]) -> dict[int, tuple[str, str]]:
    """(package, core) of each CPU whose topology is known."""
    cores = {}
    for cpu in cpus:
        topology = files.cpu_root / f"cpu{cpu}" / "topology"
        core, package = _text(topology / "core_id"), _text(topology / "physical_package_id")
        if core is not None and package is not None:
            cores[cpu] = (package, core)
    return cores


def physical_cores_count(files: HostFiles, cpus: Sequence[int]) -> int:
    """Distinct cores among `cpus`; a CPU without known topology counts as one."""
    known = cores_of(files, cpus)
    return len(set(known.values())) + sum(cpu not in known for cpu in cpus)


def numa_nodes(files: HostFiles, cpus: Iterable[int]) -> tuple[int, ...]:
    """The NUMA nodes of `cpus`, in order; none where the kernel tells of none."""
    wanted = set(cpus)
    try:
        names = [entry.name for entry in files.node_root.iterdir()]
    except OSError:
        return ()
    nodes = [int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal()]
    return tuple(
        node
        for node in sorted(nodes)
        if wanted.intersection(_cpu_list(_text(files.node_root / f"node{node}/cpulist") or ""))
    )


def cpu_quota_count(files: HostFiles) -> float | None:
    """The tightest CPU quota of the control groups, in CPUs; None without one."""
    quotas = [quota for group in control_groups(files, "cpu") if (quota := _quota_count(group))]
    return min(quotas, default=None)


def cpu_limit(allowed_count: int, quota_count: float | None) -> CpuLimit:
    """The affinity mask and the quota as one limit: the only place where they meet.

    A quota is rounded down, but to no less than 1: threads that together use more are all stopped
    for the rest of each period (0.1 s by default), which costs more than the fraction gives.
    """
    allowed_count = max(1, allowed_count)
    if quota_count is not None and max(1, math.floor(quota_count)) < allowed_count:
        return CpuLimit(
            count=max(1, math.floor(quota_count)),
            reason=f"the control group grants {quota_count:.3g} CPUs",
        )
    return CpuLimit(count=allowed_count, reason=f"this process may use {allowed_count} CPUs")


def cpu_name(files: HostFiles) -> str:
    """The processor's name for people."""
    for line in _lines(files.proc / "cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return os.uname().machine


def nvidia_cards(files: HostFiles) -> tuple[NvidiaCard, ...]:
    """NVIDIA's display controllers on the PCI bus, whether or not a driver knows them."""
    try:
        devices = sorted(files.pci_root.iterdir())
    except OSError:
        return ()
    return tuple(
        NvidiaCard(pci_address=device.name, driver=_driver_name(device))
        for device in devices
        if _hexadecimal(device / "vendor") == _NVIDIA_VENDOR
        and _hexadecimal(device / "class") >> 16 == _DISPLAY_CLASS
    )


def nvidia_driver_version(files: HostFiles) -> str:
    """The version of NVIDIA's loaded kernel driver, "" without one."""
    line = _text(files.proc / "driver/nvidia/version")
    if line is None:
        return ""
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun ..."
    versions = [word for word in line.split() if word[0].isdecimal() and "." in word]
    return versions[0] if versions else "unknown version"


def control_groups(files: HostFiles, controller: str) -> list[Path]:
    """This process's control groups for `controller`, each followed by its ancestors."""
    groups: list[Path] = []
    for line in _lines(files.proc / "self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            root = files.cgroup_root
        elif controller in controllers.split(","):
            root = files.cgroup_root / controller
        else:
            continue
        # A path with ".." lies outside of what this process sees: only the root of it is left.
        inside = path.strip().lstrip("/") if ".." not in path.split("/") else ""
        own = root / inside
        groups += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return groups


def _memory_of(group: Path) -> GroupMemory | None:
    limits = [_number(group / "memory.max"), _number(group / "memory.high")]
    used, cache_name = _number(group / "memory.current"), "inactive_file"
    if limits == [None, None] and used is None:
        limits = [_number(group / "memory.limit_in_bytes")]
        used, cache_name = _number(group / "memory.usage_in_bytes"), "total_inactive_file"
    limit = min((one for one in limits if one is not None), default=_NO_LIMIT_BYTES)
    if used is None or limit >= _NO_LIMIT_BYTES:
        return None
    reclaimable = 0
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == cache_name:
            reclaimable = int(value)
    return GroupMemory(limit_bytes=limit, used_bytes=max(used - reclaimable, 0))


def _quota_count(group: Path) -> float | None:
    fields = (_text(group / "cpu.max") or "").split()
    if not fields:
        version_1 = (_text(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        fields = [text for text in version_1 if text is not None]
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return None  # "max" in version 2, -1 in version 1
    return int(fields[0]) / max(int(fields[1]), 1)


def _cpu_list(text: str) -> Iterable[int]:
    """The kernel's "0-3,8"."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last if last.isdecimal() else first) + 1)


def _driver_name(device: Path) -> str:
    try:
        return (device / "driver").readlink().name
    except OSError:
        return ""


def _hexadecimal(path: Path) -> int:
    try:
        return int(_text(path) or "0", 16)
    except ValueError:
        return 0


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _text(path: Path) -> str | None:
    """The first line, stripped; None when it cannot be read."""
    lines = _lines(path)
    return lines[0].strip() if lines else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
