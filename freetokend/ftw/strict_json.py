"""JSON from files that may be damaged or hostile: bounded in size, strict in form.

Every fault is a `ModelDataError` that names the file, so a caller never has to guard against what
the standard parser accepts (duplicate keys, NaN) or dies of (deep nesting, endless digits).
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from freetokend.core.errors import ModelDataError, Reason

# An element costs the parser up to some 300 bytes, so the limit on their count bounds the memory
# before parsing starts, where a limit on bytes alone would allow gigabytes. The index of a model of
# 20,000 experts in a quantised form has about 300,000.
MAX_ELEMENTS_COUNT: Final = 1_500_000
_MAX_DIGITS_COUNT: Final = 40


def read_file(path: Path, *, limit_bytes: int, purpose: str) -> bytes:
    """Contents of a regular file of at most `limit_bytes`; ModelDataError otherwise."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ModelDataError(f"{path} is missing; it is needed as {purpose}.") from None
    except (OSError, ValueError) as error:
        raise io_error(f"cannot open {path}", error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelDataError(f"{path} is not a regular file; it is needed as {purpose}.")
        if status.st_size > limit_bytes:
            raise ModelDataError(
                f"{path} has {status.st_size} bytes; {purpose} may have at most {limit_bytes}."
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise io_error(f"cannot read {path}", error) from error
    finally:
        os.close(descriptor)
    if len(data) > limit_bytes:
        raise ModelDataError(f"{path} has more than {limit_bytes} bytes, too many for {purpose}.")
    return data


def io_error(what: str, error: Exception) -> ModelDataError:
    """`error` of the operating system as ours."""
    detail = getattr(error, "strerror", None) or str(error)
    return ModelDataError(f"{what}: {detail}.", reason=Reason.IO_FAILED)


def parse_json(data: bytes, where: str) -> object:
    """The value in `data`; `where` names its origin in errors."""

    def fail(why: str) -> NoReturn:
        raise ModelDataError(f"{where} is not valid JSON: {why}.")

    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_ELEMENTS_COUNT:
        fail(f"it has more than {MAX_ELEMENTS_COUNT} elements")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    fail(f"the key {key!r:.100} appears twice in one object")
                seen.add(key)
        return result

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS_COUNT:
            fail(f"a number of {len(digits)} digits")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            fail(f"the number {digits:.40} is out of range")
        return value

    def constant(name: str) -> NoReturn:
        fail(f"the value {name} is not a number")

    try:
        return cast(
            object,
            json.loads(
                data.decode("utf-8"),
                object_pairs_hook=pairs,
                parse_int=integer,
                parse_float=real,
                parse_constant=constant,
            ),
        )
    except UnicodeDecodeError as error:
        fail(f"byte {error.start} is not UTF-8")
    except json.JSONDecodeError as error:
        fail(f"{error.msg} at line {error.lineno}, column {error.colno}")
    except RecursionError:
        fail("it is nested too deeply")


class JsonObject:
    """Typed access to one JSON object; `finish` refuses keys that nobody asked for."""

    __slots__ = ("_used", "_values", "where")

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ModelDataError(f"{where} must be an object, not {kind_of(value)}.")
        self._values = cast(dict[str, object], value)
        self._used: set[str] = set()
        self.where = where

    def fail(self, key: str, why: str) -> NoReturn:
        """Raise the error for the value of `key`."""
        raise ModelDataError(f"{self.where}: {key} {why}.")

    def has(self, key: str) -> bool:
        """Whether there is such a key, for those that may be left out."""
        return key in self._values

    def get(self, key: str) -> object:
        """The raw value; ModelDataError when it is absent."""
        if key not in self._values:
            self.fail(key, "is missing")
        self._used.add(key)
        return self._values[key]

    def integer(self, key: str, low: int, high: int) -> int:
        """An integer in low..high (inclusive)."""
        return self.as_integer(key, self.get(key), low, high)

    def as_integer(self, key: str, value: object, low: int, high: int) -> int:
        """`value`, found at `key`, as an integer in low..high."""
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, f"must be an integer, not {kind_of(value)}")
        if not low <= value <= high:
            self.fail(key, f"is {value}, outside {low}..{high}")
        return value

    def text(self, key: str, pattern: re.Pattern[str]) -> str:
        """A string that matches `pattern` as a whole."""
        return self.as_text(key, self.get(key), pattern)

    def as_text(self, key: str, value: object, pattern: re.Pattern[str]) -> str:
        """`value`, found at `key`, as a string that matches `pattern` as a whole."""
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {kind_of(value)}")
        if pattern.fullmatch(value) is None:
            self.fail(key, f"is {value!a:.100}, which does not match {pattern.pattern}")
        return value

    def flag(self, key: str) -> bool:
        """A boolean."""
        value = self.get(key)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {kind_of(value)}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """An integer or a real in low..high."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, f"must be a number, not {kind_of(value)}")
        if not low <= value <= high:
            self.fail(key, f"is {value}, outside {low}..{high}")
        return float(value)

    def items(self, key: str, max_count: int) -> list[object]:
        """A list of at most `max_count` elements."""
        value = self.get(key)
        if not isinstance(value, list):
            self.fail(key, f"must be a list, not {kind_of(value)}")
        if len(value) > max_count:
            self.fail(key, f"has {len(value)} elements, more than {max_count}")
        return cast(list[object], value)

    def member(self, key: str) -> JsonObject:
        """The object at `key`."""
        return JsonObject(self.get(key), f"{self.where}: {key}")

    def members(self) -> dict[str, object]:
        """All values by key, for objects whose keys are data."""
        self._used.update(self._values)
        return self._values

    def finish(self) -> None:
        """ModelDataError when a key was never asked for."""
        unknown = sorted(self._values.keys() - self._used)
        if unknown:
            raise ModelDataError(f"{self.where}: unknown key {unknown[0]!a:.100}.")


def kind_of(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
