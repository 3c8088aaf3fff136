"""Loads of real files: the same bytes on every path, and a specific error for every fault."""

from __future__ import annotations

import dataclasses
import os
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetokend.core.errors import CancelledRequestError, ModelDataError
from freetokend.native import host
from freetokend.native.loader import LoadSettings, ShardFile, check_cover
from freetokend.native.pool import PoolHeader, PoolMapping, pool_length_bytes
from tests.native.host_support import (
    IDENTITY,
    new_mapping,
    reference_bytes,
    region_bytes,
    run_child,
    write_shards,
)

CHUNK_BYTES = 64 << 10
PATHS = [
    pytest.param(uring, direct, id=f"{'io_uring' if uring else 'threads'}-{name}")
    for uring in (True, False)
    for direct, name in ((True, "direct"), (False, "buffered"))
]


def _settings(uring: bool = True, direct: bool = True, **changes: object) -> LoadSettings:
    chosen = LoadSettings(
        use_uring=uring, use_direct=direct, chunk_bytes=CHUNK_BYTES, max_depth_count=16
    )
    return dataclasses.replace(chosen, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("uring", "direct"), PATHS)
@pytest.mark.parametrize(
    "lengths_bytes",
    [
        [1],
        [4095],
        [4096, 4097],
        [CHUNK_BYTES],
        [CHUNK_BYTES - 1],
        [8192, CHUNK_BYTES + 1],
        [4096, 0, 8192],
        [5 * CHUNK_BYTES, 12_288, 3 * CHUNK_BYTES + 777],
        [4096 * i for i in range(1, 40)],
    ],
    ids=str,
)
def test_every_path_reads_the_reference_bytes(
    tmp_path: Path, uring: bool, direct: bool, lengths_bytes: list[int]
) -> None:
    shards = write_shards(tmp_path, lengths_bytes)
    with new_mapping(region_bytes(shards)) as mapping:
        result = mapping.load(shards, settings=_settings(uring, direct))
        assert mapping.view(0, mapping.region_bytes).tobytes() == reference_bytes(shards)
    assert result.loaded_bytes == region_bytes(shards)
    assert result.io == ("io_uring" if uring else "threads")
    assert result.direct == direct
    assert result.notes == ()
    assert result.bytes_per_s > 0


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths_bytes=st.lists(st.integers(0, 3 * CHUNK_BYTES), min_size=1, max_size=5).filter(any),
    chunk_pages=st.integers(1, 20),
    depth_count=st.integers(1, 9),
    uring=st.booleans(),
)
def test_any_lengths_chunks_and_depths(
    tmp_path: Path, lengths_bytes: list[int], chunk_pages: int, depth_count: int, uring: bool
) -> None:
    """Shards may start anywhere in the region; those off a page are read through the cache."""
    shards = write_shards(tmp_path, lengths_bytes)
    chosen = _settings(uring, chunk_bytes=4096 * chunk_pages, max_depth_count=depth_count)
    with new_mapping(region_bytes(shards)) as mapping:
        result = mapping.load(shards, settings=chosen)
        assert mapping.view(0, mapping.region_bytes).tobytes() == reference_bytes(shards)
    off_page = [shard for shard in shards if shard.offset_bytes % 4096]
    assert result.direct == (not off_page)
    assert len(result.notes) == bool(off_page)


def test_progress_grows_to_the_total(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [8 << 20])
    seen: list[tuple[int, int]] = []
    with new_mapping(region_bytes(shards)) as mapping:
        mapping.load(
            shards,
            lambda done, total: seen.append((done, total)),
            settings=_settings(max_depth_count=1, poll_s=0.001),
        )
    assert seen[-1] == (8 << 20, 8 << 20)
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {8 << 20}


def _shard_with_length(path: Path, length_bytes: int) -> ShardFile:
    return ShardFile(path=str(path), offset_bytes=0, length_bytes=length_bytes)


@pytest.mark.parametrize("actual_bytes", [0, 1, 99_999, 100_001, 104_096])
def test_a_shard_of_another_length_is_named_with_both_numbers(
    tmp_path: Path, actual_bytes: int
) -> None:
    path = tmp_path / "00000.ftw"
    path.write_bytes(bytes(actual_bytes))
    with (
        new_mapping(100_000) as mapping,
        pytest.raises(ModelDataError, match=rf"{path} has {actual_bytes} bytes .* 100000"),
    ):
        mapping.load([_shard_with_length(path, 100_000)])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "00007.ftw"
    with (
        new_mapping(4096) as mapping,
        pytest.raises(ModelDataError, match=rf"cannot open shard {path}: No such file"),
    ):
        mapping.load([_shard_with_length(path, 4096)])


def test_what_is_no_file_is_refused_and_does_not_block(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with new_mapping(4096) as mapping:
        for path in (fifo, tmp_path, Path("/dev/zero")):
            with pytest.raises(ModelDataError, match=f"{path} is not a regular file"):
                mapping.load([_shard_with_length(path, 4096)])


def test_shards_must_cover_the_region_exactly() -> None:
    def shard(offset_bytes: int, length_bytes: int) -> ShardFile:
        return ShardFile(path="x.ftw", offset_bytes=offset_bytes, length_bytes=length_bytes)

    check_cover([shard(4096, 8192), shard(0, 4096)], 12_288)  # order does not matter
    for wrong in (
        [],
        [shard(0, 4096)],
        [shard(4096, 8192)],
        [shard(0, 4096), shard(8192, 4096)],
        [shard(0, 8192), shard(4096, 4096)],
        [shard(0, 8192), shard(8192, 8192)],
        [shard(0, 12_288), shard(0, 12_288)],
        [shard(0, 16_384), shard(16_384, -4096)],
    ):
        with pytest.raises(ModelDataError):
            check_cover(wrong, 12_288)


@pytest.mark.parametrize("uring", [True, False])
def test_a_cancel_in_the_middle_stops_the_load(tmp_path: Path, uring: bool) -> None:
    shards = write_shards(tmp_path, [32 << 20])
    cancel = threading.Event()
    seen: list[int] = []

    def progress(done_bytes: int, total_bytes: int) -> None:
        seen.append(done_bytes)
        cancel.set()

    chosen = _settings(uring, chunk_bytes=4096, max_depth_count=1, poll_s=0.001)
    with new_mapping(region_bytes(shards)) as mapping:
        with pytest.raises(CancelledRequestError):
            mapping.load(shards, progress, cancel=cancel, settings=chosen)
        assert seen
        assert max(seen) < 32 << 20
        assert not mapping.filled
        mapping.load(shards)  # the mapping is as good as before
        assert mapping.view(0, mapping.region_bytes).tobytes() == reference_bytes(shards)


def test_an_exception_in_the_progress_callback_ends_the_load(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [32 << 20])

    def progress(done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    chosen = _settings(chunk_bytes=4096, max_depth_count=1, poll_s=0.001)
    with new_mapping(region_bytes(shards)) as mapping:
        with pytest.raises(KeyboardInterrupt):
            mapping.load(shards, progress, settings=chosen)
        mapping.close()  # no read is in flight any more


# A seccomp filter that answers one system call with an errno, as containers do.
FILTERED_LOAD = """
    import ctypes, struct, sys
    from freetokend.native.loader import ShardFile
    from freetokend.native.pool import PoolMapping, create_pool_file

    program = bytes.fromhex(sys.argv[1])
    path, length = sys.argv[2], int(sys.argv[3])
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program)
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
    pool = create_pool_file("freetoken-pool-test", length, "ab" * 32)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, fprog, 0, 0) == 0
    with PoolMapping(pool.fd) as mapping:
        result = mapping.load([ShardFile(path=path, offset_bytes=0, length_bytes=length)])
        assert mapping.view(0, length).tobytes() == open(path, "rb").read()
    print(result.io, result.direct, *result.notes)
"""


def _filter(*steps: tuple[int, int, int, int]) -> str:
    """BPF instructions (code, jump if true, jump if false, constant) as hexadecimal."""
    return b"".join(struct.pack("<HBBI", *step) for step in steps).hex()


LOAD, EQUAL, HAS_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL = 0x7FFF_0000, 0x0005_0000
EPERM, EINVAL, ENOSYS = 1, 22, 38
IO_URING_SETUP, OPENAT, O_DIRECT = 425, 257, os.O_DIRECT


@pytest.mark.parametrize("error_number", [EPERM, ENOSYS])
def test_without_io_uring_threads_read_and_say_so(tmp_path: Path, error_number: int) -> None:
    (shard,) = write_shards(tmp_path, [5_000_001])
    program = _filter(
        (LOAD, 0, 0, 0),
        (EQUAL, 0, 1, IO_URING_SETUP),
        (RETURN, 0, 0, FAIL | error_number),
        (RETURN, 0, 0, ALLOW),
    )
    output = run_child(FILTERED_LOAD, arguments=[program, shard.path, str(shard.length_bytes)])
    assert output.startswith("threads True read with threads because io_uring is not usable")
    assert os.strerror(error_number) in output


def test_without_direct_reads_the_page_cache_is_used_and_it_says_so(tmp_path: Path) -> None:
    (shard,) = write_shards(tmp_path, [5_000_001])
    program = _filter(
        (LOAD, 0, 0, 0),
        (EQUAL, 0, 3, OPENAT),
        (LOAD, 0, 0, 16 + 2 * 8),  # the flags
        (HAS_BIT, 0, 1, O_DIRECT),
        (RETURN, 0, 0, FAIL | EINVAL),
        (RETURN, 0, 0, ALLOW),
    )
    output = run_child(FILTERED_LOAD, arguments=[program, shard.path, str(shard.length_bytes)])
    assert output.startswith("io_uring False 1 of 1 shards were read through the page cache")


def test_a_load_makes_huge_pages_in_a_plain_memfd(tmp_path: Path) -> None:
    """Whatever this machine's setting for files in memory is; every later mapping has them too."""
    shards = write_shards(tmp_path, [(5 << 20) + 4096, 3 << 20])
    size_bytes = region_bytes(shards)
    wanted_ratio = 1.0 if host.kernel_collapses_pages() else 0.0
    fd = os.memfd_create("pool")
    try:
        os.ftruncate(fd, pool_length_bytes(size_bytes))
        header = PoolHeader(identity=bytes.fromhex(IDENTITY), region_bytes=size_bytes)
        os.pwrite(fd, header.pack(), 0)
        with PoolMapping(fd) as mapping:
            mapping.load(shards, verify=True)
            mapping.mark_filled()
            assert mapping.pages().huge_ratio >= wanted_ratio
        with PoolMapping(fd) as mapping:
            assert mapping.filled
            bytes(mapping.view(0, size_bytes))
            assert mapping.pages().huge_ratio >= wanted_ratio
    finally:
        os.close(fd)
