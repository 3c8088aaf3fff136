"""What the probes measured of the machine, as values that decisions are made from.

None means that a quantity is not known: never nought, and never another quantity in its place.
Times are of the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    `pid` as the driver counts processes. `name` is None where no such process is to be seen from
    here (another PID namespace, or it has just ended), `used_bytes` where the driver does not say.
    """

    pid: int
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU at one instant.

    `total_bytes` is the size of the memory. `free_bytes` is what an allocation can still get, and
    `used_bytes` what allocations hold; what the driver keeps to itself is in neither, so that the
    two add up to less than the total. `own_bytes` is the part held by the processes of this
    service, None when the driver's list does not show them or not their bytes. `processes` is None
    when the driver gives no list. Link: PCIe generation and lanes, now and at most.
    `throttle_reasons` are what holds the clocks down (not idleness), sorted. `is_lost`: the
    device is gone until it is found again; everything measured is then unknown.
    """

    uuid: str
    name: str
    taken_s: float
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    link_generation: int | None = None
    link_generation_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    driver_version: str = ""
    is_lost: bool = False

    @property
    def others_bytes(self) -> int | None:
        """What other programs hold: used less own. None unless both are known."""
        if self.used_bytes is None or self.own_bytes is None:
            return None
        return max(0, self.used_bytes - self.own_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureReading:
    """Pressure stall information: the share of the last ten seconds, in per cent, in which some
    (all) of the tasks waited for the resource. `full_avg10` is None where the kernel has none."""

    some_avg10: float
    full_avg10: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """The host at one instant.

    `cgroup_limit_bytes` is the least memory limit on the way up from our cgroup and
    `cgroup_used_bytes` the usage of the cgroup that has it; None without a limit. Pressures are
    the higher of the host's and our cgroup's. `executor_load` is the share (0 to 1) of the time of
    the executor's CPUs that other programs used since the reading before.
    """

    taken_s: float
    mem_total_bytes: int | None = None
    mem_available_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    memory_pressure: PressureReading | None = None
    cpu_pressure: PressureReading | None = None
    io_pressure: PressureReading | None = None
    executor_load: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFault:
    """A probe that fails now: why, since when, and how many times in all since the start."""

    probe: str
    reason: str
    since_s: float
    count: int
