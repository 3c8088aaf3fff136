"""What the machine is like now: the GPU, memory, pressure and the load of the executor's CPUs."""

from __future__ import annotations

from freetokend.control.probes.probe_set import MachineReadings, ProbeQuery, ProbeSet, real_probes

__all__ = ["MachineReadings", "ProbeQuery", "ProbeSet", "real_probes"]
