"""Every exit code of `freetokend`, for its help and the manual."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

EXIT_CODES: Final[Mapping[int, str]] = MappingProxyType(
    {
        0: "stopped as asked",
        64: "the command line is wrong",
        65: "the model's files cannot be used",
        69: "the engine cannot be reached",
        70: "a fault of freetokend or of its engine, which was restarted in vain",
        71: "not enough memory, or no usable device",
        73: "not enough disk space",
        74: "a file could not be read or written",
        75: "the port or a socket is taken, or another freetokend still runs there",
        77: "not permitted",
        78: "the configuration is wrong",
        130: "interrupted before it served",
    }
)


def exit_codes_text() -> str:
    """One line per code, as the help and the manual show it."""
    return "".join(f"{code:>4}  {meaning}\n" for code, meaning in EXIT_CODES.items())
