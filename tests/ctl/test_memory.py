"""The verbs of the device's memory against a real control plane."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.control import ControlPlane
from freetokend.ctl.main import build_parser
from freetokend.ctl.memory import resize_request
from freetokend.link.messages import ResizeOutcome
from tests.control.fakes import CACHE, CACHED, CACHED_STATS, FakeGateway, FakeOperations
from tests.ctl.conftest import Ctl
from tests.fakes.nvml import GIB, FakeGpu
from tests.fakes.probes import ScriptedGpu


@pytest.fixture
async def card(
    plane: ControlPlane, gateway: FakeGateway, gpu: ScriptedGpu
) -> AsyncIterator[ScriptedGpu]:
    """A card that is looked at, and an engine with a cache on it."""
    gpu.error, gpu.gpus = None, [FakeGpu(used=2 * GIB)]
    gateway.set(
        description=replace(CACHED, device=f"cuda:{FakeGpu().uuid}"),
        cache=CACHE,
        stats=CACHED_STATS,
    )

    async def look() -> None:
        while True:
            gpu.now_s = time.monotonic()
            await plane.machine.look()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(look())
    yield gpu
    task.cancel()


async def test_resize_in_words_and_in_json(
    ctl: Ctl, card: ScriptedGpu, operations: FakeOperations
) -> None:
    done = await ctl("resize", "--slots", "20", "--wait")
    assert done.code == 0, done.err
    assert done.out.startswith("done: 12 slots")
    assert "20 slots" in done.out
    assert "stall      12 ms, after a wait of 250 ms" in done.out
    done = await ctl("resize", "--slots", "50%", "--wait", "-o", "json")
    reply = json.loads(done.out)
    assert (reply["outcome"], reply["after"]["slots_count"]) == ("done", 12)
    done = await ctl("resize", "--slots", "25")
    assert done.code == 64
    assert "from 1 to 24" in done.err
    operations.outcome, operations.note = ResizeOutcome.DEFERRED, "pages in use"
    assert (await ctl("resize", "--slots", "3", "--wait")).code == 75


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--slots", "37%"], pb.ResizeRequest(slots_ratio=0.37)),
        (["--slots", "7", "--wait"], pb.ResizeRequest(slots_count=7, wait=True)),
        (["--vram", "12GiB"], pb.ResizeRequest(vram_bytes=12 * GIB)),
        (["--vram", "0"], pb.ResizeRequest(vram_bytes=0)),
        (["--kv", "64k"], pb.ResizeRequest(kv_tokens=65536)),
        (["--kv", "1000"], pb.ResizeRequest(kv_tokens=1000)),
        (["--preset", "agent"], pb.ResizeRequest(preset="agent")),
    ],
)
def test_what_the_command_line_asks_for(words: list[str], expected: pb.ResizeRequest) -> None:
    assert resize_request(build_parser().parse_args(["resize", *words])) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--slots", "many"],
        ["--slots", "-1"],
        ["--slots", "x%"],
        ["--vram", "much"],
        ["--kv", "64m"],
        ["--slots", "1", "--kv", "1"],
        [],
    ],
)
async def test_what_is_no_size_is_a_usage_error(ctl: Ctl, words: list[str]) -> None:
    done = await ctl("resize", *words)
    assert done.code == 64
    assert "Traceback" not in done.err


async def test_a_hold_runs_a_command_when_its_memory_is_free(
    ctl: Ctl, card: ScriptedGpu, plane: ControlPlane
) -> None:
    code = "import sys; sys.exit(7)"
    done = await ctl(
        "hold", "--vram", "1GiB", "--reason", "a game", "--", sys.executable, "-c", code
    )
    assert done.code == 7, done.err
    assert "1 GiB held (hold-1)" in done.err
    async with asyncio.timeout(30):
        while plane.elastic.wants.holds:
            await plane.elastic.next_tick()
    held = plane.elastic.hold(GIB, "by hand", frozenset())
    done = await ctl("holds")
    assert f"{held.hold_id}      1 GiB  by hand" in done.out
    assert json.loads((await ctl("holds", "-o", "json")).out)["holds"][0]["vram_bytes"] == GIB


async def test_events_are_told_with_their_reasons(ctl: Ctl, card: ScriptedGpu) -> None:
    await ctl("resize", "--slots", "20", "--wait")
    done = await ctl("events")
    assert done.code == 0
    assert "resize       operator" in done.out
    assert "resized      done" in done.out
    lines = [json.loads(line) for line in (await ctl("events", "-o", "json")).out.splitlines()]
    told = [line for line in lines if line["kind"] in ("resize", "resized")]
    assert [line["kind"] for line in told] == ["resize", "resized"]
    after = await ctl("events", "--after", str(told[0]["event_index"]), "-o", "json")
    assert json.loads(after.out.splitlines()[0]) == told[1]


async def test_sleep_and_wake(ctl: Ctl, card: ScriptedGpu) -> None:
    assert (await ctl("sleep")).out == "asleep until a request comes\n"
    assert json.loads((await ctl("wake", "-o", "json")).out)["awake"] is True
