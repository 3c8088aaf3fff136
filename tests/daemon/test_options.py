"""The command line and the engine's command line."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from freetokend.core.config import gather_facts, load_config, resolve
from freetokend.core.errors import REACTIONS, ConfigError, Reason, UnavailableError
from freetokend.daemon.exit_codes import EXIT_CODES, exit_codes_text
from freetokend.daemon.http import bind_http, http_address, listen
from freetokend.daemon.options import parse_options
from freetokend.daemon.service import ServicePlan, engine_argv, engine_environment, engine_settings


def test_shorthands_and_set_become_overrides() -> None:
    options = parse_options(
        ["--model", "/m", "--port", "1", "--set", "engine.kv_bytes=1GiB", "--set", "http.port=2"]
    )
    assert dict(options.overrides) == {
        "model.path": "/m",
        "http.port": 2,
        "engine.kv_bytes": "1GiB",
    }
    assert options.config_file is None
    assert not options.check_config


def test_help_and_manual_tell_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    manual = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert exit_codes_text() in out
    assert f"```\n{exit_codes_text()}```\n" in manual
    assert len(exit_codes_text().splitlines()) == len(EXIT_CODES)
    # 66 tells of something that a request asked for.
    assert set(EXIT_CODES) == {entry.exit_code for entry in REACTIONS.values()} - {66} | {0}
    assert "--scripted" not in out, "a development flag is not advertised"


def plan(script_file: Path | None = None) -> ServicePlan:
    facts = gather_facts()
    config = resolve(load_config(overrides={"model.path": "/models/m"}), facts)
    return ServicePlan(config=config, facts=facts, index=None, script_file=script_file)


def test_engine_command_lines() -> None:
    native = engine_argv(plan())
    assert native[-2:] == ("--model-dir", "/models/m")
    assert "-P" in native
    scripted = engine_argv(replace(plan(), script_file=Path("/s.json")))
    assert scripted[-2:] == ("--scripted", "/s.json")


def test_engine_imports_from_where_we_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    first, _, rest = engine_environment()["PYTHONPATH"].partition(":")
    assert os.path.isfile(os.path.join(first, "freetokend", "__init__.py"))
    assert rest == "/elsewhere"


def test_http_addresses() -> None:
    with bind_http("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert http_address(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: another program"):
            bind_http("127.0.0.1", port)
    with bind_http("::1", 0) as listener:
        assert http_address(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 port 0"):
        bind_http("192.0.2.1", 0)


def test_what_may_be_free_at_the_next_start_is_no_error_of_the_configuration() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"port {port}: another program") as caught:
            listen("127.0.0.1", port)
    assert caught.value.reason is Reason.ADDRESS_IN_USE
    with pytest.raises(UnavailableError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 0)  # a network that is still coming up looks the same
    with pytest.raises(ConfigError, match="no-such-host"):
        listen("no-such-host.invalid", 0)


def test_the_engine_is_told_every_key_of_its_table() -> None:
    asked: dict[str, object] = {
        "model.path": "/m",
        "engine.backend": "hybrid",
        "engine.device": "host",
        "engine.slots_count": 40,
        "engine.device_bytes": "2GiB",
        "engine.link_bytes_per_s": "12GB",
        "engine.preset": "agent",
        "engine.layers": "0=cpu",
        "engine.sweep_tokens": 2048,
        "engine.kv_bytes": "1GiB",
        "engine.numerics": "fast",
        "engine.pin_pool": False,
    }
    nowhere = Path("/nonexistent")
    config = resolve(
        load_config(overrides=asked, vendor_file=nowhere, system_file=nowhere / "x.toml"),
        gather_facts(),
    )
    told = engine_settings(config)
    # Restarts are control's own affair; the engine calls its threads by what they are.
    own = {"restart_budget_count", "restart_window_s"}
    for field in fields(config.engine):
        if field.name not in own:
            name = "threads_count" if field.name == "threads" else field.name
            assert getattr(told, name) == getattr(config.engine, field.name), field.name
