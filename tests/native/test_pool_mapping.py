"""A pool outlives the engine that filled it, and is trusted only when it was finished."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from freetokend.core.errors import InternalError, ModelDataError, ResourceError
from freetokend.native.loader import ShardFile
from freetokend.native.pool import PoolMapping, PoolMismatchError, read_header
from tests.native.host_support import (
    new_mapping,
    new_pool,
    reference_bytes,
    region_bytes,
    run_child,
    start_child,
    write_shards,
)

FILL_AND_WAIT = """
    import signal, sys
    from freetokend.native.loader import ShardFile
    from freetokend.native.pool import PoolMapping

    fd, mark, *files = sys.argv[1:]
    mapping = PoolMapping(int(fd))
    shards, offset = [], 0
    for entry in files:
        path, _, length = entry.rpartition(":")
        shards.append(ShardFile(path=path, offset_bytes=offset, length_bytes=int(length)))
        offset += int(length)
    mapping.load(shards)
    if mark == "mark":
        mapping.mark_filled()
        mapping.protect()
        mapping.pin()
    print("loaded", flush=True)
    signal.pause()
"""


def _fill_in_a_child_and_kill_it(fd: int, shards: list[ShardFile], mark: str) -> None:
    files = [f"{shard.path}:{shard.length_bytes}" for shard in shards]
    child = start_child(FILL_AND_WAIT, fds=[fd], arguments=[str(fd), mark, *files])
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "loaded\n"
        child.kill()
    assert child.returncode == -signal.SIGKILL


def test_another_process_finds_the_same_bytes_after_sigkill(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [5_000_000, 4096, 1_234_567])
    with new_pool(region_bytes(shards)) as pool:
        _fill_in_a_child_and_kill_it(pool.fd, shards, "mark")
        expected = reference_bytes(shards)
        for shard in shards:
            os.unlink(shard.path)  # nothing is read from the disk any more
        header = read_header(pool.fd)
        assert header.filled
        with PoolMapping(pool.fd) as mapping:
            assert mapping.filled
            assert mapping.view(0, mapping.region_bytes).tobytes() == expected


def test_a_crash_before_the_mark_is_not_a_filled_pool(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [300_000])
    with new_pool(region_bytes(shards)) as pool:
        _fill_in_a_child_and_kill_it(pool.fd, shards, "no")
        assert not read_header(pool.fd).filled
        with PoolMapping(pool.fd) as mapping:
            assert not mapping.header.filled


def test_loading_again_takes_the_mark_away_first(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [300_000])
    with new_pool(region_bytes(shards)) as pool, PoolMapping(pool.fd) as mapping:
        mapping.load(shards)
        mapping.mark_filled()
        assert read_header(pool.fd).filled
        os.unlink(shards[0].path)
        with pytest.raises(ModelDataError):
            mapping.load(shards)
        assert not read_header(pool.fd).filled


def test_the_address_is_aligned_and_stays(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [300_000])
    with new_mapping(region_bytes(shards)) as mapping:
        address = mapping.region_address
        assert address % (2 << 20) == 0
        mapping.load(shards)
        mapping.mark_filled()
        mapping.protect()
        assert mapping.region_address == address
        assert mapping.view(0, 300_000).readonly


def test_two_mappings_of_one_pool_see_the_mark_at_once() -> None:
    with new_pool(4096) as pool, PoolMapping(pool.fd) as one, PoolMapping(pool.fd) as other:
        assert not other.filled
        one.mark_filled()
        assert other.filled
        assert other.header.filled


def test_a_stray_write_to_a_protected_pool_is_a_fault() -> None:
    code = """
        import ctypes, sys
        from freetokend.native.pool import PoolMapping
        mapping = PoolMapping(int(sys.argv[1]))
        ctypes.c_char.from_address(mapping.region_address).value = b"x"
        if sys.argv[2] == "protect":
            mapping.protect()
            assert ctypes.c_char.from_address(mapping.region_address).value == b"x"
            ctypes.c_char.from_address(mapping.region_address).value = b"y"
        print("written")
    """
    with new_pool(4096) as pool:
        assert run_child(code, fds=[pool.fd], arguments=[str(pool.fd), "no"]) == "written\n"
        child = start_child(code, fds=[pool.fd], arguments=[str(pool.fd), "protect"])
        assert child.communicate()[0] == ""
        assert child.returncode == -signal.SIGSEGV


def test_views_stay_inside_the_region() -> None:
    with new_mapping(10_000) as mapping:
        assert mapping.view(9_999, 1).nbytes == 1
        for offset_bytes, length_bytes in ((0, 10_001), (10_000, 1), (-1, 1), (5, -1)):
            with pytest.raises(InternalError):
                mapping.view(offset_bytes, length_bytes)


def test_close_may_come_twice_and_ends_every_use() -> None:
    with new_mapping(4096) as mapping:
        mapping.pin()
        mapping.close()
        mapping.close()
        with pytest.raises(RuntimeError):
            mapping.mark_filled()
        with pytest.raises(RuntimeError):
            mapping.view(0, 1)


def test_what_is_no_pool_is_not_mapped() -> None:
    fd = os.memfd_create("other")
    try:
        os.ftruncate(fd, 4 << 20)
        with pytest.raises(PoolMismatchError, match="FTKPOOL1"):
            PoolMapping(fd)
    finally:
        os.close(fd)


def test_a_read_only_descriptor_is_refused_in_words() -> None:
    with new_pool(4096) as pool:
        fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY)
        try:
            with pytest.raises(ResourceError, match="reading and writing"):
                PoolMapping(fd)
        finally:
            os.close(fd)
