"""Which device serves, and why: never a silent choice."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import pynvml

from freetokend.core.errors import ConfigError
from freetokend.core.host_facts import HostFiles, NvidiaCard, nvidia_cards
from freetokend.link.messages import EngineSettings
from freetokend.policy.health import GPU_NOT_USED

GPU_BACKENDS: Final = ("fused", "offload", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPresence:
    """What can be seen of NVIDIA GPUs: by their driver, on the PCI bus and in /dev.

    `problem` says why the driver names none, if it does not.
    """

    names: tuple[str, ...] = ()
    cards: tuple[NvidiaCard, ...] = ()
    device_nodes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def present(self) -> bool:
        return bool(self.names or self.cards or self.device_nodes)

    def describe(self) -> str:
        """A clause such as "present but not used: NVIDIA H200" or "an NVIDIA GPU (PCI
        0000:01:00.0) is present but no driver answers: ..."; empty without a GPU."""
        if self.names:
            return f"present but not used: {', '.join(self.names)}"
        if not self.present:
            return ""
        if self.cards:
            where, count = "PCI " + ", ".join(c.pci_address for c in self.cards), len(self.cards)
        else:
            where, count = ", ".join(self.device_nodes), len(self.device_nodes)
        what = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
        be = "is" if count == 1 else "are"
        return f"{what} ({where}) {be} present but no driver answers: {self.problem}"


NO_GPUS: Final = GpuPresence()


class Device(StrEnum):
    """Where the slots of an expert cache are: nowhere, in ordinary memory, or on a GPU."""

    NONE = "none"
    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend and its reason; `notes` say what a user would otherwise wonder about."""

    backend: str
    reason: str
    notes: tuple[str, ...] = ()


def choose_device(settings: EngineSettings, gpus: GpuPresence) -> Device:
    """What could hold the slots of an expert cache; ConfigError for one that cannot be had.

    "auto" is a GPU where the driver names one; whether it can be used its engine finds out.
    """
    match settings.device:
        case "host":
            return Device.HOST
        case "auto":
            tries = gpus.names and settings.backend != "cpu" and settings.numerics == "exact"
            avoids = settings.gpu_fault and settings.backend == "auto"
            return Device.CUDA if tries and not avoids else Device.NONE
        case "none":
            return Device.NONE
        case "cuda":
            if gpus.names:
                return Device.CUDA
            found = gpus.describe() or "no NVIDIA GPU is visible to this process"
            raise ConfigError(
                f'engine.device = "cuda" needs an NVIDIA GPU and its driver: {found}. Set it to '
                '"auto".',
                param="engine.device",
            )
        case _:
            raise ConfigError(
                f'engine.device = "{settings.device}" is unknown; known are auto, cuda, host '
                "and none.",
                param="engine.device",
            )


def cache_key(settings: EngineSettings) -> str:
    """The first setting that was made and that only an expert cache can honour; empty: none."""
    made = {
        "engine.slots_count": settings.slots_count,
        "engine.preset": settings.preset != "auto",
        "engine.sweep_tokens": settings.sweep_tokens,
        "engine.layers": settings.layers,
    }
    return next((key for key, is_set in made.items() if is_set), "")


def without_cache(settings: EngineSettings, reason: str) -> BackendChoice:
    """The CPU, because of what nobody could know when the settings were made.

    ConfigError where they ask for a cache all the same: a backend with one, or a size of it.
    """
    if settings.backend in GPU_BACKENDS:
        raise ConfigError(
            f'engine.backend = "{settings.backend}" is not possible: {reason}. Set it to "cpu".',
            param="engine.backend",
        )
    if key := cache_key(settings):
        raise ConfigError(
            f"{key} is set, which is for an expert cache, and there cannot be one: {reason}. "
            f"Remove {key}.",
            param=key,
        )
    return BackendChoice(backend="cpu", reason=reason)


def uses_host_device(settings: EngineSettings) -> bool:
    """Whether an expert cache in ordinary memory was asked for."""
    return settings.device == Device.HOST and settings.backend != "cpu"


def uses_cuda(settings: EngineSettings) -> bool:
    """Whether an expert cache on a GPU was asked for."""
    return settings.device == Device.CUDA and settings.backend != "cpu"


def choose_backend(settings: EngineSettings, gpus: GpuPresence) -> BackendChoice:
    """Where no device holds slots. ConfigError for a backend that needs one."""
    asked = settings.backend
    why = _why_no_gpu(settings, gpus)
    if asked in GPU_BACKENDS:
        raise ConfigError(
            f'engine.backend = "{asked}" needs a device for the slots of its expert cache, and '
            f'there is none: {why}. Set it to "auto" or "cpu"; for development, engine.device = '
            '"host" puts ordinary memory in the place of a GPU.',
            param="engine.backend",
        )
    if asked not in ("auto", "cpu"):
        raise ConfigError(
            f'engine.backend = "{asked}" is unknown; known are auto, cpu, '
            f"{', '.join(GPU_BACKENDS)}.",
            param="engine.backend",
        )
    return cpu_beside(settings, gpus, why)


def cpu_beside(settings: EngineSettings, gpus: GpuPresence, why: str) -> BackendChoice:
    """The CPU, with notes on a GPU that it serves beside, and on a size that has no effect.

    why: a clause, why there are no slots.
    """
    notes = [f"{GPU_NOT_USED}: {why}."] if gpus.present else []
    key = cache_key(settings) or ("engine.attention" if settings.attention != "auto" else "")
    if key:
        notes.append(f"{key} has no effect: no expert cache on a GPU, because {why}.")
    return BackendChoice(backend="cpu", reason=why, notes=tuple(notes))


def _why_no_gpu(settings: EngineSettings, gpus: GpuPresence) -> str:
    if not gpus.present:
        return "no NVIDIA GPU is visible to this process"
    found = gpus.describe()
    if settings.backend == "cpu":
        return f'engine.backend is "cpu"; {found}'
    if settings.device == Device.NONE:
        return f'engine.device is "none"; {found}'
    if gpus.names and settings.gpu_fault:
        return f"the last engine that used it {settings.gpu_fault}; {found}"
    if gpus.names and settings.numerics != "exact":
        return (
            f'engine.numerics = "{settings.numerics}" rounds activations as no GPU does and is for '
            f"engines whose CPU runs every expert; {found}"
        )
    return found


def find_gpus(
    *,
    files: HostFiles | None = None,
    device_glob: str = "/dev/nvidia[0-9]*",
    nvml_names: Callable[[], tuple[str, ...]] | None = None,
) -> GpuPresence:
    """Ask the driver through NVML; a GPU that it does not name is looked for on the PCI bus and
    among the device nodes."""
    cards = nvidia_cards(files or HostFiles())
    names: tuple[str, ...] = ()
    problem = "it lists no GPU"
    try:
        names = (nvml_names or names_from_nvml)()
    except Exception as error:  # whatever a broken driver raises must not keep the CPU from serving
        problem = f"{type(error).__name__}: {error}"
    return GpuPresence(
        names=names,
        cards=cards,
        device_nodes=tuple(sorted(glob.glob(device_glob))),
        problem="" if names else _bound_driver(cards) + problem,
    )


def _bound_driver(cards: tuple[NvidiaCard, ...]) -> str:
    """What the kernel has to do with the cards, when that explains more than NVML can."""
    if not cards:
        return ""
    others = sorted({card.driver for card in cards} - {"nvidia", ""})
    if others:
        return f"the kernel gave it to the driver {', '.join(others)}; "
    return "" if any(card.driver for card in cards) else "no kernel driver is bound to it; "


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
