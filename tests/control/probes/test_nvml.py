"""What only the real adapter has: versions of the driver, its failures, and when it tries again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetokend.control.probes.nvml import NvmlProbe
from freetokend.control.probes.ports import ProbeError
from tests.control.probes.rigs import NvmlRig
from tests.fakes.nvml import (
    FUNCTION_NOT_FOUND,
    GIB,
    NO_PERMISSION,
    NOT_AVAILABLE,
    NOT_SUPPORTED,
    TIMEOUT,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeGpu,
    fresh_bindings,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlRig]:
    made = NvmlRig(tmp_path, monkeypatch.setenv)
    yield made
    made.heal()
    made.probe.close()


def failure(rig: NvmlRig, device: str = "") -> ProbeError:
    with pytest.raises(ProbeError) as caught:
        rig.probe.read(set(), device)
    return caught.value


def test_the_first_version_of_memory_tells_what_is_free_and_not_what_is_used(rig: NvmlRig) -> None:
    # Its "used" holds what the driver reserves: another quantity, which is not put in its place.
    rig.change(used=3 * GIB, reserved=1 * GIB, compute={7: GIB})
    rig.nvml.fail("nvmlDeviceGetMemoryInfo_v2", FUNCTION_NOT_FOUND)
    reading = rig.probe.read({7})
    assert (reading.total_bytes, reading.free_bytes) == (24 * GIB, 20 * GIB)
    assert reading.used_bytes is None
    assert reading.own_bytes == GIB
    assert reading.others_bytes is None


def test_memory_that_is_not_available_is_unknown(rig: NvmlRig) -> None:
    rig.change(total=NOT_AVAILABLE, used=NOT_AVAILABLE, reserved=0)
    reading = rig.probe.read(set())
    assert (reading.total_bytes, reading.used_bytes) == (None, None)
    for call in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"):
        rig.nvml.fail(call, NOT_SUPPORTED)  # a GPU that shares the host's memory
    reading = rig.probe.read(set())
    assert reading.total_bytes is reading.free_bytes is reading.used_bytes is None


def test_what_this_driver_does_not_have_is_unknown_and_no_fault(rig: NvmlRig) -> None:
    rig.change(clock_reasons=4, compute={7: GIB})
    for call in (
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ):
        rig.nvml.fail(call, NOT_SUPPORTED)
    rig.nvml.fail("nvmlDeviceGetGraphicsRunningProcesses_v3", FUNCTION_NOT_FOUND)
    reading = rig.probe.read({7})
    assert reading.link_generation is reading.link_generation_max is None
    assert reading.link_width is reading.link_width_max is None
    assert reading.throttle_reasons == ()
    assert reading.own_bytes == GIB
    rig.nvml.fail("nvmlDeviceGetComputeRunningProcesses_v3", NO_PERMISSION)
    reading = rig.probe.read({7})
    assert reading.processes is None
    assert reading.own_bytes is None


def test_clock_reasons_by_name_and_the_unnamed_by_number(rig: NvmlRig) -> None:
    rig.change(clock_reasons=0x1 | 0x20 | 0x40 | 0x10000)
    assert rig.probe.read(set()).throttle_reasons == (
        "hw-thermal-slowdown",
        "reason-0x10000",
        "sw-thermal-slowdown",
    )


def test_processes_have_their_names_where_they_can_be_seen(rig: NvmlRig) -> None:
    (rig.proc / "777").mkdir(parents=True)
    (rig.proc / "777/comm").write_text("cyberpunk\n")
    rig.change(graphics={777: GIB, 31337: 1})
    processes = rig.probe.read(set()).processes
    assert processes is not None
    assert [one.name for one in processes] == ["cyberpunk", None]


def test_a_call_that_fails_fails_the_whole_reading_with_the_drivers_words(rig: NvmlRig) -> None:
    rig.probe.read(set())
    rig.nvml.fail("nvmlDeviceGetCurrPcieLinkWidth", TIMEOUT, times=1)
    error = failure(rig)
    assert str(error) == "nvmlDeviceGetCurrPcieLinkWidth: Timeout"
    assert error.is_new
    assert rig.probe.read(set()).link_width == 16  # at once: the session goes on


def test_a_start_that_fails_is_tried_again_after_waits_that_double(rig: NvmlRig) -> None:
    rig.nvml.fail("nvmlInitWithFlags", VERSION_MISMATCH)
    tries_s, end_s = [], rig.clock.now_s + 200
    while rig.clock.now_s < end_s:
        error = failure(rig)
        assert "restart the machine" in str(error)
        if error.is_new:
            tries_s.append(rig.clock.now_s - 1000)
        rig.clock.now_s += 0.25
    assert tries_s == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    rig.heal()
    assert rig.probe.read(set()).total_bytes == 24 * GIB


def test_a_driver_that_goes_away_and_comes_back(rig: NvmlRig) -> None:
    rig.probe.read(set())
    rig.nvml.unload_driver()
    assert "load the kernel module" in str(failure(rig))
    assert not failure(rig).is_new
    rig.nvml.set_driver("590.1")
    assert not failure(rig).is_new  # its time has not come
    rig.clock.now_s += 1
    assert rig.probe.read(set()).driver_version == "590.1"


def test_eight_failures_on_end_and_the_library_is_set_up_anew(rig: NvmlRig) -> None:
    rig.probe.read(set())
    rig.nvml.fail("nvmlDeviceGetName", UNKNOWN)  # asked only when a session begins
    rig.fail()
    for _ in range(8):
        assert "MemoryInfo" in str(failure(rig))
    assert not failure(rig).is_new
    rig.clock.now_s += 1
    assert "nvmlDeviceGetName" in str(failure(rig))


def test_a_lost_gpu_is_looked_for_after_waits_that_double(rig: NvmlRig) -> None:
    rig.probe.read(set())
    rig.nvml.change(lost=True)
    assert rig.probe.read(set()).is_lost
    rig.nvml.change(lost=False)
    rig.clock.now_s += 0.9
    assert rig.probe.read(set()).is_lost
    rig.clock.now_s += 0.1
    assert not rig.probe.read(set()).is_lost
    # It succeeded: the next wait is the shortest again.
    rig.nvml.change(lost=True)
    assert rig.probe.read(set()).is_lost
    rig.nvml.change(lost=False)
    rig.clock.now_s += 1
    assert not rig.probe.read(set()).is_lost


def test_a_gpu_that_the_driver_no_longer_lists_is_lost(rig: NvmlRig) -> None:
    rig.probe.read(set())
    there = FakeGpu()
    rig.plug(FakeGpu(uuid="GPU-other"))
    # The session still answers for the first place in the list; a new one does not find the GPU.
    rig.nvml.fail("nvmlDeviceGetMemoryInfo_v2", 1, times=1)
    with pytest.raises(ProbeError):
        rig.probe.read(set())
    rig.clock.now_s += 1
    lost = rig.probe.read(set())
    assert (lost.is_lost, lost.uuid) == (True, there.uuid)
    rig.plug(there)
    rig.clock.now_s += 60
    assert not rig.probe.read(set()).is_lost


def test_a_gpu_that_was_never_there_is_a_fault_and_not_a_lost_one(rig: NvmlRig) -> None:
    assert "Not Found" in str(failure(rig, "GPU-typo"))
    # Another choice is tried at once.
    assert rig.probe.read(set()).total_bytes == 24 * GIB
    assert "no GPU 3, it has 1" in str(failure(rig, "3"))
    rig.plug()
    rig.clock.now_s += 60
    assert "no GPU" in str(failure(rig, "0"))


def test_one_that_is_lost_from_the_start_goes_by_the_name_it_was_asked_for(rig: NvmlRig) -> None:
    rig.nvml.change(lost=True)
    lost = rig.probe.read(set(), FakeGpu().uuid)
    assert (lost.is_lost, lost.uuid, lost.name) == (True, FakeGpu().uuid, "")


def test_a_missing_library_is_looked_for_once_a_minute(rig: NvmlRig) -> None:
    bindings = fresh_bindings(without_library=True)
    probe = NvmlProbe(bindings=bindings, clock=rig.clock)
    for is_new in (True, False):
        with pytest.raises(ProbeError, match="no GPU is watched") as caught:
            probe.read(set())
        assert caught.value.is_absent
        assert caught.value.is_new is is_new
    vars(bindings)["nvmlLib"] = vars(rig.nvml.bindings())["nvmlLib"]
    rig.clock.now_s += 60
    assert probe.read(set()).total_bytes == 24 * GIB
    probe.close()


def test_a_process_of_its_own_finds_the_library_by_the_loaders_path(rig: NvmlRig) -> None:
    """With the installed bindings, which the probe imports itself."""
    rig.change(used=5 * GIB)
    code = (
        "from freetokend.control.probes.nvml import NvmlProbe\n"
        "import sys\n"
        "assert 'pynvml' not in sys.modules\n"
        "print(NvmlProbe().read(set()).used_bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == 5 * GIB
