"""The metrics of the machine: what is unknown has no sample."""

from __future__ import annotations

from freetokend.control.metrics.families import Families
from freetokend.control.probes import MachineReadings
from freetokend.control.probes.probe_set import PROBES
from freetokend.policy.readings import GpuReading, HostReading


def add_machine(families: Families, readings: MachineReadings, now_s: float) -> None:
    """Nothing but the counter of errors before the first look."""
    families.add("nvml_errors_total", readings.nvml_errors_count)
    if readings.gpu is not None:
        _gpu(families, readings.gpu)
    if readings.host is None:
        return
    failing = {fault.probe for fault in readings.faults}
    for probe in PROBES:
        families.add("probe_failing", probe in failing, probe)
    families.add("machine_age_seconds", max(0.0, now_s - readings.host.taken_s))
    _host(families, readings.host)


def _gpu(families: Families, gpu: GpuReading) -> None:
    families.add("gpu_info", 1, gpu.uuid, gpu.name, gpu.driver_version)
    families.add("gpu_lost", gpu.is_lost, gpu.uuid)
    families.add_known("gpu_memory_size_bytes", gpu.total_bytes, gpu.uuid)
    families.add_known("gpu_memory_free_bytes", gpu.free_bytes, gpu.uuid)
    families.add_known("gpu_memory_used_bytes", gpu.used_bytes, gpu.uuid)
    families.add_known("gpu_memory_own_bytes", gpu.own_bytes, gpu.uuid)
    families.add_known("gpu_memory_others_bytes", gpu.others_bytes, gpu.uuid)
    families.add_known("gpu_link_generation", gpu.link_generation, gpu.uuid)
    families.add_known("gpu_link_generation_limit", gpu.link_generation_max, gpu.uuid)
    families.add_known("gpu_link_lanes", gpu.link_width, gpu.uuid)
    families.add_known("gpu_link_lanes_limit", gpu.link_width_max, gpu.uuid)
    for reason in gpu.throttle_reasons:
        families.add("gpu_throttled", 1, gpu.uuid, reason)


def _host(families: Families, host: HostReading) -> None:
    families.add_known("host_memory_size_bytes", host.mem_total_bytes)
    families.add_known("host_memory_available_bytes", host.mem_available_bytes)
    families.add_known("cgroup_memory_limit_bytes", host.cgroup_limit_bytes)
    families.add_known("cgroup_memory_used_bytes", host.cgroup_used_bytes)
    families.add_known("executor_load_ratio", host.executor_load)
    for resource, pressure in (
        ("memory", host.memory_pressure),
        ("cpu", host.cpu_pressure),
        ("io", host.io_pressure),
    ):
        if pressure is None:
            continue
        families.add("pressure_ratio", pressure.some_avg10 / 100, resource, "some")
        if pressure.full_avg10 is not None:
            families.add("pressure_ratio", pressure.full_avg10 / 100, resource, "full")
