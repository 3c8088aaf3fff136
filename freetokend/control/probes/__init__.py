"""What the machine is like now: the GPU, memory, pressure and the load of the executor's CPUs."""

from __future__ import annotations

from freetokend.control.probes.probe_set import MachineReadings, ProbeQuery, ProbeSet, real_probes
from freetokend.control.probes.watch import MachineWatch, probe_query

__all__ = [
    "MachineReadings",
    "MachineWatch",
    "ProbeQuery",
    "ProbeSet",
    "probe_query",
    "real_probes",
]
