"""The same world around a real probe and around its fake, for the tests of their contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freetokend.control.probes.nvml import NvmlProbe
from freetokend.control.probes.ports import GpuProbe, ProbeError
from tests.fakes.nvml import UNKNOWN, FakeGpu, FakeNvml, fresh_bindings
from tests.fakes.probes import ScriptedGpu


class Clock:
    """Time in the test's hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class GpuRig(ABC):
    """Two GPUs (the first has everything) or what `plug` puts there."""

    probe: GpuProbe

    def __init__(self) -> None:
        self.clock = Clock()

    @abstractmethod
    def plug(self, *gpus: FakeGpu) -> None: ...

    @abstractmethod
    def change(self, **values: Any) -> None:
        """Of the first GPU."""

    @abstractmethod
    def fail(self) -> None:
        """Readings fail from now on."""

    @abstractmethod
    def heal(self) -> None:
        """And no longer; whatever wait there was is over."""

    @abstractmethod
    def without_driver(self) -> GpuProbe:
        """A probe on a machine without NVIDIA's driver."""


class NvmlRig(GpuRig):
    """The real probe and bindings over the fake library."""

    def __init__(self, directory: Path, set_environment: Callable[[str, str], None]) -> None:
        super().__init__()
        self.nvml = FakeNvml(directory)
        for name, value in self.nvml.environment.items():
            set_environment(name, value)
        self.proc = directory / "proc"
        self.probe = NvmlProbe(proc=self.proc, bindings=self.nvml.bindings(), clock=self.clock)

    def plug(self, *gpus: FakeGpu) -> None:
        self.nvml.plug(*gpus)

    def change(self, **values: Any) -> None:
        self.nvml.change(**values)
        self.clock.now_s += 1000

    def fail(self) -> None:
        self.nvml.fail("nvmlDeviceGetMemoryInfo_v2", UNKNOWN)

    def heal(self) -> None:
        self.nvml.heal()
        self.clock.now_s += 1000

    def without_driver(self) -> GpuProbe:
        return NvmlProbe(bindings=fresh_bindings(without_library=True), clock=self.clock)


class ScriptedRig(GpuRig):
    """The scripted probe."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = self.scripted = ScriptedGpu()

    def plug(self, *gpus: FakeGpu) -> None:
        self.scripted.gpus = list(gpus)

    def change(self, **values: Any) -> None:
        from dataclasses import replace

        self.scripted.gpus[0] = replace(self.scripted.gpus[0], **values)

    def fail(self) -> None:
        self.scripted.error = ProbeError("Unknown Error")

    def heal(self) -> None:
        self.scripted.error = None

    def without_driver(self) -> GpuProbe:
        probe = ScriptedGpu()
        probe.error = ProbeError("there is no driver", is_absent=True)
        return probe
