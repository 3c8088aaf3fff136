"""A machine with everything to be told of it, for the tests of those who tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from freetokend.control.probes import MachineReadings, MachineWatch
from freetokend.control.probes.ports import PressureReadings
from freetokend.policy.readings import PressureReading
from tests.fakes.nvml import GIB, FakeGpu
from tests.fakes.probes import ScriptedGpu, ScriptedHost

ENGINE_PID: Final = 4711  # that of the fake gateway
BUSY_GPU: Final = FakeGpu(
    used=13 * GIB,
    reserved=1 * GIB,
    compute={ENGINE_PID: 8 * GIB},
    graphics={777: 4 * GIB},
    clock_reasons=4,
    link_generation=1,
)


async def fill_machine(
    watch: MachineWatch, gpu: ScriptedGpu, host: ScriptedHost
) -> MachineReadings:
    """Set every quantity and look."""
    gpu.error, gpu.gpus = None, [BUSY_GPU]
    host.memory = replace(host.memory, cgroup_limit_bytes=16 * GIB, cgroup_used_bytes=3 * GIB)
    host.pressure = PressureReadings(
        memory=PressureReading(some_avg10=10.0, full_avg10=5.0),
        cpu=PressureReading(some_avg10=84.0),
        io=PressureReading(some_avg10=0.0, full_avg10=0.0),
    )
    host.executor_load = 0.25
    await watch.look()
    return await watch.look()
