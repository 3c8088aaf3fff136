"""The CUDA driver, arena and slots over the fake libcuda, by the real bindings."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from freetokend.core.errors import Reason, ResourceError
from freetokend.device.cuda_driver import CudaDriver
from tests.device.cuda_scenarios import scenarios
from tests.device.scenarios_on_fake import read_results
from tests.fakes.libcuda import build_fake_libcuda, run_with_fake


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All scenarios in one process that finds the fake; name -> failure."""
    library = build_fake_libcuda(tmp_path_factory.mktemp("libcuda"))
    finished = run_with_fake(library, "tests.device.cuda_scenarios")
    told = read_results(finished.stdout)
    assert finished.returncode == 0, f"after {len(told)} scenarios: {finished.stderr[-2000:]}"
    return told


@pytest.mark.parametrize("name", scenarios())
def test_on_fake(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]


def install_api(monkeypatch: pytest.MonkeyPatch, api: object) -> None:
    """Have the bindings' module be this."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", api)


def test_a_missing_package_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    install_api(monkeypatch, None)
    with pytest.raises(ResourceError, match=r"cuda-bindings.*\[gpu\]") as missing:
        CudaDriver()
    assert missing.value.reason is Reason.DEVICE_UNUSABLE


def test_a_missing_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ModuleType("cuda.bindings.driver")

    def no_library() -> None:
        raise RuntimeError("no libcuda here")

    api.cuDriverGetVersion = no_library  # type: ignore[attr-defined]
    install_api(monkeypatch, api)
    with pytest.raises(ResourceError, match=r"no libcuda here.*cpu backend"):
        CudaDriver()


def test_a_gpu_without_virtual_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    api = SimpleNamespace(
        cuDriverGetVersion=lambda: (0, 13000),
        cuInit=lambda flags: (0,),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetAttribute=lambda attribute, device: (0, 0),
        CUdevice_attribute=attributes,
    )
    install_api(monkeypatch, api)
    with pytest.raises(ResourceError, match="virtual memory"):
        CudaDriver()
