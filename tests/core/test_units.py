"""Sizes, rates and durations as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.units import (
    format_bytes,
    format_bytes_per_s,
    format_seconds,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        (" 1.5 GiB ", 3 << 29),
        ("500MB", 500_000_000),
        ("1kB", 1000),
        ("137TiB", 137 << 40),
        ("3B", 3),
    ],
)
def test_parse_bytes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 gib", "1e3", "1,5GiB", "0x10", "1GiB2", "\u0661"]
)
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**62))
def test_whole_numbers_are_exact(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == size_bytes
    assert parse_bytes(f"{size_bytes}KiB") == size_bytes * 1024


@given(st.integers(min_value=1, max_value=2**50))
def test_a_formatted_size_reads_back_within_its_digits(size_bytes: int) -> None:
    again = parse_bytes(format_bytes(size_bytes))
    assert abs(again - size_bytes) <= size_bytes * 0.051


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (150 << 20, "150 MiB")],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(0, "0 B/s"), (1.44e9, "1.4 GB/s"), (2.5e6, "2.5 MB/s"), (1500, "1.5 kB/s")]
)
def test_format_bytes_per_s(rate: float, text: str) -> None:
    assert format_bytes_per_s(rate) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0123, "12 ms"),
        (1.25, "1.2 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (3660, "1 h 1 min"),
        (90061, "1 d 1 h"),
        (-75, "-1 min 15 s"),
    ],
)
def test_format_seconds(duration_s: float, text: str) -> None:
    assert format_seconds(duration_s) == text
