"""Layers, origins, and the refusal of whatever the schema does not know."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from freetokend.core.config import load_config, parse_override
from freetokend.core.config.schema import AUTO, SCHEMA, Kind
from freetokend.core.errors import ConfigError, Reason


class Machine:
    """The three places that configuration comes from, below one directory."""

    def __init__(self, root: Path) -> None:
        self.vendor = root / "usr" / "freetokend.toml"
        self.system = root / "etc" / "freetokend.toml"
        for file in (self.vendor, self.system):
            file.parent.mkdir()

    def drop_in(self, name: str, text: str) -> Path:
        directory = self.system.with_name("freetokend.toml.d")
        directory.mkdir(exist_ok=True)
        file = directory / name
        file.write_text(text)
        return file

    def load(self, config_file: Path | None = None, **overrides: object):  # type: ignore[no-untyped-def]
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        return load_config(
            config_file, overrides=dotted, vendor_file=self.vendor, system_file=self.system
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refusal(machine: Machine, text: str) -> str:
    machine.system.write_text(text)
    with pytest.raises(ConfigError) as caught:
        machine.load()
    assert caught.value.reason is Reason.CONFIG_INVALID
    return caught.value.message.replace(str(machine.system), "FILE")


def test_without_files_every_key_with_a_default_has_it(machine: Machine) -> None:
    config = machine.load()
    assert set(config.settings) == set(SCHEMA) - {"model.path"}
    assert {str(setting.origin) for setting in config.settings.values()} == {"default"}


def test_later_layers_win_key_by_key(machine: Machine) -> None:
    machine.vendor.write_text("[http]\nport = 1\nhost = 'a'\n[log]\nlevel = 'debug'\n")
    machine.system.write_text("[http]\nport = 2\n[engine]\nthreads = 3\n")
    machine.drop_in("20-b.toml", "[http]\nport = 4\n")
    first = machine.drop_in("10-a.toml", "[http]\nport = 3\n[service]\n\nready = 'listening'\n")
    machine.drop_in("README", "this is not TOML = [")

    config = machine.load(engine__threads=7)

    def seen(key: str) -> tuple[object, str]:
        return config.settings[key].value, str(config.settings[key].origin)

    assert seen("http.port")[0] == 4
    assert seen("http.host") == ("a", f"{machine.vendor}:3")
    assert seen("log.level") == ("debug", f"{machine.vendor}:5")
    assert seen("engine.threads") == (7, "command line")
    assert seen("service.ready") == ("listening", f"{first}:5")


def test_config_file_takes_the_place_of_the_system_file_and_its_drop_ins(
    machine: Machine, tmp_path: Path
) -> None:
    machine.vendor.write_text("[log]\nlevel = 'error'\n")
    machine.system.write_text("[http]\nport = 1\n")
    machine.drop_in("10.toml", "[http]\nport = 2\n")
    own = tmp_path / "own.toml"
    own.write_text("[http]\nhost = '::1'\n")
    (tmp_path / "own.toml.d").mkdir()
    (tmp_path / "own.toml.d" / "x.toml").write_text("[http]\nmax_body_bytes = '1MiB'\n")

    settings = machine.load(own).settings

    assert settings["http.port"].value == 8440
    assert settings["http.host"].value == "::1"
    assert settings["http.max_body_bytes"].value == 1 << 20
    assert settings["log.level"].value == "error"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[http]\n\nprot = 1", 'FILE:3: unknown key "http.prot"; did you mean "http.port"?'),
        ("[service]\nport = 1", 'FILE:2: unknown key "service.port"; did you mean "http.port"?'),
        ("http.hots = ''", 'FILE:1: unknown key "http.hots"; did you mean "http.host"?'),
        ("port = 1", 'FILE:1: unknown key "port"; did you mean "http.port"?'),
        ("\n[engin]\n", "FILE:2: unknown table [engin]; did you mean [engine]?"),
        ("[qqqqq]", "FILE:1: unknown table [qqqqq]; known are [model], [service]"),
        ("[log]\nzzz = 1", 'FILE:2: unknown key "log.zzz"'),
        ("log = 3", "FILE:1: log must be a table: [log]"),
        ("[http]\nport = 'x'", 'FILE:2: http.port = "x" is not allowed; it must be a whole number'),
        ("[http]\nport = 65536", "from 0 to 65535"),
        ("[http]\nport = 80.0", "http.port = 80.0 is not allowed"),
        ("[http]\nport = true", "http.port = true is not allowed"),
        ("[http]\nport = [1]", "http.port = an array is not allowed"),
        ("[http.port]\na = 1", "http.port = a table is not allowed"),
        ("[http]\nport = 'auto'", 'http.port = "auto" is not allowed'),
        ("[engine]\npin_pool = 1", "engine.pin_pool = 1 is not allowed; it must be true or false"),
        ("[engine]\nthreads = 0", 'a whole number from 1 to 1024, or "auto"'),
        ("[engine]\nkv_bytes = '8 gigs'", 'a size such as "4GiB"'),
        ("[engine]\nrestart_window_s = nan", "engine.restart_window_s = nan is not allowed"),
        ("[service]\nready = 'soon'", 'it must be one of "token", "listening"'),
        ("[model]\npath = 'a\\u0000b'", "FILE:2: not valid TOML"),
        ("[http]\nport = ", "FILE:2: not valid TOML: invalid value"),
        ("[http]\nport = 1\nport = 2\n", "FILE:3: not valid TOML: cannot overwrite a value"),
    ],
)
def test_refusals_name_file_line_and_what_is_allowed(
    machine: Machine, text: str, expected: str
) -> None:
    if "u0000" in text:
        text = text.replace("\\u0000", "\0")
    assert expected in refusal(machine, text)


def test_all_problems_of_all_layers_are_told_at_once(machine: Machine) -> None:
    machine.vendor.write_text("[http]\nport = -1\n")
    lines = refusal(machine, "[http]\nx_y_z = 1\n[logs]\n").splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{machine.vendor}:2: http.port = -1")


def test_files_that_cannot_be_read_are_named(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: the file does not exist"):
        machine.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        machine.load(tmp_path)
    machine.system.write_bytes(b"[http]\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=":2: not UTF-8 text"):
        machine.load()


def test_a_dangling_drop_in_is_an_error_not_a_default(machine: Machine) -> None:
    os.symlink("/nonexistent/file", machine.drop_in("5.toml", "").with_name("9.toml"))
    with pytest.raises(ConfigError, match=r"9\.toml: the file does not exist"):
        machine.load()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http.port=8441", ("http.port", 8441)),
        ("log.level=debug", ("log.level", "debug")),
        ('model.path = "/a b"', ("model.path", "/a b")),
        ("engine.pin_pool=false", ("engine.pin_pool", False)),
        ("engine.kv_bytes=4GiB", ("engine.kv_bytes", "4GiB")),
        ("model.path=/a=b", ("model.path", "/a=b")),
        ("log.level=1\nport = 3", ("log.level", "1\nport = 3")),
    ],
)
def test_overrides_are_toml_with_bare_strings(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


def test_bad_overrides(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="is not KEY=VALUE"):
        parse_override("http.port")
    with pytest.raises(ConfigError, match=r'command line: unknown key "http\.prt"'):
        machine.load(http__prt=1)


@pytest.mark.parametrize("key", SCHEMA.values(), ids=lambda key: key.name)
def test_every_key_is_documented_and_its_default_is_allowed(key) -> None:  # type: ignore[no-untyped-def]
    assert key.doc.endswith(".")
    assert key.table
    assert key.leaf
    if key.kind is Kind.BYTES:
        assert key.leaf.endswith("_bytes")
    if key.kind is Kind.SECONDS:
        assert key.leaf.endswith("_s")
    if key.default is not None:
        config = load_config(
            overrides={key.name: key.default},
            vendor_file=Path("/nonexistent"),
            system_file=Path("/nonexistent/freetokend.toml"),
        )
        assert config.settings[key.name].value == key.default
    assert key.auto == (AUTO in key.allowed())
