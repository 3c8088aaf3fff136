"""What every GPU probe keeps to: the real one over the fake library, and the scripted one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freetokend.control.probes.ports import ProbeError
from tests.control.probes.rigs import GpuRig, NvmlRig, ScriptedRig
from tests.fakes.nvml import GIB, NOT_AVAILABLE, FakeGpu

OWN, GAME = 4242, 777


@pytest.fixture(params=["nvml", "scripted"])
def rig(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GpuRig]:
    if request.param == "scripted":
        yield ScriptedRig()
        return
    made = NvmlRig(tmp_path, monkeypatch.setenv)
    yield made
    made.heal()
    made.probe.close()


def test_memory_free_used_and_own(rig: GpuRig) -> None:
    rig.change(
        used=13 * GIB, reserved=1 * GIB, compute={OWN: 8 * GIB, 1: GIB}, graphics={GAME: 4 * GIB}
    )
    reading = rig.probe.read({OWN})
    assert reading.total_bytes == 24 * GIB
    assert reading.used_bytes == 13 * GIB
    assert reading.free_bytes == 10 * GIB  # neither used nor the driver's
    assert reading.own_bytes == 8 * GIB
    assert reading.others_bytes == 5 * GIB
    assert reading.processes is not None
    assert [(one.pid, one.used_bytes) for one in reading.processes] == [
        (OWN, 8 * GIB),
        (GAME, 4 * GIB),
        (1, GIB),
    ]


def test_a_process_that_computes_and_draws_is_counted_once(rig: GpuRig) -> None:
    rig.change(compute={OWN: 3 * GIB}, graphics={OWN: 3 * GIB, GAME: GIB})
    reading = rig.probe.read({OWN})
    assert reading.own_bytes == 3 * GIB
    assert reading.processes is not None
    assert [one.pid for one in reading.processes] == [OWN, GAME]


def test_not_available_is_unknown_and_neither_bytes_nor_nought(rig: GpuRig) -> None:
    rig.change(compute={OWN: NOT_AVAILABLE}, graphics={GAME: NOT_AVAILABLE})
    reading = rig.probe.read({OWN})
    assert reading.processes is not None
    assert {one.pid: one.used_bytes for one in reading.processes} == {OWN: None, GAME: None}
    assert reading.own_bytes is None
    assert reading.others_bytes is None
    # Where one of the lists does say, that counts; where one of our own is unknown, the sum is.
    rig.change(compute={OWN: NOT_AVAILABLE, 1: GIB}, graphics={OWN: 2 * GIB})
    assert rig.probe.read({OWN}).own_bytes == 2 * GIB
    rig.change(compute={OWN: NOT_AVAILABLE, 1: GIB}, graphics={})
    assert rig.probe.read({OWN, 1}).own_bytes is None


def test_own_processes_that_are_not_listed_have_unknown_bytes(rig: GpuRig) -> None:
    rig.change(used=9 * GIB, compute={31337: 9 * GIB})
    assert rig.probe.read({OWN}).own_bytes is None
    assert rig.probe.read({OWN}).others_bytes is None
    rig.change(compute={})
    assert rig.probe.read({OWN}).own_bytes is None
    assert rig.probe.read({OWN}).processes == ()
    # Without a process of ours nothing is ours.
    reading = rig.probe.read(set())
    assert (reading.own_bytes, reading.others_bytes) == (0, 9 * GIB)


def test_link_throttling_and_names(rig: GpuRig) -> None:
    rig.change(link_generation=1, link_width=8, clock_reasons=0x1 | 0x4)
    reading = rig.probe.read(set())
    assert (reading.link_generation, reading.link_generation_max) == (1, 4)
    assert (reading.link_width, reading.link_width_max) == (8, 16)
    assert reading.throttle_reasons == ("sw-power-cap",)
    assert reading.driver_version == "580.65.06"
    assert (reading.uuid, reading.name) == (FakeGpu().uuid, FakeGpu().name)
    rig.change(clock_reasons=0x1)  # idle
    assert rig.probe.read(set()).throttle_reasons == ()


def test_one_of_two_is_chosen_by_uuid_or_index(rig: GpuRig) -> None:
    rig.plug(FakeGpu(), FakeGpu(uuid="GPU-b", name="NVIDIA RTX PRO 6000", used=GIB))
    assert rig.probe.read(set(), "GPU-b").used_bytes == GIB
    assert rig.probe.read(set(), "0").used_bytes == 0
    assert rig.probe.read(set(), "1").uuid == "GPU-b"
    with pytest.raises(ProbeError, match=r"2 GPUs.*control\.gpu"):
        rig.probe.read(set())
    for missing in ("GPU-c", "2"):
        with pytest.raises(ProbeError):
            rig.probe.read(set(), missing)


def test_a_failure_is_told_and_over_when_it_is_over(rig: GpuRig) -> None:
    assert rig.probe.read(set()).free_bytes is not None
    rig.fail()
    for _ in range(12):
        with pytest.raises(ProbeError, match="Unknown Error") as caught:
            rig.probe.read(set())
        assert not caught.value.is_absent
    rig.heal()
    assert rig.probe.read(set()).free_bytes is not None


def test_a_lost_gpu_is_a_reading_without_quantities_until_it_is_back(rig: GpuRig) -> None:
    rig.change(compute={OWN: GIB})
    there = rig.probe.read({OWN})
    rig.change(lost=True)
    for _ in range(3):
        lost = rig.probe.read({OWN})
        assert lost.is_lost
        assert (lost.uuid, lost.name, lost.driver_version) == (
            there.uuid,
            there.name,
            there.driver_version,
        )
        assert lost.total_bytes is lost.free_bytes is lost.used_bytes is lost.own_bytes is None
        assert lost.processes is None
        assert lost.others_bytes is None
    rig.change(lost=False)
    back = rig.probe.read({OWN})
    assert not back.is_lost
    assert back.own_bytes == GIB


def test_without_the_driver_a_gpu_is_absent_which_is_no_fault(rig: GpuRig) -> None:
    with pytest.raises(ProbeError) as caught:
        rig.without_driver().read(set())
    assert caught.value.is_absent


def test_closing_twice_and_reading_afterwards(rig: GpuRig) -> None:
    rig.probe.read(set())
    rig.probe.close()
    rig.probe.close()
    assert rig.probe.read(set()).total_bytes == 24 * GIB
