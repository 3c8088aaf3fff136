"""From asked to decided: every automatic value, its reason, and the rules between keys."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.config import (
    EnvironmentFacts,
    ResolvedConfig,
    gather_facts,
    load_config,
    resolve,
)
from freetokend.core.config.resolve import toml_literal
from freetokend.core.config.schema import AUTO, SCHEMA, Kind
from freetokend.core.errors import ConfigError

FACTS = EnvironmentFacts(
    runtime_dir="/run/user/7/freetokend",
    runtime_dir_reason="XDG_RUNTIME_DIR of this user",
    state_dir="/home/u/.local/state/freetokend",
    state_dir_reason="below this user's home directory",
    working_dir="/srv",
    home_dir="/home/u",
    stderr_is_journal=False,
    allowed_cpus_count=16,
    physical_cores_count=8,
    cpu_quota_count=None,
    huge_tmpfs_dir=None,
    nvidia_driver="",
    nvidia_cards=(),
)


def decided(
    asked: dict[str, object] | None = None, file: Path | None = None, **facts: object
) -> ResolvedConfig:
    overrides = {"model.path": "/models/m", **(asked or {})}
    config = load_config(
        file,
        overrides={key: value for key, value in overrides.items() if value is not None},
        vendor_file=Path("/nonexistent"),
        system_file=Path("/nonexistent/freetokend.toml"),
    )
    return resolve(config, dataclasses.replace(FACTS, **facts))  # type: ignore[arg-type]


def reason(resolved: ResolvedConfig, key: str) -> str:
    return next(value.reason for value in resolved.values() if value.key == key)


LEFT_OPEN = {
    "elastic.cushion_bytes",
    "elastic.growth_step_bytes",
    "elastic.margin_bytes",
    "elastic.vram_limit_bytes",
    "control.gpu",
    "engine.slots_count",
    "engine.device_bytes",
    "engine.preset",
    "engine.attention",
    "engine.sweep_tokens",
    "engine.kv_bytes",
    "engine.max_context_tokens",
    "pool.max_bytes",
}


def test_every_auto_is_decided_or_left_open_with_a_reason() -> None:
    resolved = decided()
    assert [value.key for value in resolved.values()] == list(SCHEMA)
    for value in resolved.values():
        assert (value.value == toml_literal(AUTO)) == (value.key in LEFT_OPEN)
        assert bool(value.reason) == (SCHEMA[value.key].auto or value.key == "model.id")


def test_the_shown_values_are_the_used_ones() -> None:
    resolved = decided({"engine.kv_bytes": "2GiB", "engine.pin_pool": False})
    for value in resolved.values():
        table, leaf = value.key.split(".")
        used = getattr(getattr(resolved, table), leaf)
        shown = tomllib.loads(f"x = {value.value}")["x"]
        number = SCHEMA[value.key].kind is not Kind.STRING
        assert used == (0 if shown == AUTO and number else shown)


def test_what_is_shown_can_be_read_back(tmp_path: Path) -> None:
    first = decided()
    file = tmp_path / "again.toml"
    file.write_text("".join(f"{value.key} = {value.value}\n" for value in first.values()))
    again = decided({"model.path": None}, file)
    assert dataclasses.replace(again, details=()) == dataclasses.replace(first, details=())


@pytest.mark.parametrize(
    ("asked", "facts", "threads", "why"),
    [
        ("auto", {}, 8, "one per physical core"),
        ("auto", {"allowed_cpus_count": 4}, 4, "may use 4 CPUs"),
        ("auto", {"cpu_quota_count": 2.5}, 2, "grants 2.5 CPUs"),
        ("auto", {"cpu_quota_count": 0.1}, 1, "grants 0.1 CPUs"),
        ("auto", {"cpu_quota_count": 64.0}, 8, "one per physical core"),
        ("auto", {"allowed_cpus_count": 1, "physical_cores_count": 0}, 1, "one per physical core"),
        (12, {}, 12, ""),
        (64, {}, 16, "64 were asked for, but this process may use 16 CPUs"),
    ],
)
def test_threads(asked: object, facts: dict[str, object], threads: int, why: str) -> None:
    resolved = decided({"engine.threads": asked}, None, **facts)
    assert resolved.engine.threads == threads
    assert why in reason(resolved, "engine.threads")


def test_the_pool_has_the_limit_that_was_asked_for_or_none() -> None:
    assert decided().pool.max_bytes == 0
    assert "headroom" in reason(decided(), "pool.max_bytes")
    assert decided({"pool.max_bytes": "3GiB"}).pool.max_bytes == 3 << 30


def test_the_engine_decides_where_an_nvidia_driver_is_loaded() -> None:
    resolved = decided(nvidia_driver="580.65.06")
    assert (resolved.engine.device, resolved.engine.backend) == (AUTO, AUTO)
    assert "580.65.06" in reason(resolved, "engine.device")
    assert "the engine takes a GPU that" in reason(resolved, "engine.device")
    assert reason(resolved, "engine.attention") == "FlashInfer where it works"
    assert reason(decided(), "engine.attention").startswith("not used")
    asked = decided({"engine.attention": "triton"}, nvidia_driver="580")
    assert asked.engine.attention == "triton"
    assert decided({"engine.backend": "hybrid"}, nvidia_driver="580").engine.device == AUTO
    assert decided({"engine.backend": "cpu"}, nvidia_driver="580").engine.device == "none"


@pytest.mark.parametrize("key", ["engine.device", "engine.backend"])
def test_without_a_gpu_or_its_driver_the_cpu_computes_and_why_is_said(key: str) -> None:
    assert (decided().engine.device, decided().engine.backend) == ("none", "cpu")
    assert reason(decided(), key) == "no NVIDIA GPU is present"
    without_driver = decided(nvidia_cards=("0000:01:00.0",))
    assert without_driver.engine.backend == "cpu"
    assert "GPU (PCI 0000:01:00.0) is present, but no" in reason(without_driver, key)


def test_the_host_device_serves_only_when_it_is_written() -> None:
    machines: list[dict[str, object]] = [
        {},
        {"nvidia_driver": "580"},
        {"nvidia_cards": ("0000:01:00.0",)},
    ]
    for facts in machines:
        assert decided(None, None, **facts).engine.device != "host"
    resolved = decided({"engine.device": "host", "engine.link_bytes_per_s": "11.8GB"})
    assert (resolved.engine.device, resolved.engine.backend) == ("host", AUTO)
    assert resolved.engine.link_bytes_per_s == 11_800_000_000


def test_what_was_asked_of_the_expert_cache_is_kept() -> None:
    asked: dict[str, object] = {
        "engine.device": "host",
        "engine.backend": "offload",
        "engine.slots_count": 40,
        "engine.device_bytes": "2GiB",
        "engine.preset": "agent",
        "engine.layers": "0=cpu",
        "engine.sweep_tokens": 2048,
    }
    resolved = decided(asked)
    for key, value in asked.items():
        used = getattr(resolved.engine, key.partition(".")[2])
        assert used == (2 << 30 if key == "engine.device_bytes" else value)


HOST: dict[str, object] = {"engine.device": "host"}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"engine.backend": "hybrid"},
            'engine.backend = "hybrid" needs a device, and there is none: no NVIDIA GPU is present',
        ),
        (
            {"engine.backend": "fused", "engine.device": "none"},
            'there is none: engine.device = "none"',
        ),
        ({**HOST, "engine.backend": "cpu"}, 'engine.device = "host" is used by no expert cache'),
        (
            {"engine.backend": "cpu", "engine.slots_count": 9},
            'engine.slots_count = 9 is for an expert cache, which engine.backend = "cpu" (as '
            "configured) does not have; remove engine.slots_count, or choose another backend",
        ),
        ({"engine.slots_count": 9}, '"cpu" (no NVIDIA GPU is present) does not have'),
        ({"engine.preset": "chat"}, 'engine.preset = "chat" is for an expert cache'),
        ({"engine.sweep_tokens": 99}, "engine.sweep_tokens = 99 is for an expert cache"),
        ({"engine.layers": "0=cpu"}, 'engine.layers = "0=cpu" is for an expert cache'),
        (
            {"engine.link_bytes_per_s": "1GB"},
            'engine.link_bytes_per_s = 1000000000 describes the device "host" and engine.device is '
            '"none"',
        ),
        (
            {"engine.device": "cuda", "engine.device_bytes": "1GiB"},
            'describes the device "host" and engine.device is "cuda"; remove engine.device_bytes',
        ),
        (
            {**HOST, "engine.attention": "triton"},
            'engine.attention = "triton" is for a GPU, and engine.device is "host"',
        ),
        ({"control.gpu": ""}, "control.gpu is empty; write a UUID, an index"),
        ({"control.tick_s": 0.01}, "from 0.05 to 60"),
        ({"engine.attention": "flash"}, 'one of "auto", "flashinfer", "triton"'),
        ({"engine.device": "gpu"}, 'one of "auto", "cuda", "host", "none"'),
        ({"engine.slots_count": 0}, "a whole number from 1 to 16777216"),
        ({**HOST, "engine.link_bytes_per_s": "fast"}, 'a size such as "4GiB" from 0 to 1 TiB/s'),
    ],
)
def test_contradictions_about_the_expert_cache_are_refused(
    asked: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        decided(asked)
    assert sentence in caught.value.message


def test_pool_directory_and_log_format() -> None:
    assert decided().pool.directory == ""
    assert decided(huge_tmpfs_dir="/run/pool").pool.directory == "/run/pool"
    assert decided({"pool.directory": ""}, huge_tmpfs_dir="/run/pool").pool.directory == ""
    assert decided().log.format == "text"
    assert decided(stderr_is_journal=True).log.format == "journal"


def test_sockets_follow_the_runtime_directory() -> None:
    resolved = decided({"service.runtime_dir": "run"})
    assert resolved.control.admin_socket == "/srv/run/admin.sock"
    assert resolved.control.monitor_socket == "/srv/run/monitor.sock"


def test_relative_paths_of_a_file_start_at_that_file(tmp_path: Path) -> None:
    file = tmp_path / "freetokend.toml"
    file.write_text("[model]\npath = '../m'\n[service]\nstate_dir = '~/s'\n")
    resolved = decided({"model.path": None}, file)
    assert resolved.model.path == str(tmp_path.parent / "m")
    assert resolved.model.id == "m"
    assert resolved.service.state_dir == "/home/u/s"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"model.path": None}, "no model is configured"),
        ({"engine.step_tokens": 8}, "cannot carry one token for each"),
        ({"service.runtime_dir": "/" + "d" * 110}, "Linux allows 107"),
        ({"service.state_dir": ""}, "command line: service.state_dir is empty"),
        (
            {"control.admin_socket": "/s", "control.monitor_socket": "/x/../s"},
            "are the same path",
        ),
    ],
)
def test_rules_between_keys(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decided(asked)
    assert sentence in caught.value.message


@given(st.text())
def test_toml_literals_read_back(text: str) -> None:
    try:
        assert tomllib.loads(f"x = {toml_literal(text)}")["x"] == text
    except UnicodeEncodeError:
        pytest.fail("a literal must be text")


def test_facts_of_this_machine() -> None:
    facts = gather_facts()
    assert 1 <= facts.physical_cores_count <= facts.allowed_cpus_count
    assert Path(facts.runtime_dir).is_absolute()
    assert Path(facts.state_dir).is_absolute()


def test_numerics_are_exact_unless_fast_is_asked_for() -> None:
    assert decided().engine.numerics == "exact"
    assert decided({"engine.numerics": "fast"}).engine.numerics == "fast"
    with pytest.raises(ConfigError, match='one of "exact", "fast"'):
        decided({"engine.numerics": "int8"})
