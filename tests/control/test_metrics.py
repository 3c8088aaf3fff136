"""Names, units and values of the metrics; names change only together with the golden file."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from freetokend.control import ControlPlane
from freetokend.control.elastic import Asked, HandResizes
from freetokend.control.metrics import Metrics
from freetokend.control.metrics.catalogue import CATALOGUE, PREFIX, Kind, metric
from freetokend.core.errors import FreetokenError, Reason, UnavailableError
from freetokend.link.messages import (
    EngineState,
    FinishReason,
    GenerateRequest,
    LoadProgress,
    Sampling,
    SequenceUpdate,
)
from tests.control.fakes import CACHE, CACHED, CACHED_STATS, DESCRIPTION, FakeGateway, config
from tests.fakes.nvml import GIB, FakeGpu
from tests.fakes.probes import ScriptedGpu, ScriptedHost
from tests.fakes.readings import BUSY_GPU, fill_machine

GOLDEN = Path(__file__).with_name("metrics.golden")
REQUEST = GenerateRequest(
    request_id="r", prompt_token_ids=(1, 2, 3), max_new_tokens=9, sampling=Sampling()
)
BASE_UNITS = ("seconds", "bytes", "tokens", "bytes_per_second")


def samples(plane: ControlPlane) -> dict[str, float]:
    """Sample name with its labels -> value."""
    text = plane.metrics.render()[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def golden_text() -> str:
    lines = [
        f"{entry.name} {entry.kind.value} unit={entry.unit or '-'} "
        f"labels={','.join(entry.labels) or '-'} {entry.help}"
        for entry in CATALOGUE.values()
    ]
    return "\n".join(sorted(lines)) + "\n"


def test_names_types_units_labels_and_help_are_those_of_the_golden_file() -> None:
    if os.environ.get("FREETOKEN_UPDATE_GOLDENS") == "1":
        GOLDEN.write_text(golden_text())
    assert golden_text() == GOLDEN.read_text(), (
        "the metrics changed; dashboards and alerts depend on them. If that is meant, run this "
        "test with FREETOKEN_UPDATE_GOLDENS=1 and name the change in the changelog"
    )


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_every_name_follows_the_conventions(entry) -> None:  # type: ignore[no-untyped-def]
    assert entry.name.startswith(PREFIX)
    assert entry.name == entry.name.lower()
    assert entry.help.endswith(".")
    assert entry.name.endswith("_total") == (entry.kind is Kind.COUNTER)
    stem = entry.name.removesuffix("_total")
    assert not stem.endswith(("_count", "_sum", "_bucket", "_ms", "_mb", "_pct", "_percent"))
    units = [unit for unit in BASE_UNITS if stem.endswith(f"_{unit}")]
    assert max(units, key=len, default="") == entry.unit
    assert "model" not in entry.labels or entry.labels[0] == "model"
    assert bool(entry.buckets) == (entry.kind is Kind.HISTOGRAM)


async def fully_used(
    plane: ControlPlane, gateway: FakeGateway, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    """Make every family have a sample."""
    await fill_machine(plane.machine, gpu, host)
    gateway.set(
        state=EngineState.DRAINING,
        load=LoadProgress(stage="warm_up", done_bytes=5, total_bytes=9),
        description=CACHED,
        cache=CACHE,
        stats=CACHED_STATS,
    )
    plane.elastic.tick()  # a card is looked at again once an engine is there
    gpu.now_s = time.monotonic()
    await plane.machine.look()
    await HandResizes(plane.elastic).resize(Asked(slots_count=20), wait=True)
    gateway.answer = [
        SequenceUpdate(request_id="r", token_ids=(1,)),
        SequenceUpdate(
            request_id="r",
            token_ids=(2, 3),
            finish_reason=FinishReason.LENGTH,
            prompt_tokens=3,
            cached_tokens=2,
            completion_tokens=3,
        ),
    ]
    async for _ in plane.gateway.generate(REQUEST):
        pass
    gateway.refusal = UnavailableError("full", reason=Reason.QUEUE_FULL)
    with pytest.raises(UnavailableError):
        plane.gateway.generate(REQUEST)
    await call(plane, path="/v1/models")


async def call(  # type: ignore[no-untyped-def]
    plane: ControlPlane,
    *,
    path: str,
    route: str | None = None,
    status: int | None = 200,
    method: str = "GET",
    kind: str = "http",
):
    """One request through the HTTP meter, as an ASGI server would make it."""

    class Route:
        def __init__(self, template: str) -> None:
            self.path = template

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        if route is not None:
            scope["route"] = Route(route)
        if status is None:
            raise ConnectionResetError
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive():  # type: ignore[no-untyped-def]
        return {"type": "http.request"}

    sent: list[object] = []

    async def send(message) -> None:  # type: ignore[no-untyped-def]
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path}
    await plane.metrics.metered_app(app)(scope, receive, send)
    return sent


async def test_the_exposition_holds_exactly_the_catalogue(
    plane: ControlPlane, gateway: FakeGateway, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    await fully_used(plane, gateway, gpu, host)
    text = plane.metrics.render()[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    own = {name: family for name, family in families.items() if name.startswith(PREFIX)}
    # The parser takes "_total" off counters, and "_created" lines are gauges of its own.
    expected = {entry.name.removesuffix("_total"): entry for entry in CATALOGUE.values()}
    assert {name for name in own if not name.endswith("_created")} == set(expected)
    for name, entry in expected.items():
        assert own[name].type == entry.kind.value
        assert own[name].documentation == entry.help
        assert own[name].samples, f"{name} has no sample"
        for sample in own[name].samples:
            assert set(sample.labels) - {"le"} == set(entry.labels)
    assert "process_resident_memory_bytes" in families


async def test_promtool_finds_nothing_to_improve(
    plane: ControlPlane, gateway: FakeGateway, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    await fully_used(plane, gateway, gpu, host)
    content, content_type = plane.metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    lint(content)


def lint(exposition: bytes) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: install the package prometheus"
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exposition, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


async def test_state_is_read_at_the_scrape(plane: ControlPlane, gateway: FakeGateway) -> None:
    gateway.set_stats(running_count=3, decode_tokens_count=500)
    seen = samples(plane)
    assert seen["freetoken_requests_running{model=demo}"] == 3
    assert seen["freetoken_engine_decode_tokens_total{model=demo}"] == 500
    assert seen["freetoken_ready{model=demo}"] == 1
    assert seen["freetoken_engine_state{model=demo,state=ready}"] == 1
    assert seen["freetoken_engine_state{model=demo,state=failed}"] == 0
    assert seen["freetoken_pool_size_bytes{model=demo}"] == 10 << 30
    gateway.set(state=EngineState.FAILED, description=None, cause="x")
    seen = samples(plane)
    assert seen["freetoken_alive{model=demo}"] == 0
    assert seen["freetoken_health_warnings{code=engine-failed,model=demo,severity=error}"] == 1
    assert "freetoken_pool_size_bytes{model=demo}" not in seen


async def test_the_cache_layer_by_layer(plane: ControlPlane, gateway: FakeGateway) -> None:
    assert not [name for name in samples(plane) if name.startswith("freetoken_cache_")]
    gateway.set(description=CACHED, cache=CACHE)
    seen = samples(plane)
    assert seen["freetoken_cache_slots{model=demo}"] == 12
    assert seen["freetoken_cache_slots_limit{model=demo}"] == 24
    assert seen["freetoken_cache_committed_bytes{model=demo}"] == 60 << 20
    assert seen["freetoken_cache_hits_total{layer=0,model=demo}"] == 75
    assert seen["freetoken_cache_cpu_executions_total{layer=0,model=demo}"] == 15
    assert seen["freetoken_cache_fills_total{layer=1,model=demo}"] == 50
    assert seen["freetoken_cache_evictions_total{layer=1,model=demo}"] == 7
    assert seen["freetoken_cache_misses_total{layer=2,model=demo}"] == 0
    assert seen["freetoken_cache_layers{branch=split,model=demo}"] == 2
    assert seen["freetoken_cache_layers{branch=fill,model=demo}"] == 0
    assert seen["freetoken_cache_filled_of_missing{missing=5,model=demo}"] == 2
    assert seen["freetoken_cache_link_bytes_total{model=demo}"] == 500 << 20
    assert seen["freetoken_cache_link_busy_seconds_total{model=demo}"] == 0.5
    gateway.set(cache=replace(CACHE, fill_counts=((0, *[1] * 500),)))
    seen = samples(plane)
    assert len([name for name in seen if name.startswith("freetoken_cache_filled")]) == 65
    gateway.set(description=None)
    assert not [name for name in samples(plane) if name.startswith("freetoken_cache_")]


async def test_the_machine_and_nothing_of_what_is_unknown(
    plane: ControlPlane, gpu: ScriptedGpu, host: ScriptedHost
) -> None:
    label = f"{{gpu={BUSY_GPU.uuid}}}"
    seen = samples(plane)
    assert not [name for name in seen if name.startswith("freetoken_gpu_")]
    assert seen["freetoken_nvml_errors_total"] == 0
    assert seen["freetoken_host_memory_available_bytes"] == 32 * GIB
    assert "freetoken_cgroup_memory_limit_bytes" not in seen
    await fill_machine(plane.machine, gpu, host)
    seen = samples(plane)
    assert seen[f"freetoken_gpu_memory_free_bytes{label}"] == 10 * GIB
    assert seen[f"freetoken_gpu_memory_own_bytes{label}"] == 8 * GIB
    assert seen[f"freetoken_gpu_memory_others_bytes{label}"] == 5 * GIB
    assert seen[f"freetoken_gpu_throttled{{gpu={BUSY_GPU.uuid},reason=sw-power-cap}}"] == 1
    assert seen["freetoken_pressure_ratio{kind=full,resource=memory}"] == 0.05
    assert "freetoken_pressure_ratio{kind=full,resource=cpu}" not in seen
    assert seen["freetoken_executor_load_ratio"] == 0.25
    assert seen["freetoken_probe_failing{probe=gpu}"] == 0
    gpu.gpus = [FakeGpu(uuid=BUSY_GPU.uuid, lost=True)]
    await plane.machine.look()
    seen = samples(plane)
    assert seen[f"freetoken_gpu_lost{label}"] == 1
    assert f"freetoken_gpu_memory_free_bytes{label}" not in seen
    assert seen["freetoken_probe_failing{probe=gpu}"] == 1
    assert seen["freetoken_nvml_errors_total"] == 1


async def test_two_warnings_of_one_code_are_one_sample(
    plane: ControlPlane, gateway: FakeGateway
) -> None:
    gateway.set(description=replace(DESCRIPTION, notes=("one", "two")))
    key = "freetoken_health_warnings{code=engine-note,model=demo,severity=warning}"
    assert samples(plane)[key] == 2


async def test_sequences_are_counted_once_by_how_they_end(
    plane: ControlPlane, gateway: FakeGateway
) -> None:
    def end(reason: FinishReason) -> SequenceUpdate:
        return SequenceUpdate(
            request_id="r",
            finish_reason=reason,
            prompt_tokens=3,
            cached_tokens=1,
            completion_tokens=2,
        )

    token = SequenceUpdate(request_id="r", token_ids=(1, 2))
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR):
        gateway.answer = [token, end(reason)]
        stream = plane.gateway.generate(REQUEST)
        assert [update async for update in stream] == gateway.answer
        await stream.aclose()
    # The reader goes after the first tokens.
    gateway.answer = [token, end(FinishReason.STOP)]
    stream = plane.gateway.generate(REQUEST)
    assert await anext(stream) == token
    await stream.aclose()
    await stream.aclose()

    seen = samples(plane)
    for outcome in FinishReason:
        key = f"freetoken_requests_finished_total{{model=demo,outcome={outcome.value}}}"
        assert seen[key] == 1
    assert seen["freetoken_prompt_tokens_total{model=demo}"] == 12
    assert seen["freetoken_cached_prompt_tokens_total{model=demo}"] == 3
    assert seen["freetoken_completion_tokens_total{model=demo}"] == 8
    assert seen["freetoken_time_to_first_token_seconds_count{model=demo}"] == 4
    assert gateway.closed_count == 4
    totals = plane.metrics.totals()
    assert (totals.finished_count, totals.failed_count, totals.cancelled_count) == (2, 1, 1)


async def test_a_reader_that_has_all_it_wants_has_not_cancelled(
    plane: ControlPlane, gateway: FakeGateway
) -> None:
    gateway.answer = [SequenceUpdate(request_id="r", token_ids=(1, 2), cached_tokens=1)] * 2
    stream = plane.gateway.generate(REQUEST)
    await anext(stream)
    await stream.finish()
    await stream.aclose()
    assert gateway.closed_count == 1
    seen = samples(plane)
    assert seen["freetoken_requests_finished_total{model=demo,outcome=stop}"] == 1
    assert seen["freetoken_requests_finished_total{model=demo,outcome=cancelled}"] == 0
    assert seen["freetoken_cached_prompt_tokens_total{model=demo}"] == 1
    assert seen["freetoken_completion_tokens_total{model=demo}"] == 2
    totals = plane.metrics.totals()
    assert (totals.finished_count, totals.cancelled_count) == (1, 0)


async def test_refusals_are_counted_by_reason_wherever_they_are_raised(
    plane: ControlPlane, gateway: FakeGateway
) -> None:
    gateway.refusal = UnavailableError("full", reason=Reason.QUEUE_FULL)
    with pytest.raises(UnavailableError):
        plane.gateway.generate(REQUEST)
    gateway.refusal = None
    error: FreetokenError = UnavailableError("soon", reason=Reason.LOADING)
    gateway.answer = [error]
    stream = plane.gateway.generate(REQUEST)
    with pytest.raises(UnavailableError):
        await anext(stream)
    await stream.aclose()
    seen = samples(plane)
    assert seen["freetoken_requests_refused_total{model=demo,reason=queue_full}"] == 1
    assert seen["freetoken_requests_refused_total{model=demo,reason=loading}"] == 1
    assert seen["freetoken_requests_finished_total{model=demo,outcome=cancelled}"] == 0


async def test_a_refused_admission_is_counted_once(
    gateway: FakeGateway, plane: ControlPlane
) -> None:
    plane.gateway.check_admission()
    gateway.refusal = UnavailableError("draining", reason=Reason.DRAINING)
    with pytest.raises(UnavailableError):
        plane.gateway.check_admission()
    assert samples(plane)["freetoken_requests_refused_total{model=demo,reason=draining}"] == 1


async def test_http_requests_by_route_template_method_and_status(plane: ControlPlane) -> None:
    await call(plane, path="/v1/models/a", route="/v1/models/{model}")
    await call(plane, path="/v1/models/b", route="/v1/models/{model}")
    await call(plane, path="/etc/passwd", status=404, method="BREW")
    await call(plane, path="/", kind="lifespan", status=200)
    with pytest.raises(ConnectionResetError):
        await call(plane, path="/v1/models", route="/v1/models", status=None)
    seen = {
        name: value
        for name, value in samples(plane).items()
        if name.startswith("freetoken_http_requests_total")
    }
    prefix = "freetoken_http_requests_total"
    assert seen == {
        f"{prefix}{{method=GET,route=/v1/models/{{model}},status=200}}": 2,
        f"{prefix}{{method=other,route=other,status=404}}": 1,
        f"{prefix}{{method=GET,route=/v1/models,status=none}}": 1,
    }
    assert samples(plane)["freetoken_http_requests_in_flight"] == 0


def test_two_registries_live_side_by_side(tmp_path: Path) -> None:
    first = Metrics(config(tmp_path), "a")
    second = Metrics(config(tmp_path), "b")
    assert b'model="a"' in first.render()[0]
    assert b'model="a"' not in second.render()[0]


def test_an_unknown_short_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        metric("no_such_metric")
