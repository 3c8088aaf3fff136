"""What the probes measured, as the protobuf messages of the control plane."""

from __future__ import annotations

from typing import Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.control.probes import MachineReadings
from freetokend.policy.readings import GpuReading, HostReading, PressureReading

# Whoever holds the card's memory is among the first few; a desktop has dozens of small ones.
_MOST_PROCESSES: Final = 10


def machine_status(readings: MachineReadings, now_s: float) -> pb.MachineStatus | None:
    """None before the first look. `now_s` is of the clock of the readings."""
    if readings.host is None:
        return None
    message = pb.MachineStatus(
        gpu_absent_reason=readings.gpu_absent_reason,
        host=_host(readings.host),
        faults=[
            pb.ProbeFault(
                probe=fault.probe,
                reason=fault.reason,
                for_s=max(0.0, now_s - fault.since_s),
                failures_count=fault.count,
            )
            for fault in readings.faults
        ],
        nvml_errors_count=readings.nvml_errors_count,
        age_s=max(0.0, now_s - readings.host.taken_s),
    )
    if readings.gpu is not None:
        message.gpu.CopyFrom(_gpu(readings.gpu))
    return message


def _gpu(gpu: GpuReading) -> pb.GpuStatus:
    # A keyword that is None leaves its field unset.
    return pb.GpuStatus(
        uuid=gpu.uuid,
        name=gpu.name,
        driver_version=gpu.driver_version,
        lost=gpu.is_lost,
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        used_bytes=gpu.used_bytes,
        own_bytes=gpu.own_bytes,
        others_bytes=gpu.others_bytes,
        processes=[
            pb.GpuProcess(pid=one.pid, name=one.name or "", used_bytes=one.used_bytes)
            for one in (gpu.processes or ())[:_MOST_PROCESSES]
        ],
        link_generation=gpu.link_generation,
        link_generation_max=gpu.link_generation_max,
        link_lanes_count=gpu.link_width,
        link_lanes_max_count=gpu.link_width_max,
        throttle_reasons=gpu.throttle_reasons,
    )


def _host(host: HostReading) -> pb.HostStatus:
    return pb.HostStatus(
        mem_total_bytes=host.mem_total_bytes,
        mem_available_bytes=host.mem_available_bytes,
        cgroup_limit_bytes=host.cgroup_limit_bytes,
        cgroup_used_bytes=host.cgroup_used_bytes,
        memory_pressure=_pressure(host.memory_pressure),
        cpu_pressure=_pressure(host.cpu_pressure),
        io_pressure=_pressure(host.io_pressure),
        executor_load_ratio=host.executor_load,
    )


def _pressure(pressure: PressureReading | None) -> pb.PressureStatus | None:
    if pressure is None:
        return None
    full = pressure.full_avg10
    return pb.PressureStatus(
        some_ratio=pressure.some_avg10 / 100, full_ratio=None if full is None else full / 100
    )
