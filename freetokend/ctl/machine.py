"""The watched GPU and the host as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.units import format_bytes, format_seconds

_UNKNOWN: Final = "unknown"
_SHOWN_PROCESSES: Final = 3


def machine_lines(machine: pb.MachineStatus) -> Iterator[tuple[str, str]]:
    """Label and text: the GPU, the host, and every probe that fails."""
    if machine.HasField("gpu"):
        yield "gpu", _gpu(machine.gpu)
    else:
        yield "gpu", f"{_UNKNOWN} ({machine.gpu_absent_reason or 'its probe fails'})"
    yield "host", _host(machine.host)
    for fault in machine.faults:
        count = fault.failures_count
        yield (
            "no reading",
            f"{fault.probe}: {fault.reason} (for {format_seconds(fault.for_s)}, "
            f"{count} failure{'' if count == 1 else 's'} since the start)",
        )


def _gpu(gpu: pb.GpuStatus) -> str:
    name = gpu.name or gpu.uuid
    if gpu.lost:
        return f"{name}: lost, it does not answer any more"
    parts = [
        f"{_bytes(gpu, 'free_bytes')} of {_bytes(gpu, 'total_bytes')} free",
        f"own {_bytes(gpu, 'own_bytes')}, others {_bytes(gpu, 'others_bytes')}{_holders(gpu)}",
        _link(gpu),
        f"driver {gpu.driver_version}",
    ]
    if gpu.throttle_reasons:
        parts.append(f"clocks held down by {', '.join(gpu.throttle_reasons)}")
    return f"{name}: {'; '.join(parts)}"


def _holders(gpu: pb.GpuStatus) -> str:
    """Who holds most, ours among them: which are ours the processes do not tell."""
    shown = [
        f"{one.name or f'pid {one.pid}'} {_bytes(one, 'used_bytes')}"
        for one in gpu.processes[:_SHOWN_PROCESSES]
    ]
    return f" (most: {', '.join(shown)})" if shown else ""


def _link(gpu: pb.GpuStatus) -> str:
    def number(field: str) -> str:
        return str(getattr(gpu, field)) if gpu.HasField(field) else _UNKNOWN

    now = f"PCIe {number('link_generation')} x{number('link_lanes_count')}"
    most = f"PCIe {number('link_generation_max')} x{number('link_lanes_max_count')}"
    return now if now == most else f"{now} now, {most} at most"


def _host(host: pb.HostStatus) -> str:
    available, total = _bytes(host, "mem_available_bytes"), _bytes(host, "mem_total_bytes")
    parts = [f"{available} of {total} memory available"]
    if host.HasField("cgroup_limit_bytes"):
        used, limit = _bytes(host, "cgroup_used_bytes"), _bytes(host, "cgroup_limit_bytes")
        parts.append(f"control group {used} of {limit}")
    pressures = [
        f"{resource} {getattr(host, f'{resource}_pressure').some_ratio:.0%}"
        for resource in ("memory", "cpu", "io")
        if host.HasField(f"{resource}_pressure")
    ]
    parts.append(f"pressure: {', '.join(pressures) or _UNKNOWN}")
    if host.HasField("executor_load_ratio"):
        parts.append(f"others use {host.executor_load_ratio:.0%} of the executor's CPUs")
    return "; ".join(parts)


def _bytes(message: pb.GpuStatus | pb.GpuProcess | pb.HostStatus, field: str) -> str:
    return format_bytes(getattr(message, field)) if message.HasField(field) else _UNKNOWN
