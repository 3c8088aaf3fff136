"""All probes together: one look at the machine, and what failed of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from freetokend.control.probes.cpu_load import ProcStatLoadProbe
from freetokend.control.probes.host_memory import HostMemoryProbe
from freetokend.control.probes.nvml import NvmlProbe
from freetokend.control.probes.ports import (
    CpuLoadProbe,
    GpuProbe,
    MemoryProbe,
    PressureProbe,
    PressureReadings,
    ProbeError,
)
from freetokend.control.probes.pressure import PsiProbe
from freetokend.control.probes.worker import DeadlineWorker
from freetokend.core import logs
from freetokend.core.host_facts import HostFiles
from freetokend.policy.readings import GpuReading, HostReading, ProbeFault

# The driver answers in a millisecond; a card that is being reset can take for ever.
_GPU_DEADLINE_S: Final = 1.0
_CLOSE_DEADLINE_S: Final = 0.5

GPU, MEMORY, PRESSURE, CPU = "gpu", "memory", "pressure", "cpu"
PROBES: Final = (GPU, MEMORY, PRESSURE, CPU)

_log = logs.logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuery:
    """Whom to look for. `gpu`: a UUID, an index, or "" for the one there is. `gpu_pids` may hold
    memory of it, `own_pids` use CPUs; `executor_cpus` is empty until an engine has told them."""

    gpu: str = ""
    gpu_pids: frozenset[int] = frozenset()
    own_pids: frozenset[int] = frozenset()
    executor_cpus: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReadings:
    """The machine at one tick. What a failed probe would have told is None, never the last known.

    `gpu_absent_reason`: why no GPU is watched where that is no fault. `nvml_errors_count`: readings
    of the GPU that failed since the start.
    """

    gpu: GpuReading | None = None
    host: HostReading | None = None
    faults: tuple[ProbeFault, ...] = ()
    gpu_absent_reason: str = ""
    nvml_errors_count: int = 0


@dataclass(slots=True)
class _Record:
    """The failures of one probe. `reason` is empty while it works."""

    reason: str = ""
    since_s: float = 0.0
    count: int = 0


class ProbeSet:
    """Asks every probe at each tick. One that fails leaves the others alone.

    Owns the record of the faults: each is logged when it appears, when its reason changes, and when
    it goes; it is counted as often as it was tried. Belongs to the event loop.
    """

    def __init__(
        self,
        *,
        gpu: GpuProbe,
        memory: MemoryProbe,
        pressure: PressureProbe,
        cpu_load: CpuLoadProbe,
        gpu_deadline_s: float = _GPU_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._memory = memory
        self._pressure = pressure
        self._cpu_load = cpu_load
        self._gpu_deadline_s = gpu_deadline_s
        self._clock = clock
        self._worker = DeadlineWorker("gpu-probe")
        self._records = {probe: _Record() for probe in PROBES}
        self._absent_reason = ""

    async def tick(self, query: ProbeQuery) -> MachineReadings:
        """The machine now; never raises for a probe. Not while an earlier tick is under way."""
        gpu = await self._read_gpu(query)
        host = self._read_host(query)
        faults = tuple(
            ProbeFault(
                probe=probe, reason=record.reason, since_s=record.since_s, count=record.count
            )
            for probe, record in self._records.items()
            if record.reason
        )
        return MachineReadings(
            gpu=gpu,
            host=host,
            faults=faults,
            gpu_absent_reason=self._absent_reason,
            nvml_errors_count=self._records[GPU].count,
        )

    async def close(self) -> None:
        """Let go of the driver, unless it hangs."""
        if not self._worker.is_busy:
            try:
                await self._worker.call(self._gpu.close, _CLOSE_DEADLINE_S)
            except ProbeError as error:
                _log.warning("gpu-not-released", reason=str(error))
        self._worker.close()

    async def _read_gpu(self, query: ProbeQuery) -> GpuReading | None:
        try:
            reading = await self._worker.call(
                lambda: self._gpu.read(query.gpu_pids, query.gpu), self._gpu_deadline_s
            )
        except Exception as error:  # whatever a probe raises must not end the watch
            self._failed(GPU, error)
            return None
        if reading.is_lost:
            lost = (
                f"{reading.uuid} is lost: nothing can be read until the GPU or the machine has "
                "been reset"
            )
            self._failed(GPU, ProbeError(lost, is_new=self._records[GPU].reason != lost))
        else:
            self._works(GPU)
        return reading

    def _read_host(self, query: ProbeQuery) -> HostReading:
        memory = self._tried(MEMORY, self._memory.read)
        pressure = self._tried(PRESSURE, self._pressure.read) or PressureReadings()
        load = None
        if query.executor_cpus:
            load = self._tried(
                CPU, lambda: self._cpu_load.read(query.executor_cpus, query.own_pids)
            )
        return HostReading(
            taken_s=self._clock(),
            mem_total_bytes=None if memory is None else memory.mem_total_bytes,
            mem_available_bytes=None if memory is None else memory.mem_available_bytes,
            cgroup_limit_bytes=None if memory is None else memory.cgroup_limit_bytes,
            cgroup_used_bytes=None if memory is None else memory.cgroup_used_bytes,
            memory_pressure=pressure.memory,
            cpu_pressure=pressure.cpu,
            io_pressure=pressure.io,
            executor_load=load,
        )

    def _tried(self, probe: str, read: Callable[[], T]) -> T | None:
        try:
            value = read()
        except Exception as error:  # whatever a probe raises must not end the watch
            self._failed(probe, error)
            return None
        self._works(probe)
        return value

    def _failed(self, probe: str, error: Exception) -> None:
        record = self._records[probe]
        if not isinstance(error, ProbeError):
            error = ProbeError(f"{type(error).__name__}: {error}")
        reason = str(error)
        if error.is_absent:
            record.reason = ""
            if reason != self._absent_reason:
                self._absent_reason = reason
                _log.info("gpu-not-watched", reason=reason)
            return
        if probe == GPU:
            self._absent_reason = ""
        if error.is_new:
            record.count += 1
        if reason != record.reason:
            if not record.reason:
                record.since_s = self._clock()
            record.reason = reason
            _log.warning("probe-failed", probe=probe, reason=reason, count=record.count)

    def _works(self, probe: str) -> None:
        record = self._records[probe]
        if probe == GPU:
            self._absent_reason = ""
        if record.reason:
            after_s = self._clock() - record.since_s
            record.reason = ""
            _log.info("probe-works-again", probe=probe, after_s=after_s, count=record.count)


def real_probes(files: HostFiles | None = None) -> ProbeSet:
    """The probes of this machine."""
    files = files or HostFiles()
    return ProbeSet(
        gpu=NvmlProbe(proc=files.proc),
        memory=HostMemoryProbe(files),
        pressure=PsiProbe(files),
        cpu_load=ProcStatLoadProbe(files),
    )
