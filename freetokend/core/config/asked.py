"""The configuration as it was asked for: one value and one origin per key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from freetokend.core.config.schema import TomlScalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value was written; str() is "FILE:LINE", "default" or "command line"."""

    label: str = ""
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.file is None:
            return self.label
        return self.file if self.line is None else f"{self.file}:{self.line}"


DEFAULT = Origin(label="default")
COMMAND_LINE = Origin(label="command line")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value as asked; sizes are already bytes, "auto" is still "auto"."""

    key: str
    value: TomlScalar
    origin: Origin


class Config:
    """Every key of the schema that has a value: the asked one or the default.

    Immutable. Keys without a default that nobody set are absent.
    """

    __slots__ = ("_settings",)

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = MappingProxyType(dict(settings))

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Settings by dotted key."""
        return self._settings

    def get(self, key: str) -> Setting | None:
        """The setting of a dotted key, or None when a required key is not set."""
        return self._settings.get(key)
