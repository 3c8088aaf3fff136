"""Choosing a backend: total, with a reason, and a GPU is never passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.core.errors import ConfigError, Reason
from freetokend.enginehost.backend import GpuPresence, choose_backend, find_gpus

NONE = GpuPresence()
TWO = GpuPresence(names=("NVIDIA RTX 4060", "NVIDIA H200"), devices_count=2)
MUTE = GpuPresence(devices_count=1, problem="NVMLError_DriverNotLoaded: Driver Not Loaded")


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_serves_and_there_is_nothing_to_note(asked: str) -> None:
    choice = choose_backend(asked, NONE)
    assert choice.backend == "cpu"
    assert "no NVIDIA GPU" in choice.reason
    assert choice.notes == ()


@pytest.mark.parametrize("asked", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("gpus", "text"),
    [(TWO, "NVIDIA RTX 4060, NVIDIA H200"), (MUTE, "1 NVIDIA GPU (the driver does not answer: ")],
)
def test_a_gpu_that_is_not_used_is_named(asked: str, gpus: GpuPresence, text: str) -> None:
    choice = choose_backend(asked, gpus)
    assert choice.backend == "cpu"
    assert text in choice.reason
    assert len(choice.notes) == 1
    assert text in choice.notes[0]
    assert "the CPU serves" in choice.notes[0]


@pytest.mark.parametrize("asked", ["fused", "offload", "hybrid", "gpu", ""])
@pytest.mark.parametrize("gpus", [NONE, TWO])
def test_what_this_build_cannot_do_is_refused(asked: str, gpus: GpuPresence) -> None:
    with pytest.raises(ConfigError, match="cpu") as caught:
        choose_backend(asked, gpus)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert caught.value.param == "engine.backend"


def broken() -> tuple[str, ...]:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def test_finding_gpus_survives_a_broken_driver(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    found = find_gpus(device_glob=f"{tmp_path}/nvidia[0-9]*", nvml_names=broken)
    assert found.present
    assert found.devices_count == 1
    assert "cannot open shared object" in found.problem
    nothing = find_gpus(device_glob=f"{tmp_path}/other*", nvml_names=broken)
    assert not nothing.present
    assert nothing.problem == "", "no GPU and no driver is no problem"
    named = find_gpus(device_glob=f"{tmp_path}/nvidia*", nvml_names=lambda: ("NVIDIA H200",))
    assert named.names == ("NVIDIA H200",)
    assert named.problem == ""
