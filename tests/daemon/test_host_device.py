"""The service over an expert cache in ordinary memory: answers, figures, refusals, a restart."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetokend.ftw.convert import convert
from tests.daemon.running import DEADLINE_S, Daemon, completion, ctl, ctl_json, daemon
from tests.support.tiny_checkpoints import write_tiny_qwen3_moe

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, SLOTS = 4, 32, 9
HOST = (
    *("--set", "engine.device=host"),
    *("--set", "engine.backend=hybrid"),
    *("--set", f"engine.slots_count={SLOTS}"),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("hf") / "tiny"
    write_tiny_qwen3_moe(source, layers=5, mlp_only_layers=(1,))
    out = source.with_name("tiny.ftw")
    convert(source, out, progress=lambda _: None)
    return out


async def texts(http: httpx.AsyncClient) -> list[str]:
    """A chat, and several completions at once."""
    chat = {
        "messages": [{"role": "user", "content": "hello there"}],
        "temperature": 0,
        "max_tokens": 30,
    }
    bodies = [
        {**completion(40, stream=False), "prompt": "abc" * (1 + index), "temperature": 0}
        for index in range(4)
    ]
    answers = await asyncio.gather(
        http.post("/v1/chat/completions", json=chat),
        *(http.post("/v1/completions", json=body) for body in bodies),
    )
    for answer in answers:
        assert answer.status_code == 200, answer.text
    first, *others = (answer.json()["choices"][0] for answer in answers)
    return [first["message"]["content"] or "", *(one["text"] for one in others)]


async def metric(http: httpx.AsyncClient, name: str) -> float:
    """The sum over all labels."""
    lines = (await http.get("/metrics")).text.splitlines()
    values = [
        float(line.split()[-1]) for line in lines if re.match(rf"freetoken_{name}[{{ ]", line)
    ]
    assert values, name
    return sum(values)


async def until_counted(running: Daemon) -> dict[str, Any]:
    """The cache's figures once two looks agree: heartbeats tell them."""
    async with asyncio.timeout(DEADLINE_S):
        before: dict[str, Any] = {}
        while True:
            now: dict[str, Any] = (await ctl_json(running, "cache"))["summary"]
            if now == before and now["hits_count"]:
                return now
            before = now
            await asyncio.sleep(1.1)


async def test_answers_are_those_without_a_cache_and_figures_are_true(model_dir: Path) -> None:
    async with daemon("--model", str(model_dir), "--set", "engine.backend=cpu") as running:
        await running.engine_pid()
        base_url = await running.base_url()
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            expected = await texts(http)
        code, out = await ctl(running, "cache")
        assert code == 0
        assert "no expert cache" in out
        assert (await ctl(running, "verify-cache"))[0] == 71
    async with daemon("--model", str(model_dir), *HOST) as running:
        await running.engine_pid()
        base_url = await running.base_url()
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            assert await texts(http) == expected
            first = await until_counted(running)
            hits = await metric(http, "cache_hits_total")
            assert await texts(http) == expected
            second = await until_counted(running)
            await check_figures(running, http, first, second)
            await check_profile(running.runtime_dir.with_name("state"))
            assert await metric(http, "cache_hits_total") > hits
        running.terminate()
        assert await running.wait_exit() == 0
        assert "Traceback" not in running.log


async def check_figures(
    running: Daemon, http: httpx.AsyncClient, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Of `status`, `cache`, `verify-cache` and /metrics, which are the same."""
    assert (second["slots_count"], second["slots_capacity_count"]) == (SLOTS, EXPERTS)
    assert second["experts_count"] == EXPERTS
    assert 0 < second["resident_count"] <= SLOTS
    assert second["committed_bytes"] % (2 << 20) == 0
    assert second["committed_bytes"] > 0
    for name in ("hits_count", "misses_count"):
        assert second[name] > first[name]
    assert second["misses_count"] == second["decode_fills_count"] + second["cpu_count"]
    reply = await ctl_json(running, "cache")
    assert len(reply["layers"]) == LAYERS
    assert sum(one["hits_count"] for one in reply["layers"]) == second["hits_count"]
    assert len(reply["fill_table"]) >= 1
    for name, key in (
        ("cache_slots", "slots_count"),
        ("cache_resident_experts", "resident_count"),
        ("cache_committed_bytes", "committed_bytes"),
        ("cache_hits_total", "hits_count"),
        ("cache_misses_total", "misses_count"),
        ("cache_fills_total", "decode_fills_count"),
        ("cache_cpu_executions_total", "cpu_count"),
        ("cache_evictions_total", "evictions_count"),
        ("cache_link_fills_total", "fills_count"),
        ("cache_link_bytes_total", "fill_bytes"),
        ("cache_streamed_experts_total", "streamed_count"),
    ):
        assert await metric(http, name) == second[key], name
    await check_split(http)
    status = await ctl_json(running, "status")
    assert status["cache"]["slots_count"] == SLOTS
    assert status["device"]["backend"] == "hybrid"
    assert status["device"]["device"] == "host"
    code, text = await ctl(running, "cache")
    assert code == 0
    assert f"{SLOTS} of at most {EXPERTS}" in text
    assert "backend hybrid" in text
    verified = await ctl_json(running, "verify-cache")
    assert verified["compared_count"] == second["resident_count"]
    assert verified["differences"] == []


async def check_profile(state_dir: Path) -> None:
    """Measured unasked once nobody is served, with the deployed experts."""
    path = state_dir / "bandwidth" / "none.json"
    async with asyncio.timeout(DEADLINE_S):
        names: set[str] = set()
        while not {"cpu_beside_bytes_per_s", "fill_beside_bytes_per_s"} <= names:
            await asyncio.sleep(0.2)
            if path.exists():
                (entry,) = json.loads(path.read_text())["entries"]
                names = {
                    figure["name"] for one in entry["measurements"] for figure in one["figures"]
                }
    assert entry["measurements"][0]["source"] == "boot"
    assert entry["format"] == "bf16"
    assert entry["expert_bytes"] > 0


async def check_split(http: httpx.AsyncClient) -> None:
    """The rates that steps have told, and where the misses go."""
    text = (await http.get("/metrics")).text
    told = re.findall(
        r'^freetoken_split_bandwidth_bytes_per_second{company="(\w+)",link="(\w+)",.*,'
        r'source="(\w+)"} (\S+)$',
        text,
        re.MULTILINE,
    )
    assert {(company, link) for company, link, _, _ in told} == {
        (company, link) for company in ("beside", "alone") for link in ("fill", "cpu")
    }
    assert {source for _, _, source, _ in told} == {"passive"}
    assert all(float(rate) > 0 for _, _, _, rate in told)
    assert await metric(http, "split_branch") == 1
    assert await metric(http, "split_trials_total") > 0


async def test_a_killed_engine_comes_back_with_its_cache(model_dir: Path) -> None:
    async with daemon("--model", str(model_dir), *HOST) as running:
        pid = await running.engine_pid()
        base_url = await running.base_url()
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            before = await texts(http)
            seen = len(running.lines)
            os.kill(pid, signal.SIGKILL)
            await running.wait_line(r"link\.session engine-ready", seen)
            assert await texts(http) == before
        summary = (await ctl_json(running, "cache"))["summary"]
        assert (summary["slots_count"], summary["slots_capacity_count"]) == (SLOTS, EXPERTS)


@pytest.mark.parametrize(
    ("settings", "told", "code"),
    [
        (("engine.slots_count=33",), r"engine\.slots_count = 33; the model has 32 experts", 78),
        (
            ("engine.device_bytes=2MiB", "engine.slots_count=32"),
            r"32 of 32 slots.*KV.*too little",
            78,
        ),
        (("engine.layers=9=cpu",), r"no MoE layer 9", 78),
    ],
    ids=["slots", "device", "layers"],
)
async def test_what_cannot_be_met_is_told_with_the_numbers_and_not_tried_again(
    model_dir: Path, settings: tuple[str, ...], told: str, code: int
) -> None:
    chosen = [part for one in settings for part in ("--set", one)]
    async with daemon(
        *("--model", str(model_dir), "--set", "engine.device=host"),
        *("--set", "engine.backend=hybrid"),
        *chosen,
    ) as running:
        assert await running.wait_exit() == code
        assert re.search(told, running.log), running.log
        assert running.log.count("engine-started") <= 1
