"""The pool's header: what does not match is named, and never trusted."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError
from freetokend.native.pool import (
    POOL_DATA_OFFSET,
    POOL_HEADER_BYTES,
    PoolHeader,
    PoolMismatchError,
    identity_bytes,
    pool_length_bytes,
    read_header,
)
from tests.native.host_support import IDENTITY, new_pool

GOOD = PoolHeader(identity=identity_bytes(IDENTITY), region_bytes=123_456, filled=True)


@settings(deadline=None)
@given(
    identity=st.binary(min_size=32, max_size=32),
    region_bytes=st.integers(1, 1 << 45),
    format_version=st.integers(0, 2**32 - 1),
    filled=st.booleans(),
)
def test_pack_and_unpack_agree(
    identity: bytes, region_bytes: int, format_version: int, filled: bool
) -> None:
    header = PoolHeader(
        identity=identity,
        region_bytes=region_bytes,
        format_version=format_version,
        filled=filled,
    )
    page = header.pack()
    assert len(page) == POOL_HEADER_BYTES
    assert PoolHeader.unpack(page) == header


def test_the_layout_is_fixed() -> None:
    page = GOOD.pack()
    assert page[:8] == b"FTKPOOL1"
    assert struct.unpack_from("<II", page, 8) == (1, 3)
    assert page[16:48] == bytes.fromhex(IDENTITY)
    assert struct.unpack_from("<QQ", page, 48) == (123_456, POOL_DATA_OFFSET)
    assert struct.unpack_from("<Q", page, 64)[0] != 0
    assert not any(page[72:])


@pytest.mark.parametrize(
    ("offset", "content", "field"),
    [
        (0, b"FTKPOOL2", "magic"),
        (0, bytes(8), "magic"),
        (8, struct.pack("<I", 2), "layout_version"),
        (48, struct.pack("<Q", 0), "region_bytes"),
        (48, struct.pack("<Q", 1 << 62), "region_bytes"),
        (56, struct.pack("<Q", 4096), "data_offset"),
        (64, struct.pack("<Q", 1), "filled"),
        (72, b"\1", "reserved"),
        (4095, b"\1", "reserved"),
    ],
)
def test_a_damaged_field_is_named(offset: int, content: bytes, field: str) -> None:
    page = bytearray(GOOD.pack())
    page[offset : offset + len(content)] = content
    with pytest.raises(PoolMismatchError) as caught:
        PoolHeader.unpack(bytes(page))
    assert caught.value.field == field


@settings(deadline=None)
@given(st.binary(max_size=POOL_HEADER_BYTES + 8))
def test_no_bytes_crash_the_parser(page: bytes) -> None:
    with pytest.raises(PoolMismatchError):
        PoolHeader.unpack(page)


@settings(deadline=None)
@given(st.integers(0, 71), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_another_header(offset: int, flip: int) -> None:
    page = bytearray(GOOD.pack())
    page[offset] ^= flip
    try:
        header = PoolHeader.unpack(bytes(page))
    except PoolMismatchError:
        return
    with pytest.raises(PoolMismatchError):
        header.check(identity=IDENTITY, region_bytes=GOOD.region_bytes)


def test_check_names_the_field_that_differs() -> None:
    GOOD.check(identity=IDENTITY, region_bytes=123_456)
    for changed, field in (
        ({"identity": "00" * 32}, "identity"),
        ({"region_bytes": 123_457}, "region_bytes"),
        ({"format_version": 2}, "format_version"),
    ):
        expected: dict[str, object] = {"identity": IDENTITY, "region_bytes": 123_456}
        with pytest.raises(PoolMismatchError) as caught:
            GOOD.check(**(expected | changed))  # type: ignore[arg-type]
        assert caught.value.field == field
        assert caught.value.param == field


def test_short_identities_are_padded_and_wrong_ones_refused() -> None:
    assert identity_bytes("ab" * 16) == b"\xab" * 16 + bytes(16)
    for wrong in ("", "xyz", "ab" * 33):
        with pytest.raises(InternalError):
            identity_bytes(wrong)


def test_read_header_of_a_new_pool() -> None:
    with new_pool(10_000) as pool:
        header = read_header(pool.fd)
        assert header == PoolHeader(identity=identity_bytes(IDENTITY), region_bytes=10_000)
        assert not header.filled


def test_a_file_of_another_length_is_not_a_pool() -> None:
    page = GOOD.pack()
    wanted_bytes = pool_length_bytes(GOOD.region_bytes)
    for length_bytes, field in (
        (wanted_bytes - 1, "length"),
        (wanted_bytes + 4096, "length"),
        (100, "length"),
        (0, "length"),
    ):
        fd = os.memfd_create("short")
        try:
            os.pwrite(fd, page, 0)
            os.ftruncate(fd, length_bytes)
            with pytest.raises(PoolMismatchError) as caught:
                read_header(fd)
            assert caught.value.field == field
        finally:
            os.close(fd)


def test_a_descriptor_that_cannot_be_read_is_not_a_pool() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(PoolMismatchError):
            read_header(reading)
    finally:
        os.close(reading)
        os.close(writing)
