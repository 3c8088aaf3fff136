"""What a probe is to those who read it. Each has an adapter to the machine and a scripted fake."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from freetokend.policy.readings import GpuReading, PressureReading


class ProbeError(Exception):
    """A probe could not read; it never leaves the set of probes, which makes a fault of it.

    The text is what, why and what to do. `is_absent`: there is nothing to read on this machine,
    which is no fault. `is_new`: False for a failure that was told before and not tried again.
    """

    def __init__(self, text: str, *, is_absent: bool = False, is_new: bool = True) -> None:
        super().__init__(text)
        self.is_absent = is_absent
        self.is_new = is_new


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The memory part of a `HostReading`."""

    mem_total_bytes: int
    mem_available_bytes: int
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureReadings:
    """The pressure part of a `HostReading`; None each where the kernel does not measure it."""

    memory: PressureReading | None = None
    cpu: PressureReading | None = None
    io: PressureReading | None = None


class GpuProbe(Protocol):
    """One GPU. May block for as long as the driver likes: call it in a thread of its own."""

    def read(self, own_pids: Collection[int], device: str = "") -> GpuReading:
        """The GPU now; a lost one is a reading too. `device`: a UUID or an index, which the
        driver counts from 0; empty: the one GPU there is.

        `own_pids` are those of this service that may hold memory of the GPU. Raises `ProbeError`.
        """

    def close(self) -> None:
        """Let go of the driver; idempotent."""


class MemoryProbe(Protocol):
    """The memory of the host and of our control groups."""

    def read(self) -> MemoryReading:
        """The memory now. Raises `ProbeError`."""


class PressureProbe(Protocol):
    """Pressure stall information."""

    def read(self) -> PressureReadings:
        """The pressure now. Raises `ProbeError` for what cannot be understood."""


class CpuLoadProbe(Protocol):
    """How much other programs use some CPUs."""

    def read(self, cpus: Collection[int], own_pids: Collection[int]) -> float | None:
        """The share (0 to 1) of the time of `cpus` that went to other processes than `own_pids`,
        over the last second or so; None until there are two looks at the same CPUs.

        Raises `ProbeError`.
        """
