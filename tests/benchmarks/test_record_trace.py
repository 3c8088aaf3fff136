"""The recorder of the benchmarks on a tiny model: a trace that replays, and that others read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prefill_residents import talks
from benchmarks.record_trace import record
from freetokend.ftw.convert import convert
from freetokend.ftw.reader import FtwDirectory
from freetokend.traces.compare import TraceComparison
from freetokend.traces.trace import SKIPPED, Phase
from freetokend.traces.trace_file import read_trace
from tests.support.tiny_checkpoints import write_tiny_qwen3_moe

pytestmark = pytest.mark.slow


def test_prompts_and_steps_of_one_and_of_two_conversations(tmp_path: Path) -> None:
    write_tiny_qwen3_moe(tmp_path / "hf", layers=3, mlp_only_layers=(1,))
    convert(tmp_path / "hf", tmp_path / "ftw", progress=lambda _: None)
    record(FtwDirectory(tmp_path / "ftw"), tmp_path / "some.trace", 3, 3, 2)
    trace = read_trace(tmp_path / "some.trace")
    read = [step for step in trace.steps if step.phase is Phase.PREFILL]
    written = [step for step in trace.steps if step.phase is Phase.DECODE]
    assert {step.tokens_count for step in written} == {1, 2}
    assert len(written) == len(read) // 3 * 2 * 3
    for step in read:
        assert (step.ids[-1, :-1] == SKIPPED).all(), "the last layer computes the last token only"
        assert (step.ids[:-1] != SKIPPED).all()
    assert 0 < TraceComparison(trace).at(4).optimum < 1
    assert all((one.prompt != SKIPPED).all() for one in talks(trace))
