"""All probes together: faults, their record, and a driver that hangs."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from freetokend.control.probes import ProbeQuery, ProbeSet, real_probes
from freetokend.control.probes.nvml import NvmlProbe
from freetokend.control.probes.ports import ProbeError
from freetokend.control.probes.worker import DeadlineWorker
from tests.fakes.nvml import GIB, FakeGpu, FakeNvml
from tests.fakes.probes import ScriptedGpu, ScriptedHost, scripted_probes

OWN = 4242
QUERY = ProbeQuery(gpu_pids=frozenset({OWN}), executor_cpus=frozenset({0, 1}))


@pytest.fixture
def gpu() -> Iterator[ScriptedGpu]:
    made = ScriptedGpu(FakeGpu(used=GIB, compute={OWN: GIB}))
    yield made
    made.gate.set()


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


@pytest.fixture
async def probes(gpu: ScriptedGpu, host: ScriptedHost) -> AsyncIterator[ProbeSet]:
    made = scripted_probes(gpu, host, gpu_deadline_s=30)
    yield made
    gpu.gate.set()
    await made.close()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.message.startswith(("probe-", "gpu-not"))
    ]


async def until_it_answers(probes: ProbeSet) -> None:
    async with asyncio.timeout(30):
        while (seen := await probes.tick(QUERY)).gpu is None:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.001)
    assert seen.faults == ()


async def test_one_look_holds_everything(
    probes: ProbeSet, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    host.executor_load = 0.25
    await probes.tick(QUERY)
    gpu.now_s = 5.0
    seen = await probes.tick(QUERY)
    assert seen.gpu is not None
    assert seen.gpu.own_bytes == GIB
    assert seen.host is not None
    assert seen.host.mem_available_bytes == 32 << 30
    assert seen.host.executor_load == 0.25
    assert seen.host.taken_s == 5.0
    assert (seen.faults, seen.gpu_absent_reason, seen.nvml_errors_count) == ((), "", 0)
    # Nobody asks for CPUs that nobody has told yet.
    assert (await probes.tick(ProbeQuery())).host.executor_load is None  # type: ignore[union-attr]


async def test_a_failed_probe_leaves_unknown_and_never_the_last_known(
    probes: ProbeSet, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    host.pressure_error = ValueError("odd line")
    gpu.error = ProbeError("nvmlDeviceGetMemoryInfo: Unknown Error")
    before = await probes.tick(QUERY)
    seen = await probes.tick(QUERY)
    assert seen.gpu is None
    assert seen.host is not None
    assert seen.host.memory_pressure is None
    assert seen.host.mem_total_bytes == 64 << 30  # the others go on
    assert [(one.probe, one.reason, one.count) for one in seen.faults] == [
        ("gpu", "nvmlDeviceGetMemoryInfo: Unknown Error", 2),
        ("pressure", "ValueError: odd line", 2),
    ]
    assert before.faults[0].since_s == seen.faults[0].since_s
    host.memory_error = ProbeError("no meminfo")
    host.load_error = ProbeError("no stat")
    blind = (await probes.tick(QUERY)).host
    assert blind is not None
    assert blind.mem_available_bytes is blind.cgroup_limit_bytes is blind.executor_load is None


async def test_a_fault_is_counted_each_time_and_logged_once_per_change(
    probes: ProbeSet, gpu: ScriptedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    for reason in ("a", "a", "a", "b", "b"):
        gpu.error = ProbeError(reason)
        seen = await probes.tick(QUERY)
    assert seen.nvml_errors_count == seen.faults[0].count == 5
    gpu.error = ProbeError("b", is_new=False)  # it waits before it tries again
    assert (await probes.tick(QUERY)).nvml_errors_count == 5
    gpu.error, gpu.now_s = None, 7.0
    for _ in range(3):
        seen = await probes.tick(QUERY)
    assert seen.faults == ()
    assert seen.nvml_errors_count == 5
    assert logged(caplog) == ["probe-failed", "probe-failed", "probe-works-again"]


async def test_a_lost_gpu_is_a_fault_that_is_counted_and_logged_once(
    probes: ProbeSet, gpu: ScriptedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.gpus = [FakeGpu(lost=True)]
    for _ in range(4):
        seen = await probes.tick(QUERY)
    assert seen.gpu is not None
    assert seen.gpu.is_lost
    assert re.match(r"GPU-\S+ is lost: .* reset", seen.faults[0].reason)
    assert seen.nvml_errors_count == 1
    gpu.gpus = [FakeGpu()]
    assert (await probes.tick(QUERY)).faults == ()
    assert logged(caplog) == ["probe-failed", "probe-works-again"]


async def test_without_a_driver_there_is_one_line_and_no_fault(
    probes: ProbeSet, gpu: ScriptedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.error = ProbeError("there is no driver", is_absent=True)
    for _ in range(40):
        seen = await probes.tick(QUERY)
    assert (seen.gpu, seen.faults, seen.nvml_errors_count) == (None, (), 0)
    assert seen.gpu_absent_reason == "there is no driver"
    assert logged(caplog) == ["gpu-not-watched"]
    gpu.error = None
    assert (await probes.tick(QUERY)).gpu_absent_reason == ""


async def test_a_hanging_driver_is_one_fault_one_thread_and_no_delay(
    gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    loop = asyncio.get_running_loop()
    probes = scripted_probes(gpu, host, gpu_deadline_s=0.2)
    gpu.gate.clear()
    seen = await probes.tick(QUERY)
    threads_count = threading.active_count()
    assert "no answer within 0.2 s" in seen.faults[0].reason
    begun_s = loop.time()
    for _ in range(50):
        seen = await probes.tick(QUERY)
    assert loop.time() - begun_s < 0.2 * 25  # they do not wait for it again
    assert seen.gpu is None
    assert seen.host is not None
    assert seen.nvml_errors_count == 1
    assert gpu.reads_count == 1
    assert threading.active_count() == threads_count
    gpu.gate.set()
    await until_it_answers(probes)
    await probes.close()


async def test_closing_does_not_wait_for_a_driver_that_hangs(
    gpu: ScriptedGpu, host: ScriptedHost, caplog: pytest.LogCaptureFixture
) -> None:
    probes = scripted_probes(gpu, host, gpu_deadline_s=0.01)
    gpu.gate.clear()
    await probes.tick(QUERY)
    await probes.close()
    assert gpu.closes_count == 0
    gpu.gate.set()

    class Stuck(ScriptedGpu):
        def close(self) -> None:
            gpu.gate.wait(60)

    gpu.gate.clear()
    stuck = scripted_probes(Stuck(), host)
    await stuck.close()
    gpu.gate.set()
    assert logged(caplog)[-1] == "gpu-not-released"


async def test_the_real_library_hangs_no_more_than_the_scripted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: ScriptedHost
) -> None:
    nvml = FakeNvml(tmp_path)
    for name, value in nvml.environment.items():
        monkeypatch.setenv(name, value)
    probes = scripted_probes(NvmlProbe(bindings=nvml.bindings()), host, gpu_deadline_s=1)
    assert (await probes.tick(QUERY)).gpu is not None
    nvml.hang("nvmlDeviceGetName")  # only when a session begins
    nvml.hang("nvmlDeviceGetMemoryInfo_v2")
    for _ in range(3):
        seen = await probes.tick(QUERY)
        assert [one.probe for one in seen.faults] == ["gpu"]
    nvml.heal()
    await until_it_answers(probes)
    await probes.close()


async def test_the_probes_of_this_machine(host: ScriptedHost) -> None:
    probes = real_probes()
    seen = await probes.tick(ProbeQuery(executor_cpus=frozenset({0})))
    assert seen.host is not None
    assert seen.host.mem_total_bytes
    assert seen.host.mem_available_bytes
    assert (seen.gpu is None) == bool(seen.gpu_absent_reason or seen.faults)
    assert not [one for one in seen.faults if one.probe != "gpu"]
    await probes.close()


async def test_the_worker_hands_on_results_and_errors_and_starts_again() -> None:
    worker = DeadlineWorker("test")
    worker.close()
    assert await worker.call(lambda: 7, 30) == 7
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0, 30)
    worker.close()
    assert await worker.call(lambda: 8, 30) == 8
    worker.close()


async def test_a_cancelled_call_is_given_up_and_its_result_dropped() -> None:
    worker, gate = DeadlineWorker("test"), threading.Event()
    call = asyncio.create_task(worker.call(lambda: gate.wait(60), 30))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert worker.is_busy
    with pytest.raises(ProbeError) as caught:
        await worker.call(lambda: True, 30)
    assert not caught.value.is_new
    gate.set()
    async with asyncio.timeout(30):
        while worker.is_busy:  # noqa: ASYNC110 - what it waits for is a thread
            await asyncio.sleep(0.001)
    worker.close()
