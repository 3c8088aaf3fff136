"""Scripted probes: what a test sets is what they read, by the contract of the real ones."""

from __future__ import annotations

import threading
from collections.abc import Collection

from freetokend.control.probes import ProbeSet
from freetokend.control.probes.ports import GpuProbe, MemoryReading, PressureReadings, ProbeError
from freetokend.policy.readings import GpuProcess, GpuReading
from tests.fakes.nvml import NOT_AVAILABLE, FakeGpu


class ScriptedGpu:
    """A `GpuProbe` over `gpus`. `error` is raised while it is set; `gate`, once cleared, makes
    readings hang until it is set again. `reads_count` counts the readings that were begun."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus) or [FakeGpu()]
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.reads_count = 0
        self.closes_count = 0
        self.now_s = 0.0

    def read(self, own_pids: Collection[int], device: str = "") -> GpuReading:
        self.reads_count += 1
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        gpu = self._choose(device)
        if gpu.lost:
            return GpuReading(
                uuid=gpu.uuid,
                name=gpu.name,
                driver_version="580.65.06",
                taken_s=self.now_s,
                is_lost=True,
            )
        processes = tuple(
            GpuProcess(pid=pid, name=None, used_bytes=_known(_most(gpu, pid)))
            for pid in {**gpu.compute, **gpu.graphics}
        )
        own = [one.used_bytes for one in processes if one.pid in own_pids]
        known = [used_bytes for used_bytes in own if used_bytes is not None]
        own_bytes = sum(known) if known and len(known) == len(own) else None
        return GpuReading(
            uuid=gpu.uuid,
            name=gpu.name,
            taken_s=self.now_s,
            total_bytes=gpu.total,
            free_bytes=gpu.total - gpu.used - gpu.reserved,
            used_bytes=gpu.used,
            own_bytes=own_bytes if own_pids else 0,
            processes=tuple(sorted(processes, key=lambda one: (-(one.used_bytes or 0), one.pid))),
            link_generation=gpu.link_generation,
            link_generation_max=gpu.link_generation_max,
            link_width=gpu.link_width,
            link_width_max=gpu.link_width_max,
            throttle_reasons=("sw-power-cap",) if gpu.clock_reasons & 4 else (),
            driver_version="580.65.06",
        )

    def close(self) -> None:
        self.closes_count += 1

    def _choose(self, device: str) -> FakeGpu:
        if not device and len(self.gpus) > 1:
            raise ProbeError(f"there are {len(self.gpus)} GPUs: set control.gpu")
        for index, gpu in enumerate(self.gpus):
            if device in ("", str(index), gpu.uuid):
                return gpu
        raise ProbeError(f"no GPU {device} was found")


class ScriptedHost:
    """What the scripted probes of the host read; an error that is set is raised instead."""

    def __init__(self) -> None:
        self.memory = MemoryReading(mem_total_bytes=64 << 30, mem_available_bytes=32 << 30)
        self.pressure = PressureReadings()
        self.executor_load: float | None = 0.0
        self.memory_error: Exception | None = None
        self.pressure_error: Exception | None = None
        self.load_error: Exception | None = None


class ScriptedMemory:
    """A `MemoryProbe`."""

    def __init__(self, host: ScriptedHost) -> None:
        self._host = host

    def read(self) -> MemoryReading:
        if self._host.memory_error is not None:
            raise self._host.memory_error
        return self._host.memory


class ScriptedPressure:
    """A `PressureProbe`."""

    def __init__(self, host: ScriptedHost) -> None:
        self._host = host

    def read(self) -> PressureReadings:
        if self._host.pressure_error is not None:
            raise self._host.pressure_error
        return self._host.pressure


class ScriptedCpuLoad:
    """A `CpuLoadProbe`: as the real one it knows nothing at the first look at some CPUs."""

    def __init__(self, host: ScriptedHost) -> None:
        self._host = host
        self._seen: frozenset[int] | None = None

    def read(self, cpus: Collection[int], own_pids: Collection[int]) -> float | None:
        if self._host.load_error is not None:
            self._seen = None
            raise self._host.load_error
        seen, self._seen = self._seen, frozenset(cpus)
        return self._host.executor_load if seen == self._seen else None


def scripted_probes(gpu: GpuProbe, host: ScriptedHost, *, gpu_deadline_s: float = 1.0) -> ProbeSet:
    """The real set over scripted probes; its time is the scripted GPU's."""
    return ProbeSet(
        gpu=gpu,
        memory=ScriptedMemory(host),
        pressure=ScriptedPressure(host),
        cpu_load=ScriptedCpuLoad(host),
        gpu_deadline_s=gpu_deadline_s,
        clock=lambda: gpu.now_s if isinstance(gpu, ScriptedGpu) else 0.0,
    )


def _most(gpu: FakeGpu, pid: int) -> int:
    """A process that is in both lists has its memory in both: the number that is one."""
    said = [processes[pid] for processes in (gpu.compute, gpu.graphics) if pid in processes]
    known = [length_bytes for length_bytes in said if length_bytes != NOT_AVAILABLE]
    return max(known, default=NOT_AVAILABLE)


def _known(length_bytes: int) -> int | None:
    return None if length_bytes == NOT_AVAILABLE else length_bytes
