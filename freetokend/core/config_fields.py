"""Checked access to the fields of a JSON object that someone else wrote (a checkpoint's config).

Every reader names the file, the field, the value found and what was expected, so that a damaged or
foreign file is refused with a sentence a person can act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from freetokend.core.errors import ModelDataError, Reason

_T = TypeVar("_T")
_SHOWN_CHARACTERS: Final = 80


class ConfigFields:
    """One JSON object with typed, bounded readers.

    A field that is absent or null takes its default; without a default it is required. Every
    reader raises ModelDataError (MODEL_INVALID) on a missing field, a wrong type or a value out
    of bounds.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """The field as it was read, None when absent."""
        return self._values.get(name)

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1
    ) -> int:
        """An integer in [low, high]; booleans are not integers here."""
        value = self._values.get(name)
        if value is None:
            return self._default(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        if not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        value = self._values.get(name)
        if value is None:
            return self._default(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not above < value <= 1e30:
            raise self._wrong(name, value, f"a finite number above {above:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._values.get(name)
        if value is None:
            return self._default(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def integers(self, name: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high], or one such integer; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                raise self._wrong(name, value, f"integers from {low} to {high}")
        return tuple(items)

    def nested(self, name: str) -> ConfigFields:
        """The object in the field; an empty one when absent."""
        value = self._values.get(name)
        if value is None:
            return ConfigFields({}, f"{self._where}: {name}")
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return ConfigFields(value, f"{self._where}: {name}")

    def invalid(self, message: str) -> ModelDataError:
        """An error about this object as a whole."""
        return ModelDataError(f"{self._where}: {message}")

    def unsupported(self, message: str) -> ModelDataError:
        """An error about something valid that is not implemented."""
        return ModelDataError(f"{self._where}: {message}", reason=Reason.MODEL_UNSUPPORTED)

    def _default(self, name: str, default: _T | None) -> _T:
        if default is None:
            raise self.invalid(f"{name} is missing; the file does not describe a whole model.")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> ModelDataError:
        shown = repr(value)
        if len(shown) > _SHOWN_CHARACTERS:
            shown = shown[:_SHOWN_CHARACTERS] + "..."
        return self.invalid(f"{name} is {shown}; expected {expected}.")
