"""The expert cache as a person and a program see it, from a fake engine and from a scripted one."""

from __future__ import annotations

import json

import httpx

from freetokend.control import ControlPlane
from freetokend.core.errors import FreetokenError, Reason
from freetokend.link.messages import CacheVerified, EngineState, SlotDifference
from tests.control.fakes import CACHE, CACHED, FakeGateway, FakeOperations
from tests.ctl.conftest import Ctl
from tests.daemon.running import DEADLINE_S, completion, scripted_daemon

TEXT = """\
expert cache on host (ordinary memory); backend hybrid: engine.backend = "hybrid"
  slots      12 of at most 24 (60 MiB), 10 of 24 experts resident
  hits       62.5% of 200 experts that decode steps asked for
  misses     75: 60 filled, 15 executed by the CPU; 7 experts evicted
  link       100 fills, 500 MiB in 500 ms (1 GB/s); 40 streamed by prefill
  q          filled of missing experts, one token each: 1 of 1-4, 2 of 5
  rates      measured at the start

layer  branch    hit ratio        hits      misses       fills         cpu     evicted
    0  split         75.0%          75          25          10          15           0
    1  split         50.0%          50          50          50           0           7
    2  cpu               -           0           0           0           0           0

layers 0-1: split (split by the rates)
layer 2: cpu (set for this layer)
"""


async def test_cache_for_people(plane: ControlPlane, gateway: FakeGateway, ctl: Ctl) -> None:
    gateway.set(description=CACHED, cache=CACHE)
    done = await ctl("cache")
    assert (done.code, done.out, done.err) == (0, TEXT, "")
    line = "  cache      12 of at most 24 (60 MiB), 10 of 24 experts resident; hits 62.5% of 200 "
    assert line in (await ctl("status")).out


async def test_a_cache_that_was_not_used_yet(
    plane: ControlPlane, gateway: FakeGateway, ctl: Ctl
) -> None:
    gateway.set(description=CACHED)
    done = await ctl("cache")
    assert "  slots      8 of at most 24 (40 MiB), 0 of 24 experts resident" in done.out
    assert "  hits       none yet, no decode step was computed" in done.out
    assert "\n  misses" not in done.out


async def test_cache_for_programs(plane: ControlPlane, gateway: FakeGateway, ctl: Ctl) -> None:
    gateway.set(description=CACHED, cache=CACHE)
    told = json.loads((await ctl("cache", "-o", "json")).out)
    assert told["summary"]["hit_ratio"] == 0.625
    assert [layer["branch"] for layer in told["layers"]] == ["split", "split", "cpu"]
    assert [row["fill_count"] for row in told["fill_table"]] == [
        [0, 1, 1, 1, 1, 2],
        [0, 1, 2, 2, 3, 3],
    ]
    assert told["device"]["device"] == "host"
    assert json.loads((await ctl("status", "-o", "json")).out)["cache"] == told["summary"]


async def test_an_engine_without_a_cache(
    plane: ControlPlane, gateway: FakeGateway, operations: FakeOperations, ctl: Ctl
) -> None:
    done = await ctl("cache")
    assert (done.code, done.err) == (0, "")
    assert done.out == "no expert cache: the backend is cpu: no NVIDIA GPU is present\n"
    assert json.loads((await ctl("cache", "-o", "json")).out)["summary"] is None
    operations.error = FreetokenError(
        "this engine has no expert cache: backend cpu", reason=Reason.DEVICE_UNUSABLE
    )
    refused = await ctl("verify-cache")
    assert (refused.code, refused.out) == (71, "")
    assert refused.err == "freetokenctl: this engine has no expert cache: backend cpu\n"
    gateway.set(state=EngineState.LOADING, description=None)
    assert (await ctl("cache")).out == "no expert cache: the model is being loaded\n"


async def test_verify_cache_names_what_differs(
    plane: ControlPlane, operations: FakeOperations, ctl: Ctl
) -> None:
    done = await ctl("verify-cache")
    assert done.code == 0
    assert done.out == "10 slots (1 MiB) compared with the weights in 0 ms: no difference\n"
    operations.verified = CacheVerified(
        request_id="v",
        compared_count=10,
        differences=(SlotDifference(layer_index=2, expert_index=7, slot_index=5, offset_bytes=64),),
    )
    done = await ctl("verify-cache")
    assert done.code == 1
    assert ": 1 differs. Restart the engine" in done.out
    assert "  layer 2, expert 7: slot 5 differs from byte 64 on\n" in done.out
    done = await ctl("verify-cache", "-o", "json")
    assert done.code == 1
    assert json.loads(done.out)["differences"] == [
        {"layer_index": 2, "expert_index": 7, "slot_index": 5, "offset_bytes": 64}
    ]


async def test_with_a_daemon_and_a_scripted_engine(ctl: Ctl) -> None:
    script = {
        "tokens": {"kind": "cycle", "token_ids": [68, 69, 70]},
        "heartbeat_s": 0.05,
        "cache": {"layers_count": 2, "cpu_count": 1, "damaged": [[1, 3, 2, 0]]},
    }
    async with scripted_daemon(script) as running:
        base_url = await running.base_url()
        where = ("--socket", str(running.runtime_dir / "admin.sock"))
        assert (await ctl(*where, "wait", "--timeout", "60")).code == 0
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            answer = await http.post("/v1/completions", json=completion(6, stream=False))
            assert answer.status_code == 200
            while True:
                metrics = (await http.get("/metrics")).text
                if 'freetoken_cache_hits_total{layer="1",model="tiny"} 18.0' in metrics:
                    break
        told = json.loads((await ctl(*where, "cache", "-o", "json")).out)
        assert [layer["hits_count"] for layer in told["layers"]] == [18, 18]
        assert told["summary"]["cpu_count"] == 12
        assert told["summary"]["hit_ratio"] == 0.6
        done = await ctl(*where, "verify-cache")
        assert done.code == 1
        assert "layer 1, expert 3: slot 2 differs" in done.out
        origins = (await ctl(*where, "config", "show", "--origin")).out
        assert 'engine.device = "none"' in origins
