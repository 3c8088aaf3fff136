"""Reads the configuration's layers and merges them; refuses whatever the schema does not know.

Later layers win, key by key: the vendor's file, the administrator's file, the drop-ins beside it
in the order of their names, the command line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from freetokend.core.config.asked import COMMAND_LINE, DEFAULT, Config, Origin, Setting
from freetokend.core.config.check import checked_value, unknown_key, unknown_table
from freetokend.core.config.positions import key_lines
from freetokend.core.config.schema import SCHEMA, TABLES
from freetokend.core.errors import ConfigError

VENDOR_FILE: Final = Path("/usr/lib/freetokend/freetokend.toml")
SYSTEM_FILE: Final = Path("/etc/freetokend/freetokend.toml")

_TOML_POSITION: Final = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(slots=True)
class _Merge:
    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)  # key, sentence

    def set(self, name: str, value: object, origin: Origin) -> None:
        key = SCHEMA.get(name)
        if key is None:
            self.problems.append((name, f"{origin}: {unknown_key(name)}"))
            return
        try:
            checked = checked_value(key, value)
        except ValueError as error:
            self.problems.append((name, f"{origin}: {error}"))
            return
        self.settings[name] = Setting(key=name, value=checked, origin=origin)


def load_config(
    config_file: Path | None = None,
    *,
    overrides: Mapping[str, object] | None = None,
    vendor_file: Path = VENDOR_FILE,
    system_file: Path = SYSTEM_FILE,
) -> Config:
    """The asked configuration.

    `config_file` (--config) takes the place of `system_file` and must exist; drop-ins are read
    from the directory beside it with ".d" appended. `overrides` are dotted keys of the command
    line with values as TOML would give them. Raises `ConfigError` that lists every problem of all
    layers, each with file and line.
    """
    merge = _Merge()
    for key in SCHEMA.values():
        if key.default is not None:
            merge.settings[key.name] = Setting(key=key.name, value=key.default, origin=DEFAULT)
    for file, required in _layer_files(config_file, vendor_file, system_file):
        _read_file(merge, file, required)
    for name, value in (overrides or {}).items():
        merge.set(name, value, COMMAND_LINE)
    if merge.problems:
        raise ConfigError(
            "\n".join(sentence for _, sentence in merge.problems), param=merge.problems[0][0]
        )
    return Config(merge.settings)


def parse_override(text: str) -> tuple[str, object]:
    """KEY=VALUE of the command line as (dotted key, value).

    The value is TOML; what is no TOML value is taken as a string, so that `log.level=debug` needs
    no quotes. Raises `ConfigError` when there is no "=".
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f'"{text}" is not KEY=VALUE, for example http.port=8440')
    try:
        document = tomllib.loads(f"value = {value}")
        parsed: object = document["value"] if len(document) == 1 else value
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return name.strip(), parsed


def _layer_files(
    config_file: Path | None, vendor_file: Path, system_file: Path
) -> list[tuple[Path, bool]]:
    main = system_file if config_file is None else config_file
    drop_in_dir = main.with_name(main.name + ".d")
    try:
        drop_ins = sorted(drop_in_dir.glob("*.toml"))
    except OSError as error:
        raise ConfigError(f"{drop_in_dir}: cannot be listed: {error.strerror}") from error
    return [
        (vendor_file, False),
        (main, config_file is not None),
        *((drop_in, True) for drop_in in drop_ins),
    ]


def _read_file(merge: _Merge, file: Path, required: bool) -> None:
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        if required:
            merge.problems.append(("", f"{file}: the file does not exist"))
        return
    except OSError as error:
        merge.problems.append(("", f"{file}: cannot be read: {error.strerror}"))
        return
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        merge.problems.append(("", f"{file}:{line}: not UTF-8 text"))
        return
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        merge.problems.append(("", _syntax_problem(file, text, str(error))))
        return
    _merge_document(merge, str(file), document, key_lines(text))


def _syntax_problem(file: Path, text: str, message: str) -> str:
    match = _TOML_POSITION.search(message)
    if match is None:
        return f"{file}: not valid TOML: {message}"
    line = match[1] or str(text.rstrip("\n").count("\n") + 1)
    what = message[: match.start()]
    return f"{file}:{line}: not valid TOML: {what[:1].lower()}{what[1:]}"


def _merge_document(
    merge: _Merge,
    file: str,
    document: Mapping[str, object],
    lines: Mapping[tuple[str, ...], int],
) -> None:
    for table, content in document.items():
        origin = Origin(file=file, line=lines.get((table,)))
        if table not in TABLES:
            known = isinstance(content, dict | list)
            sentence = unknown_table(table) if known else unknown_key(table)
            merge.problems.append((table, f"{origin}: {sentence}"))
        elif not isinstance(content, dict):
            merge.problems.append((table, f"{origin}: {table} must be a table: [{table}]"))
        else:
            for leaf, value in content.items():
                key_origin = Origin(file=file, line=lines.get((table, leaf)))
                merge.set(f"{table}.{leaf}", value, key_origin)
