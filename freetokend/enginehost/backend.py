"""Which device serves, and why: never a silent choice."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pynvml

from freetokend.core.errors import ConfigError

GPU_BACKENDS: Final = ("fused", "offload", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPresence:
    """What can be seen of NVIDIA GPUs. `problem`: why their names are not known, if so."""

    names: tuple[str, ...] = ()
    devices_count: int = 0
    problem: str = ""

    @property
    def present(self) -> bool:
        return bool(self.names) or self.devices_count > 0

    def describe(self) -> str:
        """For example "NVIDIA H200" or "2 NVIDIA GPUs (their driver does not answer: ...)"."""
        if self.names:
            return ", ".join(self.names)
        count = f"{self.devices_count} NVIDIA GPU{'s' if self.devices_count != 1 else ''}"
        return f"{count} (the driver does not answer: {self.problem})" if self.problem else count


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend and its reason; `notes` say what a user would otherwise wonder about."""

    backend: str
    reason: str
    notes: tuple[str, ...] = ()


def choose_backend(asked: str, gpus: GpuPresence) -> BackendChoice:
    """Raises ConfigError for a backend that this build does not have."""
    if asked in GPU_BACKENDS:
        raise ConfigError(
            f'engine.backend = "{asked}" computes on a GPU, which this build cannot do: it has '
            'the "cpu" backend only. Set it to "auto" or "cpu".',
            param="engine.backend",
        )
    if asked not in ("auto", "cpu"):
        raise ConfigError(
            f'engine.backend = "{asked}" is unknown; known are auto, cpu, '
            f"{', '.join(GPU_BACKENDS)}.",
            param="engine.backend",
        )
    if not gpus.present:
        return BackendChoice(backend="cpu", reason="no NVIDIA GPU is visible to this process")
    found = gpus.describe()
    return BackendChoice(
        backend="cpu",
        reason=f"this build computes on the CPU only; present but not used: {found}",
        notes=(
            f"A GPU is present but the CPU serves, because this build has no GPU backend: {found}.",
        ),
    )


def find_gpus(
    *,
    device_glob: str = "/dev/nvidia[0-9]*",
    nvml_names: Callable[[], tuple[str, ...]] | None = None,
) -> GpuPresence:
    """Look for GPUs through NVML and, should it not answer, through the device nodes."""
    devices_count = len(glob.glob(device_glob))
    names: tuple[str, ...] = ()
    problem = ""
    try:
        names = (nvml_names or names_from_nvml)()
    except Exception as error:  # whatever a broken driver raises must not keep the CPU from serving
        problem = f"{type(error).__name__}: {error}"
    return GpuPresence(
        names=names, devices_count=devices_count, problem=problem if devices_count else ""
    )


def names_from_nvml() -> tuple[str, ...]:
    """Names of the visible GPUs; raises what NVML raises (no driver, version mismatch)."""
    pynvml.nvmlInit()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
