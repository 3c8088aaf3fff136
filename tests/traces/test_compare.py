"""The comparison of policies, and the gates of the benchmark that prints it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import miss_rate
from benchmarks.routing_cases import RECORDED, SYNTHETIC, recorded_trace
from freetokend.traces.compare import Comparison, TraceComparison, slots_at, step_demand, table
from freetokend.traces.synthetic import Locality, Workload, synthetic_trace
from freetokend.traces.trace import RoutingTrace, TraceShape
from freetokend.traces.trace_file import write_trace

SHAPE = TraceShape(layers_count=5, experts_per_layer=32, experts_per_token=2)


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return synthetic_trace(
        SHAPE,
        Locality(conversation_share=0.1, drift_share=0.5, drift_tokens=32),
        Workload(conversations_count=2, turns_count=2, prompt_tokens=32, decode_tokens=60),
        seed=3,
    )


def test_policies_are_in_the_order_they_must_be(trace: RoutingTrace) -> None:
    comparison = TraceComparison(trace)
    for ratio in (0.1, 0.3, 0.5, 0.75, 1.0):
        one = comparison.at(slots_at(SHAPE, ratio))
        assert one.capacity_ratio == pytest.approx(ratio)
        assert one.optimum <= one.ours <= one.lru
    assert one.ours == one.placement == one.static == 0.0


def test_sizes() -> None:
    assert (slots_at(SHAPE, 0.5), slots_at(SHAPE, 0.0)) == (80, 1)
    assert step_demand(SHAPE) == 10


def test_the_table_has_a_line_per_size(trace: RoutingTrace) -> None:
    comparison = TraceComparison(trace)
    lines = table([comparison.at(16), comparison.at(160)]).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(" 10.0 %      16")
    assert lines[2].split()[3:] == ["0.00"] * 5


def found(trace: RoutingTrace, **changes: float) -> tuple[miss_rate.Case, Comparison]:
    """A size that passes every gate, with changes."""
    good = Comparison(
        slots_count=32,
        capacity_ratio=0.2,
        ours=0.2,
        lru=0.2,
        optimum=0.1,
        placement=0.3,
        static=0.8,
    )
    return miss_rate.Case(name="case", trace=trace), replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"lru": 0.19}, ["LRU 0.19"]),
        ({"placement": 0.25}, ["placement misses 1.25 times"]),
        ({"static": 0.25}, ["static misses 1.25 times"]),
        ({"placement": 0.25, "capacity_ratio": 0.8}, []),
        ({"placement": 0.1, "slots_count": 14, "static": 0.2}, []),
        ({"slots_count": 14, "static": 0.19}, ["static 0.19"]),
    ],
)
def test_gates(trace: RoutingTrace, changes: dict[str, float], told: list[str]) -> None:
    failures = list(miss_rate.failures(*found(trace, **changes)))
    assert len(failures) == len(told)
    for text, words in zip(failures, told, strict=True):
        assert words in text


def test_a_drawn_trace_that_is_not_as_published_is_told(trace: RoutingTrace) -> None:
    published = replace(SYNTHETIC[0].published, capacity_ratio=0.2)
    case, one = found(trace, lru=0.19)
    case = replace(case, published=published)
    assert list(miss_rate.fit_failures(case, [one])) == ["case: LRU misses 0.190, to be 0.16"]
    assert list(miss_rate.fit_failures(case, [replace(one, lru=0.17)])) == []


def test_the_benchmark_runs(
    trace: RoutingTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_trace(tmp_path / "some.trace", trace)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ["--trace", str(tmp_path / "some.trace"), "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["miss_rate", "--quick", *arguments])
    assert miss_rate.main() == 0
    out = capsys.readouterr().out
    assert "all gates pass" in out
    assert "no picture: matplotlib is not installed" in out
    assert (tmp_path / "rows.json").exists()


def test_the_recorded_trace_is_of_the_demo_model() -> None:
    trace = recorded_trace()
    assert trace.shape == TraceShape(layers_count=30, experts_per_layer=8, experts_per_token=2)
    assert RECORDED.stat().st_size < 256 << 10
