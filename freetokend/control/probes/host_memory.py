"""The memory of the host and of our control groups, from meminfo and the groups' files."""

from __future__ import annotations

from freetokend.control.probes.ports import MemoryReading, ProbeError
from freetokend.core.host_facts import HostFiles, group_memory, meminfo_bytes


class HostMemoryProbe:
    """A `MemoryProbe`. What a group uses is counted without what the kernel could drop at once."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def read(self) -> MemoryReading:
        """See `MemoryProbe`."""
        sizes = meminfo_bytes(self._files)
        missing = [name for name in ("MemTotal", "MemAvailable") if name not in sizes]
        if missing:
            raise ProbeError(
                f"{self._files.proc / 'meminfo'} does not tell {' and '.join(missing)}: make /proc "
                "visible to the service"
            )
        group = group_memory(self._files)
        return MemoryReading(
            mem_total_bytes=sizes["MemTotal"],
            mem_available_bytes=sizes["MemAvailable"],
            cgroup_limit_bytes=None if group is None else group.limit_bytes,
            cgroup_used_bytes=None if group is None else group.used_bytes,
        )
