"""One value against one key of the schema, and the words for what is wrong with it."""

from __future__ import annotations

import difflib
import math
from typing import TypeVar

from freetokend.core.config.schema import AUTO, SCHEMA, TABLES, Key, Kind, TomlScalar
from freetokend.core.units import parse_bytes

_Number = TypeVar("_Number", int, float)


def checked_value(key: Key, value: object) -> TomlScalar:
    """`value` as the program uses it; raises `ValueError` with a sentence for the person.

    Sizes become bytes; seconds stay int or float.
    """
    if key.auto and value == AUTO:
        return AUTO
    match key.kind:
        case Kind.STRING:
            return _string(key, value)
        case Kind.BOOLEAN:
            if isinstance(value, bool):
                return value
        case Kind.INTEGER:
            if isinstance(value, int) and not isinstance(value, bool):
                return _in_range(key, value)
        case Kind.SECONDS:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return _in_range(key, value)
        case Kind.BYTES | Kind.BYTES_PER_S:
            if isinstance(value, int) and not isinstance(value, bool):
                return _in_range(key, value)
            if isinstance(value, str):
                try:
                    size_bytes = parse_bytes(value)
                except ValueError:
                    raise _refusal(key, value) from None
                return _in_range(key, size_bytes)
    raise _refusal(key, value)


def _string(key: Key, value: object) -> str:
    if not isinstance(value, str) or "\0" in value or (key.choices and value not in key.choices):
        raise _refusal(key, value)
    return value


def _in_range(key: Key, value: _Number) -> _Number:
    low = -math.inf if key.minimum is None else key.minimum
    high = math.inf if key.maximum is None else key.maximum
    if not low <= value <= high:  # also refuses nan
        raise _refusal(key, value)
    return value


def _refusal(key: Key, value: object) -> ValueError:
    return ValueError(f"{key.name} = {_shown(value)} is not allowed; it must be {key.allowed()}")


def _shown(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case dict():
            return "a table"
        case list():
            return "an array"
        case _:
            return str(value)


def unknown_key(name: str) -> str:
    """The sentence for a dotted key that the schema lacks, with the nearest one if any is near."""
    near = _nearest(name)
    hint = f'; did you mean "{near}"?' if near else ""
    return f'unknown key "{name}"{hint}'


def unknown_table(name: str) -> str:
    """The sentence for a table that the schema lacks."""
    near = difflib.get_close_matches(name, TABLES, n=1)
    hint = f"; did you mean [{near[0]}]?" if near else ""
    return f"unknown table [{name}]{hint or '; known are ' + ', '.join(f'[{t}]' for t in TABLES)}"


def _nearest(name: str) -> str | None:
    table, _, leaf = name.partition(".")
    siblings = {key.leaf: key.name for key in SCHEMA.values() if key.table == table}
    if close := difflib.get_close_matches(leaf, siblings, n=1):
        return siblings[close[0]]
    # The right word in the wrong table, or with no table at all.
    elsewhere = {key.leaf: key.name for key in SCHEMA.values()}
    if close := difflib.get_close_matches(leaf or table, elsewhere, n=1, cutoff=0.8):
        return elsewhere[close[0]]
    close = difflib.get_close_matches(name, SCHEMA, n=1, cutoff=0.8)
    return close[0] if close else None
