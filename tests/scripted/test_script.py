"""Scripts: what is accepted, what is refused by name, and what the engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freetokend.core.errors import ConfigError, Reason
from freetokend.link.messages import EngineSettings, EngineState, FinishReason
from freetokend.scripted.main import main
from freetokend.scripted.script import (
    FaultAction,
    FaultPoint,
    Script,
    TokenKind,
    parse_script,
    read_script,
)
from tests.support.scripted import greedy, scripted_engine


def test_empty_script_is_all_defaults() -> None:
    assert parse_script({}) == Script()


def test_full_script() -> None:
    script = parse_script(
        {
            "model": "m",
            "tokens": {"kind": "cycle", "token_ids": [1, 2]},
            "load": {"chunks_count": 2, "total_bytes": 10, "chunk_s": 0.5},
            "step_s": 1,
            "faults": [{"at": "load", "action": "fail", "reason": "host_memory"}],
            "description": {"notes": ["slow"], "layers_count": 3},
        }
    )
    assert script.tokens.kind is TokenKind.CYCLE
    assert script.tokens.token_ids == (1, 2)
    (fault,) = script.faults
    assert (fault.at, fault.action) == (FaultPoint.LOAD, FaultAction.FAIL)
    assert fault.reason is Reason.HOST_MEMORY
    assert dict(script.description) == {"notes": ("slow",), "layers_count": 3}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "script: must be an object"),
        ({"speed": 1}, "script.speed: unknown key"),
        ({"step_s": "fast"}, "script.step_s: 'fast' does not fit"),
        ({"step_s": True}, "script.step_s"),
        ({"step_s": -1}, "script.step_s"),
        ({"model": 7}, "script.model"),
        ({"tokens": {"kind": "random"}}, "random"),
        ({"tokens": {"kind": "fixed", "token_ids": []}}, "must not be empty"),
        ({"faults": [{"at": "lunch"}]}, "lunch"),
        ({"faults": [{"once": 1}]}, "faults.once"),
        ({"description": {"colour": "red"}}, "EngineDescription"),
    ],
)
def test_bad_scripts_name_the_key(tmp_path: Path, body: Any, words: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(body))
    with pytest.raises(ConfigError, match=words) as error:
        read_script(path)
    assert str(path) in error.value.message


def test_unreadable_scripts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_script(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_script(tmp_path / "text.json")


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "--lifeline-fd" in capsys.readouterr().out


async def test_echo_gives_the_prompt_back_and_stops() -> None:
    async with scripted_engine() as harness:
        await harness.wait_state(EngineState.READY)
        updates = await harness.collect(greedy("echo", (9, 8, 7)))
        assert tuple(t for u in updates for t in u.token_ids) == (9, 8, 7)
        assert updates[-1].finish_reason is FinishReason.STOP
        empty = await harness.collect(greedy("empty", ()))
        assert empty[-1].finish_reason is FinishReason.STOP
        assert empty[-1].completion_tokens == 0


async def test_engine_bounds_what_runs_and_what_waits() -> None:
    """Control admits as much as the engine's settings allow together, so none is turned away."""
    # Slow steps, so that all five are there long before the first one is done.
    script = {
        "tokens": {"kind": "cycle"},
        "prefill_steps_count": 3,
        "heartbeat_s": 0.02,
        "step_s": 0.01,
    }
    settings = EngineSettings(model="m", max_running_count=2, max_waiting_count=3)
    async with scripted_engine(script, settings=settings) as harness:
        await harness.wait_state(EngineState.READY)
        streams = [harness.supervisor.generate(greedy(f"r{i}")) for i in range(5)]
        for stream in streams:
            last = [update async for update in stream][-1]
            assert last.finish_reason is FinishReason.LENGTH
            assert last.completion_tokens == 8
        stats = await harness.wait_until(lambda s: s.stats.running_count == 0 and not s.busy)
        # Each takes 3 + 8 steps: two at a time need three rounds, one at a time would need five.
        assert 33 <= stats.stats.steps_count < 55
