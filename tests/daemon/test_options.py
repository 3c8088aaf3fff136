"""The command line and the engine's command line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from freetokend.core.config import gather_facts, load_config, resolve
from freetokend.core.errors import ConfigError
from freetokend.daemon.http import bind_http, http_address
from freetokend.daemon.options import parse_options
from freetokend.daemon.service import ServicePlan, engine_argv, engine_environment


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


def test_help_says_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "78 configuration wrong" in out
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
