"""A daemon that watches a GPU through the driver's library, which is the fake one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.daemon.running import DEADLINE_S, Daemon, ctl, ctl_json, scripted_daemon
from tests.fakes.nvml import GIB, NOT_AVAILABLE, UNKNOWN, FakeGpu, FakeNvml

SCRIPT: dict[str, Any] = {"tokens": {"kind": "cycle", "token_ids": [68, 69, 70]}}
GAME = 777


async def machine(running: Daemon, until: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """What status tells of the machine, once it is as wanted."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            seen: dict[str, Any] | None = (await ctl_json(running, "status"))["machine"]
            if seen is not None and until(seen):
                return seen


def has_gpu(seen: dict[str, Any]) -> bool:
    return seen["gpu"] is not None


def gpu_fails(seen: dict[str, Any]) -> bool:
    return [fault["probe"] for fault in seen["faults"]] == ["gpu"]


async def test_a_neighbour_a_failing_driver_and_a_lost_gpu_are_seen_while_it_runs(
    tmp_path: Path,
) -> None:
    nvml = FakeNvml(tmp_path, FakeGpu(used=GIB))
    quick = ("--set", "control.tick_s=0.05")
    async with scripted_daemon(SCRIPT, *quick, environment=nvml.environment) as running:
        engine_pid = await running.engine_pid()
        nvml.change(used=9 * GIB, reserved=GIB, compute={engine_pid: 8 * GIB})
        seen = await machine(running, lambda seen: has_gpu(seen) and seen["gpu"]["own_bytes"])
        assert seen["gpu"]["own_bytes"] == 8 * GIB
        assert seen["gpu"]["free_bytes"] == 14 * GIB
        assert seen["gpu"]["processes"][0]["name"]
        assert (seen["faults"], seen["nvml_errors_count"]) == ([], 0)

        nvml.change(used=21 * GIB, graphics={GAME: 12 * GIB})
        seen = await machine(running, lambda seen: seen["gpu"]["used_bytes"] == 21 * GIB)
        assert (seen["gpu"]["others_bytes"], seen["gpu"]["free_bytes"]) == (13 * GIB, 2 * GIB)
        nvml.change(compute={engine_pid: NOT_AVAILABLE})
        seen = await machine(running, lambda seen: seen["gpu"]["own_bytes"] is None)
        assert seen["gpu"]["others_bytes"] is None

        nvml.fail("nvmlDeviceGetMemoryInfo_v2", UNKNOWN)
        seen = await machine(running, gpu_fails)
        assert seen["gpu"] is None
        assert "Unknown Error" in seen["faults"][0]["reason"]
        seen = await machine(running, lambda seen: seen["nvml_errors_count"] >= 4)
        base = await running.base_url()
        async with httpx.AsyncClient(base_url=base, timeout=DEADLINE_S) as http:
            metrics = (await http.get("/metrics")).text
        assert 'freetoken_probe_failing{probe="gpu"} 1.0' in metrics
        assert "freetoken_gpu_memory_free_bytes{" not in metrics
        nvml.heal()
        assert (await machine(running, has_gpu))["faults"] == []
        nvml.change(lost=True)
        seen = await machine(running, lambda seen: has_gpu(seen) and seen["gpu"]["lost"])
        assert seen["gpu"]["free_bytes"] is None
        nvml.change(lost=False)
        await machine(running, lambda seen: has_gpu(seen) and not seen["gpu"]["lost"])
        running.terminate()
        assert await running.wait_exit() == 0
    # However often they failed: one line each, and one when it was over.
    assert running.log.count("probe-failed probe=gpu") == 2
    assert running.log.count("probe-works-again probe=gpu") == 2


async def test_a_driver_that_hangs_delays_neither_status_nor_the_stop(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    loop = asyncio.get_running_loop()
    async with scripted_daemon(SCRIPT, environment=nvml.environment) as running:
        base = await running.base_url()
        await machine(running, has_gpu)
        nvml.hang("nvmlDeviceGetMemoryInfo_v2", for_ms=600_000)
        assert "no answer" in (await machine(running, gpu_fails))["faults"][0]["reason"]
        async with httpx.AsyncClient(base_url=base, timeout=DEADLINE_S) as http:
            begun_s = loop.time()
            for _ in range(20):
                assert "freetoken_nvml_errors_total 1.0" in (await http.get("/metrics")).text
            assert loop.time() - begun_s < 10  # one wait for the driver each would be twenty
        running.terminate()
        assert await running.wait_exit() == 0


async def test_without_a_driver_one_line_says_so_and_nothing_else_changes(tmp_path: Path) -> None:
    # What the loader takes for the library is none: so it is on machines that have a driver too.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    nowhere = {"LD_LIBRARY_PATH": str(tmp_path)}
    quick = ("--set", "control.tick_s=0.05")
    async with scripted_daemon(SCRIPT, *quick, environment=nowhere) as running:
        await running.engine_pid()
        seen = await machine(running, lambda seen: seen["gpu_absent_reason"])
        assert (seen["gpu"], seen["faults"], seen["nvml_errors_count"]) == (None, [], 0)
        assert seen["host"]["mem_available_bytes"] > 0
        code, out = await ctl(running, "status")
        assert code == 0
        assert "gpu        unknown (nvmlInit: NVML Shared Library Not Found; there is no" in out
        running.terminate()
        assert await running.wait_exit() == 0
    assert running.log.count("gpu-not-watched") == 1
    assert "probe-failed" not in running.log
