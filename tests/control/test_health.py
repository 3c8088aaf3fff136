"""The health registry: the three answers and every warning, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.link.messages import EngineState
from freetokend.policy.health import (
    CODES,
    GPU_NOT_USED,
    HealthInputs,
    HealthState,
    Severity,
    assess,
    is_loopback,
)

READY = HealthInputs(
    state=HealthState.READY,
    served=True,
    device="cpu",
    backend="cpu",
    servable_context_tokens=32768,
    pool_bytes=10 << 30,
    pool_page_bytes=2 << 20,
    pinned_bytes=10 << 30,
    pin_done=True,
    max_waiting_count=256,
    kv_pages_total_count=1000,
)


def codes(inputs: HealthInputs) -> list[str]:
    return [warning.code for warning in assess(inputs).warnings]


def test_a_ready_engine_has_no_warnings() -> None:
    health = assess(READY)
    assert health.warnings == ()
    assert (health.alive, health.ready, health.ready_reason, health.progressing) == (
        True,
        True,
        "",
        True,
    )


def test_what_is_not_decided_yet_is_not_promised() -> None:
    """A process that ends over its configuration is not started again."""
    ended = HealthInputs(state=HealthState.RESTARTING, cause="exited with code 78: no such file.")
    (warning,) = assess(ended).warnings
    assert warning.text == "The engine has ended: exited with code 78: no such file."
    (warning,) = assess(replace(ended, state=HealthState.FAILED)).warnings
    assert "is not started again: exited with code 78: no such file. Read" in warning.text


def test_health_knows_every_state_of_the_engine() -> None:
    assert {state.value for state in HealthState} == {state.value for state in EngineState}


@pytest.mark.parametrize(
    ("state", "alive", "ready"),
    [
        (HealthState.STARTING, True, False),
        (HealthState.LOADING, True, False),
        (HealthState.READY, True, True),
        (HealthState.DRAINING, True, False),
        (HealthState.RESTARTING, True, False),
        (HealthState.FAILED, False, False),
        (HealthState.STOPPED, False, False),
    ],
)
def test_alive_and_ready(state: HealthState, alive: bool, ready: bool) -> None:
    health = assess(HealthInputs(state=state))
    assert (health.alive, health.ready) == (alive, ready)
    assert bool(health.ready_reason) == (not ready)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"state": HealthState.FAILED, "cause": "exit code 78"}, "engine-failed", "exit code 78"),
        (
            {"state": HealthState.RESTARTING, "cause": "killed by signal 9", "next_restart_s": 2.0},
            "engine-restarting",
            "killed by signal 9. It is started again in 2.0 s",
        ),
        (
            {"state": HealthState.RESTARTING, "next_restart_s": 0.0},
            "engine-restarting",
            "again now",
        ),
        ({"state": HealthState.DRAINING, "running_count": 3}, "draining", "3 are still running"),
        ({"restarts_count": 1, "cause": "x"}, "engine-was-restarted", "restarted once; last"),
        ({"restarts_count": 4, "cause": "x"}, "engine-was-restarted", "4 times"),
        ({"busy": True, "progress_age_s": 15.0}, "engine-stalled", "moved for 15 s"),
        ({"waiting_count": 205}, "queue-nearly-full", "205 requests wait and 256 may"),
        (
            {"kv_pages_used_count": 950, "waiting_count": 1},
            "kv-nearly-full",
            "950 of 1000 pages",
        ),
        ({"http_host": "0.0.0.0"}, "http-exposed", "0.0.0.0"),
        (
            {"notes": (f"{GPU_NOT_USED}: NVIDIA H200.",)},
            "gpu-not-used",
            "the CPU serves: NVIDIA H200.",
        ),
        (
            {"restarts_count": 1, "cause": "x", "healthy_for_s": 299.9},
            "engine-was-restarted",
            "last cause: x",
        ),
        ({"asked_context_tokens": 65536}, "context-below-asked", "65536 tokens, but 32768"),
        ({"notes": ("cache too small",)}, "engine-note", "cache too small"),
        (
            {"pinned_bytes": 1 << 30, "pin_note": "1 MiB of 10 MiB of the pool are pinned"},
            "pool-not-pinned",
            "1 MiB of 10 MiB of the pool are pinned",
        ),
        (
            {"pinned_bytes": 1 << 30},
            "pool-not-pinned",
            "1 GiB of 10 GiB of weights are pinned; the rest may be swapped out",
        ),
        ({"pool_page_bytes": 4096}, "pool-small-pages", "pages of 4 KiB"),
        ({"backend": "scripted"}, "scripted-engine", "no model is loaded"),
        ({"device": "host"}, "host-device", "Remove engine.device to serve without it"),
    ],
)
def test_each_warning(changes: dict[str, object], code: str, words: str) -> None:
    health = assess(replace(READY, **changes))  # type: ignore[arg-type]
    assert [warning.code for warning in health.warnings] == [code]
    assert words in health.warnings[0].text
    assert health.warnings[0].text.endswith((".", words))
    assert health.warnings[0].severity is CODES[code]


@pytest.mark.parametrize(
    "changes",
    [
        {"busy": True, "progress_age_s": 14.9},
        {"progress_age_s": 1000.0},
        {"waiting_count": 204},
        {"waiting_count": 5, "max_waiting_count": 0},
        {"kv_pages_used_count": 1000},
        {"kv_pages_used_count": 0, "kv_pages_total_count": 0, "waiting_count": 1},
        {"asked_context_tokens": 32768},
        {"restarts_count": 1, "cause": "x", "healthy_for_s": 300.0},
        {"pinned_bytes": 0, "pin_done": False},
        {"pinned_bytes": 0, "pin_wanted": False},
        {"pool_bytes": 0, "pinned_bytes": 0},
        {"served": False, "pool_page_bytes": 4096, "notes": (GPU_NOT_USED,)},
    ],
)
def test_what_is_no_warning(changes: dict[str, object]) -> None:
    assert codes(replace(READY, **changes)) == []  # type: ignore[arg-type]


def test_a_stall_is_not_progress_but_leaves_ready_alone() -> None:
    health = assess(replace(READY, busy=True, progress_age_s=60.0))
    assert (health.alive, health.ready, health.progressing) == (True, True, False)


def test_loading_says_how_far_it_has_come() -> None:
    loading = HealthInputs(state=HealthState.LOADING, load_stage="read")
    assert assess(loading).ready_reason == "the model is being loaded (read)"
    half = replace(loading, load_done_bytes=1 << 30, load_total_bytes=2 << 30)
    assert assess(half).ready_reason == "the model is being loaded: 1 GiB of 2 GiB"


def test_the_worst_come_first() -> None:
    health = assess(
        replace(
            READY,
            pool_page_bytes=4096,
            http_host="::",
            busy=True,
            progress_age_s=99.0,
            notes=("one", "two"),
        )
    )
    severities = [warning.severity for warning in health.warnings]
    assert severities == sorted(severities, key=list(Severity)[::-1].index)
    assert [w.text for w in health.warnings if w.code == "engine-note"] == ["one", "two"]


@given(
    st.builds(
        HealthInputs,
        state=st.sampled_from(HealthState),
        next_restart_s=st.none() | st.floats(0, 1e6),
        progress_age_s=st.floats(0, 1e9),
        busy=st.booleans(),
        served=st.booleans(),
        waiting_count=st.integers(0, 10**6),
        max_waiting_count=st.integers(0, 10**6),
        pool_bytes=st.integers(0, 2**48),
        kv_pages_total_count=st.integers(0, 10**6),
    )
)
def test_total_and_known(inputs: HealthInputs) -> None:
    health = assess(inputs)
    assert {warning.code for warning in health.warnings} <= set(CODES)
    assert health == assess(inputs)
    assert health.alive or not health.ready


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
