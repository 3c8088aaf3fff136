"""`freetokenctl trace`: offline, in its own process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetokend.traces.compare import TraceComparison
from freetokend.traces.synthetic import Locality, Workload, synthetic_trace
from freetokend.traces.trace import Phase, RoutingTrace, TraceShape
from freetokend.traces.trace_file import write_trace
from tests.ctl.conftest import Ctl

SHAPE = TraceShape(layers_count=4, experts_per_layer=8, experts_per_token=2)


@pytest.fixture
def trace() -> RoutingTrace:
    return synthetic_trace(
        SHAPE,
        Locality(conversation_share=0.2, drift_share=0.4, drift_tokens=8),
        Workload(conversations_count=2, turns_count=1, prompt_tokens=8, decode_tokens=20),
        seed=3,
    )


@pytest.fixture
def file(trace: RoutingTrace, tmp_path: Path) -> Path:
    write_trace(tmp_path / "some.trace", trace)
    return tmp_path / "some.trace"


async def test_replay_prints_every_policy(ctl: Ctl, file: Path) -> None:
    done = await ctl("trace", "replay", str(file))
    assert (done.code, done.err) == (0, "")
    assert "4 layers of 8 experts, 2 per token (8 in a step of one token)" in done.out
    assert "40 decode steps, 2 prompt steps" in done.out
    for word in ("ours", "lru", "optimum", "placement", "static"):
        assert word in done.out
    assert len([line for line in done.out.splitlines() if " %  " in line]) == 6


async def test_replay_in_json_has_the_numbers(ctl: Ctl, file: Path, trace: RoutingTrace) -> None:
    done = await ctl("trace", "replay", str(file), "--slots", "12", "--slots", "5", "-o", "json")
    assert done.code == 0
    document = json.loads(done.out)
    assert document["trace"]["decode_steps_count"] == 40
    small, large = document["replays"]
    assert (small["slots_count"], large["slots_count"]) == (5, 12)
    assert small["ours"] == TraceComparison(trace).at(5).ours


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--slots", "33"], "(32)"),
        (["--slots", "0"], "not above 0"),
        (["--slots", "abc"], "--slots: 'abc' is not a whole number"),
    ],
)
async def test_sizes_that_mean_nothing(
    ctl: Ctl, file: Path, arguments: list[str], told: str
) -> None:
    done = await ctl("trace", "replay", str(file), *arguments)
    assert (done.code, done.out) == (64, "")
    assert told in done.err


@pytest.fixture
def shorter(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-1])
    return file


async def test_a_recording_that_was_cut_off(ctl: Ctl, shorter: Path) -> None:
    done = await ctl("trace", "replay", str(shorter))
    assert done.code == 65
    assert "some.trace cannot be used" in done.err
    assert "cut off" in done.err


async def test_nothing_to_replay(ctl: Ctl, file: Path, trace: RoutingTrace) -> None:
    prompts = tuple(step for step in trace.steps if step.phase is Phase.PREFILL)
    write_trace(file, RoutingTrace(shape=SHAPE, steps=prompts))
    done = await ctl("trace", "replay", str(file))
    assert done.code == 65
    assert "no decode step" in done.err
    assert (await ctl("trace", "replay", str(file.with_name("none")))).code == 74
