"""The supervisor with real engine processes that die, hang, lie and are sent away."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from freetokend.core.errors import InternalError, Reason, UnavailableError
from freetokend.link.control_side import LivenessLimits, PoolHandover
from freetokend.link.messages import EngineSettings, EngineState, FinishReason
from freetokend.policy.restart import RestartBudget
from tests.support.scripted import (
    DEADLINE_S,
    Gate,
    greedy,
    make_gate,
    scripted_argv,
    scripted_engine,
    supervised,
    write_script,
)

FAST = RestartBudget(restarts_count=2, first_delay_s=0.01, delay_factor=1.0)
CYCLE = {"kind": "cycle", "token_ids": [7]}


async def test_loading_is_refused_with_its_reason_and_shown_in_bytes() -> None:
    script = {
        "load": {"chunks_count": 4, "total_bytes": 4000},
        "faults": [{"at": "load", "action": "hang"}],
    }
    async with scripted_engine(script) as harness:
        with pytest.raises(UnavailableError) as refusal:
            harness.supervisor.generate(greedy("early"))
        assert refusal.value.reason is Reason.LOADING
        assert refusal.value.retry_after_s is not None
        seen = await harness.wait_until(lambda s: s.load is not None and s.load.done_bytes > 0)
        assert seen.state is EngineState.LOADING
        assert seen.load is not None
        assert (seen.load.stage, seen.load.total_bytes) == ("read", 4000)
        with pytest.raises(UnavailableError) as refusal:
            harness.supervisor.generate(greedy("still-early"))
        assert refusal.value.reason is Reason.LOADING


async def test_cancel_reaches_the_engine_within_one_step() -> None:
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        directory = Path(name)
        gate = Gate(make_gate(directory))
        script = {"tokens": CYCLE, "gate": str(directory / "gate"), "heartbeat_s": 0.02}
        argv = scripted_argv(write_script(directory, script))
        async with supervised(argv, directory=directory) as harness, asyncio.timeout(DEADLINE_S):
            await harness.wait_state(EngineState.READY)
            dropped = harness.supervisor.generate(greedy("dropped", max_new_tokens=1000))
            gate.open()
            await anext(dropped)
            await dropped.aclose()
            # Messages keep their order: when the second request has its first token, the cancel
            # has been taken, and no step since then may have worked for the first request.
            kept = harness.supervisor.generate(greedy("kept", max_new_tokens=1000))
            first = asyncio.create_task(anext(kept))
            generation = 0
            while not first.done():
                gate.open()
                generation = await harness.supervisor.changed(generation)
            stats = harness.supervisor.snapshot().stats
            assert stats.running_count == 1
            assert stats.decode_tokens_count == stats.steps_count
            await kept.aclose()
        gate.close()


async def test_fault_that_a_restart_cannot_mend_ends_in_failed() -> None:
    fault = {"at": "load", "action": "fail", "reason": "model_invalid", "message": "shard 3 short"}
    async with scripted_engine({"faults": [fault]}) as harness:
        failed = await harness.wait_state(EngineState.FAILED)
        assert failed.restarts_count == 0
        assert "shard 3 short" in failed.cause
        assert "exit code 65" in failed.cause
        end = harness.supervisor.last_end
        assert end is not None
        assert end.reason is Reason.MODEL_INVALID
        assert not end.was_ready
        with pytest.raises(UnavailableError, match="shard 3 short") as refusal:
            harness.supervisor.generate(greedy("late"))
        assert refusal.value.reason is Reason.ENGINE_UNAVAILABLE


async def test_budget_is_spent_then_failed() -> None:
    fault = {"at": "load", "action": "exit", "exit_code": 70}
    async with scripted_engine({"faults": [fault]}, budget=FAST) as harness:
        failed = await harness.wait_state(EngineState.FAILED)
        assert failed.restarts_count == 2
        assert "exit code 70" in failed.cause
        assert failed.pid is None


async def test_silent_exit_with_a_config_code_is_not_repeated() -> None:
    async with scripted_engine(
        {"faults": [{"at": "start", "action": "exit", "exit_code": 78}]}
    ) as h:
        failed = await h.wait_state(EngineState.FAILED)
        assert failed.restarts_count == 0


async def test_engine_that_dies_once_serves_again_and_the_cause_stays() -> None:
    fault = {"at": "step", "step_index": 3, "action": "signal", "signal": 11, "once": True}
    async with scripted_engine({"tokens": CYCLE, "faults": [fault]}, budget=FAST) as harness:
        await harness.wait_state(EngineState.READY)
        updates = await harness.collect(greedy("lost"))
        assert updates[-1].error_reason is Reason.ENGINE_FAILED
        assert "SIGSEGV" in updates[-1].error_message
        await harness.wait_until(lambda s: s.restarts_count == 1 and s.state is EngineState.READY)
        assert "SIGSEGV" in harness.supervisor.snapshot().cause
        updates = await harness.collect(greedy("found"))
        assert updates[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"action": "hang"}, "no progress"),
        ({"action": "signal", "signal": 19}, "no heartbeat"),  # SIGSTOP: every thread rests
    ],
)
async def test_stuck_engine_is_killed_and_replaced(fault: dict[str, Any], words: str) -> None:
    script = {"tokens": CYCLE, "heartbeat_s": 0.02}
    script |= {"faults": [{"at": "step", "step_index": 2, "once": True, **fault}]}
    limits = LivenessLimits(stuck_s=0.4)
    async with scripted_engine(script, budget=FAST, limits=limits) as harness:
        first = await harness.wait_state(EngineState.READY)
        updates = await harness.collect(greedy("stuck"))
        assert updates[-1].error_reason is Reason.ENGINE_FAILED
        assert words in updates[-1].error_message
        again = await harness.wait_until(
            lambda s: s.state is EngineState.READY and s.pid != first.pid
        )
        assert words in again.cause
        assert "SIGKILL" in again.cause


async def test_idle_engine_is_left_alone() -> None:
    """With a stuck limit of a few heartbeats, many of them pass and nothing happens."""
    limits = LivenessLimits(stuck_s=0.2)
    async with scripted_engine({"heartbeat_s": 0.01}, limits=limits) as harness:
        ready = await harness.wait_state(EngineState.READY)
        await harness.wait_until(lambda s: s.last_progress_s > ready.last_progress_s + 0.5)
        assert harness.supervisor.snapshot().restarts_count == 0


async def test_engine_of_another_build_is_named_and_not_restarted() -> None:
    async with scripted_engine({"link_version": 9999}) as harness:
        failed = await harness.wait_state(EngineState.FAILED)
        assert failed.restarts_count == 0
        assert "link version 9999" in failed.cause
        assert "reinstall" in failed.cause


async def test_engine_that_never_connects_is_replaced() -> None:
    argv = (sys.executable, "-c", "import signal; print('thinking'); signal.pause()")
    limits = LivenessLimits(connect_s=0.3)
    budget = RestartBudget(restarts_count=0)
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        async with supervised(argv, directory=Path(name), limits=limits, budget=budget) as harness:
            failed = await harness.wait_state(EngineState.FAILED)
            assert "did not connect" in failed.cause


async def test_last_lines_of_a_crash_are_in_the_cause_and_pass_through() -> None:
    argv = (sys.executable, "-c", "import sys; print('out'); sys.exit('<3>no such kernel')")
    budget = RestartBudget(restarts_count=0)
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        async with supervised(argv, directory=Path(name), budget=budget) as harness:
            failed = await harness.wait_state(EngineState.FAILED)
            assert "exit code 1" in failed.cause
            assert "no such kernel" in failed.cause
            assert sorted(harness.lines) == ["<3>no such kernel", "out"]


_DIES_THEN_HANGS = """
import pathlib, signal, sys
marker = pathlib.Path(sys.argv[1])
if marker.exists():
    signal.pause()
marker.touch()
sys.exit("the user's secret, in an engine log line")
"""


async def test_refusal_after_a_death_is_a_restart_and_tells_no_log_lines() -> None:
    """While the second engine starts, nothing is "being loaded" for the first time."""
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        argv = (sys.executable, "-c", _DIES_THEN_HANGS, f"{name}/marker")
        async with supervised(argv, directory=Path(name), budget=FAST) as harness:
            seen = await harness.wait_until(
                lambda s: s.state is EngineState.STARTING and s.restarts_count == 1
            )
            assert "secret" in seen.cause, "status and journal do get the line"
            with pytest.raises(UnavailableError, match="being restarted") as asked:
                harness.supervisor.check_admission()
            with pytest.raises(UnavailableError) as refused:
                harness.supervisor.generate(greedy("r"))
            for refusal in (asked.value, refused.value):
                assert refusal.reason is Reason.ENGINE_UNAVAILABLE
                assert "exit code 1" in refusal.message
                assert "secret" not in refusal.message
                assert refusal.retry_after_s is not None


async def test_missing_engine_program_is_named() -> None:
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        argv = (f"{name}/freetokend-engine",)
        async with supervised(argv, directory=Path(name)) as harness:
            failed = await harness.wait_state(EngineState.FAILED)
            assert f"{name}/freetokend-engine cannot be started" in failed.cause


async def test_queue_is_bounded() -> None:
    settings = EngineSettings(model="m", max_running_count=1, max_waiting_count=2)
    async with scripted_engine({"tokens": CYCLE, "step_s": 0.01}, settings=settings) as harness:
        await harness.wait_state(EngineState.READY)
        streams = [harness.supervisor.generate(greedy(f"r{i}")) for i in range(3)]
        for attempt in (
            harness.supervisor.check_admission,
            lambda: harness.supervisor.generate(greedy("r3")),
        ):
            with pytest.raises(UnavailableError) as refusal:
                attempt()
            assert refusal.value.reason is Reason.QUEUE_FULL
        async with asyncio.timeout(DEADLINE_S):
            for stream in streams:
                assert [u async for u in stream][-1].finish_reason is FinishReason.LENGTH


async def test_request_id_in_flight_is_refused() -> None:
    async with scripted_engine({"tokens": CYCLE, "step_s": 0.01}) as harness:
        await harness.wait_state(EngineState.READY)
        stream = harness.supervisor.generate(greedy("twin"))
        with pytest.raises(InternalError, match="twin"):
            harness.supervisor.generate(greedy("twin"))
        await stream.aclose()


async def test_drain_lets_running_requests_finish_and_can_be_taken_back() -> None:
    async with scripted_engine({"tokens": CYCLE, "step_s": 0.005}) as harness:
        await harness.wait_state(EngineState.READY)
        stream = harness.supervisor.generate(greedy("running", max_new_tokens=20))
        draining = asyncio.create_task(harness.supervisor.drain(DEADLINE_S))
        snapshot = await harness.wait_state(EngineState.DRAINING)
        assert snapshot.busy
        with pytest.raises(UnavailableError) as refusal:
            harness.supervisor.generate(greedy("late"))
        assert refusal.value.reason is Reason.DRAINING
        updates = [update async for update in stream]
        assert updates[-1].finish_reason is FinishReason.LENGTH
        assert await draining == 0
        harness.supervisor.resume()
        assert harness.supervisor.snapshot().state is EngineState.READY
        await harness.collect(greedy("accepted"))


async def test_drain_that_is_too_short_says_what_still_runs() -> None:
    async with scripted_engine({"tokens": CYCLE, "step_s": 0.01}) as harness:
        await harness.wait_state(EngineState.READY)
        stream = harness.supervisor.generate(greedy("long", max_new_tokens=8000))
        assert await harness.supervisor.drain(0.05) == 1
        await harness.supervisor.stop(drain_timeout_s=0.05)
        async with asyncio.timeout(DEADLINE_S):
            last = [update async for update in stream][-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error_reason is Reason.DRAINING


async def test_stop_does_not_wait_for_a_frozen_engine() -> None:
    fault = {"at": "step", "step_index": 1, "action": "signal", "signal": 19}
    async with scripted_engine({"tokens": CYCLE, "faults": [fault]}) as harness:
        ready = await harness.wait_state(EngineState.READY)
        assert ready.pid is not None
        stream = harness.supervisor.generate(greedy("frozen"))
        await harness.supervisor.stop(drain_timeout_s=0.05, exit_timeout_s=0.05)
        assert [u async for u in stream][-1].error_reason is Reason.DRAINING
        with pytest.raises(ProcessLookupError):
            os.kill(ready.pid, 0)


async def test_every_engine_gets_the_same_pool() -> None:
    fd = os.memfd_create("pool-of-a-test")
    try:
        os.truncate(fd, 12345678)
        pool = PoolHandover(name="pool-of-a-test", length_bytes=12345678, fd=fd)
        fault = {"at": "step", "step_index": 1, "action": "signal", "once": True}
        async with scripted_engine({"faults": [fault]}, pool=pool, budget=FAST) as harness:
            first = await harness.wait_state(EngineState.READY)
            await harness.collect(greedy("killer"))
            second = await harness.wait_until(
                lambda s: s.state is EngineState.READY and s.restarts_count == 1
            )
        for snapshot in (first, second):
            assert snapshot.description is not None
            assert snapshot.description.pool_bytes == 12345678
        assert os.fstat(fd).st_size == 12345678
    finally:
        os.close(fd)


def environment_names(pid: int | None) -> set[str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {entry.partition(b"=")[0].decode() for entry in entries}


async def test_engine_environment_has_no_service_manager_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"):
        monkeypatch.setenv(name, "1")
    async with scripted_engine() as harness:
        ready = await harness.wait_state(EngineState.READY)
        names = environment_names(ready.pid)
        assert "PATH" in names
        assert not names & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"}


async def test_log_level_reaches_running_and_later_engines() -> None:
    async with scripted_engine({"tokens": CYCLE}) as harness:
        await harness.wait_state(EngineState.READY)
        harness.supervisor.set_log_level("debug")
        updates = await harness.collect(greedy("after"))
        assert updates[-1].finish_reason is FinishReason.LENGTH
