"""The installer's verdict on a GPU that torch cannot use: one sentence, the true reason."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def check_gpu() -> ModuleType:
    """The script, which lies beside the package and not in it."""
    path = Path(__file__).parents[2] / "packaging" / "check_gpu.py"
    spec = importlib.util.spec_from_file_location("check_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_gpu"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


NODES = (("/dev/nvidia0", True), ("/dev/nvidia-uvm", True), ("/dev/nvidiactl", True))
FITTING: dict[str, Any] = {
    "torch_version": "2.13.0",
    "torch_cuda": "13.0",
    "driver_cuda": (13, 1),
    "driver_problem": "",
    "device_nodes": NODES,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch_cuda": "", "driver_cuda": None}, "torch 2.13.0 is a CPU build"),
        (
            {"driver_cuda": None, "driver_problem": "NVMLError_LibRmVersionMismatch: X"},
            "driver does not answer (NVMLError_LibRmVersionMismatch: X)",
        ),
        ({"driver_cuda": (12, 9)}, "built for CUDA 13.0 and the driver serves CUDA 12.9 at most"),
        ({"device_nodes": NODES[:1] + NODES[2:]}, "/dev/nvidia-uvm is missing"),
        ({"device_nodes": NODES[1:]}, "/dev/nvidia0 is missing"),
        (
            {"device_nodes": ()},
            "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 are missing",
        ),
        (
            {"device_nodes": (("/dev/nvidia0", False), *NODES[1:])},
            "/dev/nvidia0 is not accessible to this user",
        ),
        # a newer minor version is served by an older driver: that is not the reason
        ({"torch_cuda": "13.2", "driver_cuda": (13, 0)}, "driver (CUDA 13.0) and torch"),
        ({}, "CUDA does not start although"),
    ],
)
def test_the_first_true_reason_is_told(
    check_gpu: ModuleType, changes: dict[str, Any], words: str
) -> None:
    sentence = check_gpu.why_unusable(check_gpu.Seen(**FITTING | changes))
    assert words in sentence
    assert ": " in sentence, "and what to do"
    assert "\n" not in sentence


def test_another_gpu_than_the_first_is_one(check_gpu: ModuleType) -> None:
    nodes = (("/dev/nvidia3", True), *NODES[1:])
    sentence = check_gpu.why_unusable(check_gpu.Seen(**FITTING | {"device_nodes": nodes}))
    assert "missing" not in sentence


def test_what_this_machine_shows_is_a_reason_or_a_gpu(
    check_gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = check_gpu.main()
    err = capsys.readouterr().err
    assert err.startswith(
        "   GPU: " if code == 0 else "   The NVIDIA GPU is present but unusable: "
    )
    assert len(err.splitlines()) == 1
