"""Choosing a backend: total, with a reason, and a GPU is never passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.core.errors import ConfigError, Reason
from freetokend.core.host_facts import HostFiles, NvidiaCard
from freetokend.enginehost.backend import (
    BackendChoice,
    Device,
    GpuPresence,
    choose_backend,
    choose_device,
    find_gpus,
)
from freetokend.link.messages import EngineSettings
from freetokend.policy.health import GPU_NOT_USED

NONE = GpuPresence()
TWO = GpuPresence(names=("NVIDIA RTX 4060", "NVIDIA H200"), device_nodes=("/dev/nvidia0",))
CARD = NvidiaCard(pci_address="0000:01:00.0", driver="")
MUTE = GpuPresence(cards=(CARD,), problem="NVMLError_DriverNotLoaded: Driver Not Loaded")
NODES = GpuPresence(device_nodes=("/dev/nvidia0", "/dev/nvidia1"), problem="X")


def chosen(backend: str, gpus: GpuPresence, **more: int | str) -> BackendChoice:
    asked: dict[str, int | str] = {"backend": backend, **more}
    return choose_backend(EngineSettings(model="m", **asked), gpus)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_serves_and_there_is_nothing_to_note(asked: str) -> None:
    choice = chosen(asked, NONE)
    assert choice.backend == "cpu"
    assert "no NVIDIA GPU" in choice.reason
    assert choice.notes == ()


@pytest.mark.parametrize("asked", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        (TWO, "present but not used: NVIDIA RTX 4060, NVIDIA H200"),
        (
            MUTE,
            "an NVIDIA GPU (PCI 0000:01:00.0) is present but no driver answers: "
            "NVMLError_DriverNotLoaded: Driver Not Loaded",
        ),
        (NODES, "2 NVIDIA GPUs (/dev/nvidia0, /dev/nvidia1) are present but no driver answers: X"),
    ],
)
def test_a_gpu_that_is_not_used_is_named(asked: str, gpus: GpuPresence, text: str) -> None:
    choice = chosen(asked, gpus, device="none")
    assert choice.backend == "cpu"
    assert text in choice.reason
    assert len(choice.notes) == 1
    assert text in choice.notes[0]
    assert "the CPU serves" in choice.notes[0]


@pytest.mark.parametrize("asked", ["fused", "offload", "hybrid", "gpu", ""])
@pytest.mark.parametrize("gpus", [NONE, TWO])
def test_what_this_build_cannot_do_is_refused(asked: str, gpus: GpuPresence) -> None:
    with pytest.raises(ConfigError, match="cpu") as caught:
        chosen(asked, gpus)
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert caught.value.param == "engine.backend"


def broken() -> tuple[str, ...]:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.fixture
def files(tmp_path: Path) -> HostFiles:
    """A machine with one NVIDIA card and its sound device."""
    for address, kind in (("0000:01:00.0", "0x030000"), ("0000:01:00.1", "0x040300")):
        device = tmp_path / "pci" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(f"{kind}\n")
    return HostFiles(pci_root=tmp_path / "pci")


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ("", "(PCI 0000:01:00.0) is present but no driver answers: no kernel driver is bound"),
        ("nouveau", "answers: the kernel gave it to the driver nouveau; OSError: libnvidia-ml"),
        ("nvidia", "answers: OSError: libnvidia-ml.so.1: cannot open shared object file"),
    ],
)
def test_a_card_whose_driver_is_missing_or_broken_is_named(
    files: HostFiles, driver: str, words: str
) -> None:
    if driver:
        (files.pci_root / "0000:01:00.0/driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    found = find_gpus(files=files, device_glob="/nonexistent", nvml_names=broken)
    assert found.present
    assert words in found.describe()
    choice = chosen("auto", found)
    assert words in choice.reason
    assert words in choice.notes[0]


def test_a_driver_that_lists_nothing_is_no_answer(files: HostFiles) -> None:
    found = find_gpus(files=files, device_glob="/nonexistent", nvml_names=lambda: ())
    assert found.describe().endswith("it lists no GPU")


def test_device_nodes_count_where_the_bus_is_hidden(tmp_path: Path) -> None:
    hidden = HostFiles(pci_root=tmp_path / "pci")
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    pattern = f"{tmp_path}/nvidia[0-9]*"
    found = find_gpus(files=hidden, device_glob=pattern, nvml_names=broken)
    assert found.device_nodes == (str(tmp_path / "nvidia0"),)
    nothing = find_gpus(files=hidden, device_glob="/nonexistent", nvml_names=broken)
    assert not nothing.present
    assert nothing.describe() == ""


def test_a_driver_that_answers_names_its_gpus(files: HostFiles) -> None:
    found = find_gpus(files=files, nvml_names=lambda: ("NVIDIA H200",))
    assert (found.names, found.problem) == (("NVIDIA H200",), "")
    assert found.describe() == "present but not used: NVIDIA H200"


@pytest.mark.parametrize(
    ("settings", "gpus", "device"),
    [
        ({}, TWO, Device.CUDA),
        ({"backend": "hybrid"}, TWO, Device.CUDA),
        ({}, NONE, Device.NONE),
        ({}, MUTE, Device.NONE),
        ({"backend": "cpu"}, TWO, Device.NONE),
        ({"numerics": "fast"}, TWO, Device.NONE),
        ({"device": "none"}, TWO, Device.NONE),
        ({"device": "host"}, TWO, Device.HOST),
    ],
)
def test_auto_is_a_gpu_that_the_driver_names(
    settings: dict[str, str], gpus: GpuPresence, device: Device
) -> None:
    assert choose_device(EngineSettings(model="m", **settings), gpus) is device  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"numerics": "fast"}, 'engine.numerics = "fast" rounds activations as no GPU does'),
        ({"backend": "cpu"}, 'engine.backend is "cpu"'),
        ({"device": "none"}, 'engine.device is "none"'),
    ],
)
def test_what_keeps_a_gpu_out_is_said(settings: dict[str, str], why: str) -> None:
    choice = choose_backend(EngineSettings(model="m", **settings), TWO)  # type: ignore[arg-type]
    assert choice.reason.startswith(why)
    assert choice.reason.endswith("; present but not used: NVIDIA RTX 4060, NVIDIA H200")
    assert choice.notes == (f"{GPU_NOT_USED}: {choice.reason}.",)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"slots_count": 9}, "engine.slots_count"),
        ({"preset": "chat"}, "engine.preset"),
        ({"layers": "0=cpu"}, "engine.layers"),
        ({"sweep_tokens": 64}, "engine.sweep_tokens"),
        ({"attention": "triton"}, "engine.attention"),
    ],
)
def test_a_size_that_has_no_effect_is_said(settings: dict[str, int | str], key: str) -> None:
    (note, size) = chosen("auto", MUTE, **settings).notes
    assert note.startswith(GPU_NOT_USED)
    assert size.startswith(f"{key} has no effect: ")
