"""The watch: who is looked for, when it tells of a change, and that a bad look does not end it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from freetokend.control.probes import MachineReadings, MachineWatch, ProbeQuery, probe_query
from freetokend.control.probes.ports import ProbeError
from freetokend.link.messages import EngineSnapshot, EngineState
from tests.control.fakes import DESCRIPTION
from tests.fakes.probes import ScriptedGpu, ScriptedHost, scripted_probes

SNAPSHOT = EngineSnapshot(state=EngineState.STARTING, state_since_s=0.0, model="demo")


def test_whom_to_look_for() -> None:
    assert probe_query(SNAPSHOT, "auto") == ProbeQuery(own_pids=frozenset({os.getpid()}))
    on_gpu = replace(DESCRIPTION, device="cuda:GPU-b", cpus=(2, 3))
    ready = replace(SNAPSHOT, pid=4711, description=on_gpu)
    assert probe_query(ready, "auto") == ProbeQuery(
        gpu="GPU-b",
        gpu_pids=frozenset({4711}),
        own_pids=frozenset({4711, os.getpid()}),
        executor_cpus=frozenset({2, 3}),
    )
    assert probe_query(ready, "1").gpu == "1"
    for device in ("cpu", "host", "cuda", "cuda:0"):
        other = replace(ready, description=replace(on_gpu, device=device))
        assert probe_query(other, "auto").gpu == ""


async def test_it_tells_of_changes_and_not_of_every_figure() -> None:
    gpu, told = ScriptedGpu(), []
    watch = MachineWatch(
        scripted_probes(gpu, ScriptedHost(), gpu_deadline_s=30),
        ProbeQuery,
        tick_s=60,
        changed=lambda: told.append(watch.newest()),
    )
    assert watch.newest() == MachineReadings()
    first = await watch.look()
    assert told == [first]
    gpu.now_s = 1.0
    newest = await watch.look()
    assert newest != first
    assert watch.newest() is newest
    assert len(told) == 1
    for reason, changes_count in (("a", 2), ("a", 2), ("b", 3), ("", 4), ("", 4)):
        gpu.error = ProbeError(reason) if reason else None
        await watch.look()
        assert len(told) == changes_count
    await watch.close()
    assert gpu.closes_count == 1


async def test_it_looks_every_tick_and_one_look_at_a_time() -> None:
    gpu = ScriptedGpu()
    watch = MachineWatch(
        scripted_probes(gpu, ScriptedHost(), gpu_deadline_s=30),
        ProbeQuery,
        tick_s=0.01,
        changed=lambda: None,
    )
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        while gpu.reads_count < 3:  # noqa: ASYNC110 - the watch has its own pace
            await asyncio.sleep(0.001)
        # Out of turn, beside the watch: the worker would refuse a second call at a time.
        looks = await asyncio.gather(*(watch.look() for _ in range(5)))
    assert [look.faults for look in looks] == [()] * 5
    running.cancel()
    await asyncio.wait({running})
    await watch.close()
