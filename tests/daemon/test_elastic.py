"""A cache that follows the card: the host device, whose card is the fake driver's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.api.control.v1 import control_pb2_grpc as pb_grpc
from freetokend.ftw.convert import convert
from tests.daemon.running import DEADLINE_S, Daemon, completion, ctl, daemon
from tests.fakes.nvml import UNKNOWN, FakeGpu, FakeNvml
from tests.support.tiny_checkpoints import write_tiny_qwen3_moe

pytestmark = pytest.mark.slow

MIB = 1 << 20
EXPERTS = 64
CARD = FakeGpu(total=64 * MIB, reserved=0)
GAME = 40 * MIB
SETTINGS = (
    *("--set", "engine.device=host", "--set", "engine.backend=hybrid"),
    *("--set", "engine.max_context_tokens=256", "--set", "engine.max_running_count=8"),
    *("--set", "control.tick_s=0.1", "--set", "elastic.hold_s=0.5"),
    *("--set", "elastic.window_s=2"),
)
CLIENTS = 4
POLL_S = 0.2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("hf") / "tiny"
    write_tiny_qwen3_moe(source, layers=4, experts=16, hidden=256, inter=256)
    out = source.with_name("tiny.ftw")
    convert(source, out, progress=lambda _: None)
    return out


class Watch:
    """The daemon's control plane as an operator sees it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.monitor = pb_grpc.MonitorStub(channel)
        self.admin = pb_grpc.AdminStub(channel)

    async def status(self) -> pb.Status:
        return (await self.monitor.GetStatus(pb.GetStatusRequest())).status

    async def until(self, wanted: Callable[[pb.Status], object]) -> pb.Status:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                status = await self.status()
                if wanted(status):
                    return status
                await asyncio.sleep(0.05)

    async def events(self, after: int = 0) -> list[pb.Event]:
        call = self.monitor.WatchEvents(pb.WatchEventsRequest(after_index=after))
        return [reply.event async for reply in call]


@asynccontextmanager
async def watched(running: Daemon) -> AsyncIterator[Watch]:
    await running.engine_pid()
    async with grpc.aio.insecure_channel(f"unix:{running.runtime_dir}/admin.sock") as channel:
        yield Watch(channel)


def slots(status: pb.Status) -> int:
    return status.elastic.actual.slots_count


def whole(status: pb.Status) -> bool:
    return slots(status) == EXPERTS


async def answer(http: httpx.AsyncClient, index: int) -> str:
    body = {**completion(24, stream=False), "prompt": "abc" * (1 + index), "temperature": 0}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


class Hammer:
    """Clients that never stop asking, and a poll of status and metrics beside them."""

    def __init__(self, http: httpx.AsyncClient, watch: Watch, expected: list[str]) -> None:
        self._http = http
        self._watch = watch
        self._expected = expected
        self.answers_count = 0
        self._answered = asyncio.Event()
        self.oldest_tick_s = 0.0
        self.slowest_poll_s = 0.0

    async def client(self, index: int) -> None:
        while True:
            assert await answer(self._http, index) == self._expected[index]
            self.answers_count += 1
            self._answered.set()

    async def poll(self) -> None:
        while True:
            begun_s = time.monotonic()
            status = await self._watch.status()
            reply = await self._http.get("/metrics")
            assert reply.status_code == 200
            assert "freetoken_elastic_actual_bytes" in reply.text
            self.slowest_poll_s = max(self.slowest_poll_s, time.monotonic() - begun_s)
            self.oldest_tick_s = max(self.oldest_tick_s, status.elastic.tick_age_s)
            await asyncio.sleep(POLL_S)

    async def more(self) -> None:
        """Wait until the clients were answered anew."""
        goal = self.answers_count + 2 * CLIENTS
        async with asyncio.timeout(DEADLINE_S):
            while self.answers_count < goal:
                self._answered.clear()
                await self._answered.wait()


@asynccontextmanager
async def hammered(
    http: httpx.AsyncClient, watch: Watch, expected: list[str]
) -> AsyncIterator[Hammer]:
    """What fails in any of them fails the test."""
    hammer = Hammer(http, watch, expected)
    tasks = [asyncio.create_task(hammer.client(index)) for index in range(CLIENTS)]
    tasks.append(asyncio.create_task(hammer.poll()))
    try:
        yield hammer
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if not isinstance(end, asyncio.CancelledError):
            assert isinstance(end, BaseException)
            raise end


def resized(events: list[pb.Event]) -> list[pb.Event]:
    return [one for one in events if one.kind == pb.EVENT_KIND_RESIZED]


async def test_a_neighbour_takes_memory_and_gives_it_back_and_no_request_notices(
    model_dir: Path, tmp_path: Path
) -> None:
    nvml = FakeNvml(tmp_path, CARD)
    arguments = ("--model", str(model_dir), *SETTINGS)
    async with (
        daemon(*arguments, environment=nvml.environment) as running,
        watched(running) as watch,
        httpx.AsyncClient(base_url=await running.base_url(), timeout=DEADLINE_S) as http,
    ):
        await watch.until(whole)
        expected = [await answer(http, index) for index in range(CLIENTS)]
        async with hammered(http, watch, expected) as hammer:
            await hammer.more()
            for _ in range(2):
                await grab_and_return(nvml, watch, hammer)
        running.terminate()
        assert await running.wait_exit() == 0
    assert "Traceback" not in running.log
    assert running.log.count("controller-failed") == 0


async def grab_and_return(nvml: FakeNvml, watch: Watch, hammer: Hammer) -> None:
    """One cycle: less than what is left in time, nothing lost, and all of it again."""
    seen = (await watch.events())[-1].event_index
    grabbed_s = time.time()
    nvml.change(used=GAME, graphics={777: GAME})
    status = await watch.until(lambda now: slots(now) < EXPERTS)
    assert status.elastic.actual.size_bytes <= CARD.total - GAME
    assert slots(status) >= 2
    first = resized(await watch.events(seen))[0]
    # A machine that is too slow to look that often is not the controller's fault.
    assert first.time_s - grabbed_s <= max(2.0, 4 * hammer.oldest_tick_s)
    assert first.before.slots_count == EXPERTS
    assert first.after.slots_count == slots(status)
    decided = next(e for e in await watch.events(seen) if e.kind == pb.EVENT_KIND_RESIZE)
    assert (decided.code, decided.generation) == ("vram-taken", first.generation)
    await hammer.more()
    assert slots(await watch.status()) < EXPERTS
    returned_s = time.time()
    nvml.change(used=0, graphics={})
    await watch.until(whole)
    grown = resized(await watch.events(seen))[-1]
    assert grown.after.slots_count == EXPERTS
    assert grown.time_s - returned_s >= 0.5  # the hold
    await hammer.more()


async def test_a_driver_that_fails_freezes_the_cache_and_is_told_once(
    model_dir: Path, tmp_path: Path
) -> None:
    nvml = FakeNvml(tmp_path, CARD)
    arguments = ("--model", str(model_dir), *SETTINGS)
    async with daemon(*arguments, environment=nvml.environment) as running:
        async with watched(running) as watch:
            await watch.until(whole)
            nvml.fail("nvmlDeviceGetMemoryInfo_v2", UNKNOWN)
            nvml.change(used=GAME)
            status = await watch.until(lambda now: now.elastic.reason_code == "gpu-unknown")
            assert slots(status) == EXPERTS
            assert not status.elastic.HasField("budget_bytes")
            nvml.heal()
            await watch.until(lambda now: slots(now) < EXPERTS)
            kinds = [(e.kind, e.code) for e in await watch.events()]
            probes = [code for kind, code in kinds if kind == pb.EVENT_KIND_PROBE]
            assert probes == ["failing", "works"]
        assert running.log.count("kind=probe code=failing") == 1


async def test_the_operator_resizes_without_a_driver_and_is_told_the_truth(
    model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    nowhere = {"LD_LIBRARY_PATH": str(tmp_path)}
    arguments = ("--model", str(model_dir), *SETTINGS)
    async with (
        daemon(*arguments, environment=nowhere) as running,
        watched(running) as watch,
    ):
        start = slots(await watch.until(slots))
        reply = await watch.admin.Resize(pb.ResizeRequest(slots_count=40, wait=True))
        assert (reply.before.slots_count, reply.after.slots_count) == (start, 40)
        assert reply.outcome == pb.RESIZE_OUTCOME_DONE
        assert reply.generation > 0
        assert reply.stall_s > 0
        again = await watch.admin.Resize(pb.ResizeRequest(slots_count=40, wait=True))
        assert again.outcome == pb.RESIZE_OUTCOME_UNCHANGED
        cache = await watch.monitor.GetCache(pb.GetCacheRequest())
        assert cache.summary.slots_capacity_count == EXPERTS
        both: list[Any] = await asyncio.gather(
            watch.admin.Resize(pb.ResizeRequest(slots_ratio=0.25, wait=True)),
            watch.admin.Resize(pb.ResizeRequest(slots_count=9, wait=True)),
        )
        assert [one.after.slots_count for one in both] == [16, 9]
        assert both[0].generation < both[1].generation
        assert both[1].before.slots_count == 16
        with pytest.raises(grpc.aio.AioRpcError, match="slots_count = 65 is out of range") as no:
            await watch.admin.Resize(pb.ResizeRequest(slots_count=65))
        assert no.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert slots(await watch.status()) == 9


async def test_sleep_gives_everything_back_and_a_request_wakes_the_engine(
    model_dir: Path, tmp_path: Path
) -> None:
    nvml = FakeNvml(tmp_path, CARD)
    arguments = ("--model", str(model_dir), *SETTINGS)
    async with (
        daemon(*arguments, environment=nvml.environment) as running,
        watched(running) as watch,
        httpx.AsyncClient(base_url=await running.base_url(), timeout=DEADLINE_S) as http,
    ):
        await watch.until(whole)
        expected = await answer(http, 0)
        assert (await watch.admin.Sleep(pb.SleepRequest())).asleep
        status = await watch.until(lambda now: not now.elastic.actual.size_bytes)
        assert status.elastic.asleep
        assert status.ready  # it takes requests
        assert await answer(http, 0) == expected
        await watch.until(lambda now: not now.elastic.asleep and slots(now))
        assert (await watch.admin.Sleep(pb.SleepRequest())).asleep
        assert (await watch.admin.Wake(pb.WakeRequest())).awake
        assert slots(await watch.status()) > 0
        kinds = [event.kind for event in await watch.events()]
        assert kinds.count(pb.EVENT_KIND_SLEEP) == kinds.count(pb.EVENT_KIND_WAKE) == 2
        assert (await watch.admin.Sleep(pb.SleepRequest())).asleep
        nvml.change(used=CARD.total - MIB)
        refused = await watch.admin.Wake(pb.WakeRequest())
        assert not refused.awake
        assert "The card is busy" in refused.reason
        reply = await http.post("/v1/completions", json=completion(4, stream=False))
        assert reply.status_code == 503
        assert "The card is busy" in reply.text
        nvml.change(used=0)
        async with asyncio.timeout(DEADLINE_S):  # it heals by itself
            while reply.status_code == 503:
                reply = await http.post("/v1/completions", json=completion(4, stream=False))
        assert reply.status_code == 200


def own_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


async def test_a_program_with_a_rule_and_nobody_who_asks(model_dir: Path, tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path, CARD)
    arguments = (
        *("--model", str(model_dir), *SETTINGS),
        *("--set", f"elastic.process_rules={own_name()}=40MiB"),
        *("--set", "elastic.sleep_idle_s=4"),
    )
    async with (
        daemon(*arguments, environment=nvml.environment) as running,
        watched(running) as watch,
        httpx.AsyncClient(base_url=await running.base_url(), timeout=DEADLINE_S) as http,
    ):
        await watch.until(whole)
        # Hardly any memory is taken; it is the name that counts.
        nvml.change(used=MIB, graphics={os.getpid(): MIB})
        await watch.until(lambda now: slots(now) < EXPERTS)
        await answer(http, 0)
        status = await watch.until(lambda now: now.elastic.asleep)
        assert "memory     asleep; " in (await ctl(running, "status"))[1]
        assert status.elastic.actual.size_bytes == 0
        codes = [(event.kind, event.code) for event in await watch.events()]
        assert (pb.EVENT_KIND_RESIZE, "process-rule") in codes
        assert (pb.EVENT_KIND_SLEEP, "idle") in codes
        await answer(http, 0)
        await watch.until(lambda now: slots(now) > 0)
