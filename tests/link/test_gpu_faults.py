"""An engine that its GPU ends is followed by one on the CPU, and the GPU is tried again later."""

from __future__ import annotations

from typing import Any

import pytest

from freetokend.link.messages import EngineSettings, EngineState, FinishReason
from freetokend.policy.gpu_faults import GpuPatience
from freetokend.policy.health import GPU_NOT_USED
from freetokend.policy.restart import RestartBudget
from tests.support.scripted import greedy, scripted_engine

ON_GPU = "cuda:GPU-1"
# One death is all that it stands: the second would be the end.
ONCE = RestartBudget(restarts_count=1, first_delay_s=0.01, delay_factor=1.0)
NEVER = GpuPatience(first_s=1e6, most_s=1e6)
SOON = GpuPatience(first_s=0.05)
AUTO = EngineSettings(model="m", device="auto")


def script(**fault: Any) -> dict[str, Any]:
    crash = {"at": "step", "step_index": 1, "action": "signal", "signal": 11, "on_gpu": True}
    return {
        "description": {"device": ON_GPU},
        # What it says while it loads has left it before it dies.
        "load": {"chunks_count": 4, "chunk_s": 0.4 if fault.get("at") == "load" else 0.0},
        "faults": [{**crash, **fault}],
    }


@pytest.mark.parametrize("at", ["step", "load"])
async def test_the_next_engine_does_without_the_gpu(at: str) -> None:
    async with scripted_engine(
        script(at=at), settings=AUTO, budget=ONCE, gpu_patience=NEVER
    ) as harness:
        if at == "step":
            seen = await harness.wait_state(EngineState.READY)
            assert seen.description is not None
            assert seen.description.device == ON_GPU
            (end,) = await harness.collect(greedy("lost"))
            assert end.finish_reason is FinishReason.ERROR
        seen = await harness.wait_until(
            lambda now: now.state is EngineState.READY and now.gpu_faults_count == 1
        )
        assert seen.description is not None
        assert seen.description.device == "cpu"
        (note,) = [one for one in seen.description.notes if one.startswith(GPU_NOT_USED)]
        assert "SIGSEGV" in note
        assert "SIGSEGV" in seen.gpu_fault
        assert seen.gpu_retry_s is not None
        for index in range(3):
            updates = await harness.collect(greedy(f"served-{index}"))
            assert updates[-1].finish_reason is not FinishReason.ERROR


async def test_the_gpu_is_tried_again_when_nobody_is_served() -> None:
    async with scripted_engine(
        script(once=True), settings=AUTO, budget=ONCE, gpu_patience=SOON
    ) as harness:
        await harness.wait_state(EngineState.READY)
        await harness.collect(greedy("lost"))
        seen = await harness.wait_until(
            lambda now: (
                now.state is EngineState.READY and now.gpu_faults_count == 1 and not now.gpu_fault
            )
        )
        assert seen.description is not None
        assert seen.description.device == ON_GPU
        assert seen.gpu_retry_s is None
        updates = await harness.collect(greedy("served"))
        assert updates[-1].finish_reason is not FinishReason.ERROR
        assert harness.supervisor.snapshot().restarts_count == 2


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (EngineSettings(model="m", device="cuda"), {}),
        (EngineSettings(model="m", device="auto", backend="hybrid"), {}),
        (AUTO, {"signal": 9}),
    ],
)
async def test_what_was_asked_for_is_started_again(
    settings: EngineSettings, fault: dict[str, Any]
) -> None:
    async with scripted_engine(
        script(once=True, **fault), settings=settings, budget=ONCE, gpu_patience=NEVER
    ) as harness:
        await harness.wait_state(EngineState.READY)
        await harness.collect(greedy("lost"))
        seen = await harness.wait_until(
            lambda now: now.state is EngineState.READY and now.restarts_count == 1
        )
        assert seen.description is not None
        assert seen.description.device == ON_GPU
        assert (seen.gpu_faults_count, seen.gpu_fault) == (0, "")
