"""When an engine counts as stuck: a table of stories on a clock of our own."""

from __future__ import annotations

import pytest

from freetokend.link.liveness import Liveness, LivenessLimits

LIMITS = LivenessLimits(stuck_s=10.0, connect_s=30.0)


def attached() -> Liveness:
    liveness = Liveness(LIMITS, 0.0)
    liveness.attached(1.0)
    return liveness


@pytest.mark.parametrize(("now_s", "faulty"), [(29.9, False), (30.1, True)])
def test_engine_that_never_connects(now_s: float, faulty: bool) -> None:
    assert ("did not connect" in Liveness(LIMITS, 0.0).fault(now_s)) is faulty


def test_silence_is_a_fault_even_when_idle() -> None:
    liveness = attached()
    liveness.heartbeat(2.0, progress_count=1, busy=False)
    assert liveness.fault(12.0) == ""
    assert "no heartbeat" in liveness.fault(12.1)


def test_idle_engine_is_healthy_for_ever() -> None:
    liveness = attached()
    for second in range(1, 10_000):
        liveness.heartbeat(float(second), progress_count=7, busy=False)
        assert liveness.fault(second + 0.5) == ""


def test_busy_without_progress_is_a_fault() -> None:
    liveness = attached()
    liveness.heartbeat(2.0, progress_count=1, busy=True)
    for second in range(3, 12):
        liveness.heartbeat(float(second), progress_count=1, busy=True)
        assert liveness.fault(float(second)) == ""
    liveness.heartbeat(12.5, progress_count=1, busy=True)
    assert "no progress" in liveness.fault(12.5)


def test_long_prefill_that_moves_is_progress() -> None:
    liveness = attached()
    for second in range(2, 1000, 5):
        liveness.heartbeat(float(second), progress_count=second, busy=True)
        assert liveness.fault(second + 4.9) == ""


def test_work_after_an_idle_hour_starts_afresh() -> None:
    liveness = attached()
    liveness.heartbeat(3600.0, progress_count=1, busy=False)
    liveness.heartbeat(3601.0, progress_count=1, busy=True)
    liveness.heartbeat(3610.0, progress_count=1, busy=True)
    assert liveness.fault(3610.0) == ""


def test_loading_counts_as_busy() -> None:
    liveness = attached()
    liveness.heartbeat(5.0, progress_count=0, busy=True)
    liveness.heartbeat(11.0, progress_count=0, busy=True)
    assert liveness.fault(11.0) == ""
    liveness.worked(12.0)
    liveness.heartbeat(21.0, progress_count=0, busy=True)
    assert liveness.fault(21.0) == ""


def test_our_own_pause_is_forgiven() -> None:
    liveness = attached()
    liveness.heartbeat(2.0, progress_count=1, busy=True)
    liveness.forgive(100.0)
    assert liveness.fault(111.0) == ""
    assert liveness.fault(112.5) != ""
