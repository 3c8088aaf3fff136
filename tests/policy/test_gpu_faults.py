"""When an engine's death is the GPU's doing, and when the GPU is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.errors import Reason
from freetokend.policy.gpu_faults import (
    GpuDeath,
    GpuPatience,
    GpuState,
    after_engine_death,
    is_gpu_fault,
    tried_again,
)

PATIENCE = GpuPatience(first_s=10.0, most_s=70.0, forget_s=1000.0)
CRASH = GpuDeath(
    on_gpu=True,
    signal="SIGSEGV",
    stuck=False,
    reason=Reason.ENGINE_FAILED,
    lived_s=5.0,
    cause="died with signal 11 (SIGSEGV)",
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"signal": "SIGABRT"}, True),
        ({"on_gpu": False}, False),
        ({"signal": "SIGKILL"}, False),  # the operator, or the kernel without memory
        ({"signal": "SIGTERM"}, False),
        ({"signal": "", "stuck": True}, True),
        ({"signal": "", "reason": Reason.DEVICE_UNUSABLE}, True),
        ({"signal": "", "reason": Reason.INTERNAL}, True),
        ({"signal": ""}, False),
        ({"signal": "", "reason": Reason.CONFIG_INVALID}, False),
        ({"signal": "", "reason": Reason.HOST_MEMORY}, False),
    ],
)
def test_what_a_gpu_does(changes: dict[str, object], expected: bool) -> None:
    death = replace(CRASH, **changes)  # type: ignore[arg-type]
    assert is_gpu_fault(death) is expected
    after = after_engine_death(PATIENCE, GpuState(), death, 100.0)
    assert after == (
        GpuState(faults_count=1, recent_count=1, fault=CRASH.cause, retry_s=110.0)
        if expected
        else GpuState()
    )


@given(st.lists(st.sampled_from([5.0, 2000.0]), min_size=1, max_size=40))
def test_each_wait_is_twice_the_last_until_a_good_time(lives: list[float]) -> None:
    state, expected_s = GpuState(), 0.0
    for count, lived_s in enumerate(lives, start=1):
        expected_s = 10.0 if lived_s >= 1000.0 or not expected_s else min(2 * expected_s, 70.0)
        state = after_engine_death(PATIENCE, state, replace(CRASH, lived_s=lived_s), 0.0)
        assert state.faults_count == count
        assert state.retry_s == expected_s
        state = tried_again(state)
        assert (state.fault, state.retry_s) == ("", None)
