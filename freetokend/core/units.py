"""Quantities as people write and read them; inside the program they are plain base units."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4

_BYTE_UNITS: Final[dict[str, int]] = {
    "": 1,
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BYTES: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes from "8GiB", "1.5 GiB", "500MB" or "4096".

    Raises `ValueError` with the accepted units when `text` is none of these.
    """
    match = _BYTES.fullmatch(text)
    if match is None or match[2] not in _BYTE_UNITS:
        units = ", ".join(unit for unit in _BYTE_UNITS if unit)
        raise ValueError(f'"{text}" is not a size; write a number of bytes or one with {units}')
    number, unit_bytes = match[1], _BYTE_UNITS[match[2]]
    if "." in number:
        return round(float(number) * unit_bytes)
    return int(number) * unit_bytes


def format_bytes(count_bytes: float) -> str:
    """A size for people: 1536 -> "1.5 KiB", 0 -> "0 B"."""
    for unit, unit_bytes in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count_bytes) >= unit_bytes:
            return f"{_short(count_bytes / unit_bytes)} {unit}"
    return f"{int(count_bytes)} B"


def format_bytes_per_s(rate_bytes_per_s: float) -> str:
    """A rate for people, in decimal units as disks and links are sold: "1.4 GB/s"."""
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(rate_bytes_per_s) >= unit_bytes:
            return f"{_short(rate_bytes_per_s / unit_bytes)} {unit}/s"
    return f"{int(rate_bytes_per_s)} B/s"


def format_seconds(duration_s: float) -> str:
    """A duration for people: 0.0123 -> "12 ms", 75 -> "1 min 15 s", 90061 -> "1 d 1 h"."""
    if duration_s < 0:
        return f"-{format_seconds(-duration_s)}"
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    whole_s = round(duration_s)
    if whole_s < 60:
        return f"{whole_s} s"
    minutes, seconds = divmod(whole_s, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _short(value: float) -> str:
    """Three significant digits at most, without a trailing ".0"."""
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
    return text.removesuffix(".0")
