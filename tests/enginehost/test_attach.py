"""Attaching: filled once, found again without the disk, never trusted when it does not match."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from freetokend.core.errors import CancelledRequestError, ResourceError
from freetokend.core.host_facts import HostMemory
from freetokend.enginehost.attach import attach_pool
from freetokend.ftw.reader import FtwDirectory
from freetokend.native.lifeline import ReceivedPool
from freetokend.native.pool import (
    POOL_DATA_OFFSET,
    PoolMismatchError,
    create_pool_file,
    read_header,
)
from tests.enginehost.local_engine import PLENTY, attach, converted, new_pool
from tests.support.tiny_checkpoints import write_tiny_mixtral


def region(pool: ReceivedPool, directory: FtwDirectory) -> bytes:
    return os.pread(pool.fd, directory.index.region_bytes, POOL_DATA_OFFSET)


def test_a_new_pool_is_filled_marked_and_protected(mixtral: FtwDirectory) -> None:
    with new_pool(mixtral) as pool:
        assert not read_header(pool.fd).filled
        attached = attach(pool, mixtral)
        with attached.mapping:
            assert not attached.reattached
            assert attached.load_s > 0
            assert attached.load_bytes_per_s > 0
            assert read_header(pool.fd).filled
            whole = mixtral.read_region(0, mixtral.index.region_bytes).tobytes()
            assert region(pool, mixtral) == whole
            flags = Path("/proc/self/maps").read_text()
            line = next(
                one
                for one in flags.splitlines()
                if int(one.split("-")[0], 16) == attached.mapping.region_address - POOL_DATA_OFFSET
            )
            assert line.split()[1] == "r--s"


def test_a_filled_pool_is_found_again_without_its_files(
    mixtral: FtwDirectory, tmp_path: Path
) -> None:
    copy = tmp_path / "ftw"
    shutil.copytree(mixtral.path, copy)
    directory = FtwDirectory(copy)
    with new_pool(directory) as pool:
        with attach(pool, directory).mapping:
            pass
        for path in directory.shard_paths():
            path.unlink()
        # no memory is needed either: it is paid already
        again = attach(pool, directory, HostMemory(mem_available_bytes=0))
        with again.mapping as mapping:
            assert again.reattached
            assert again.load_s == again.load_bytes_per_s == 0.0
            assert again.attach_s < 1.0
            assert bytes(mapping.view(0, 64)) == mixtral.read_region(0, 64).tobytes()


def test_another_models_pool_of_the_same_length_is_loaded_again(
    mixtral: FtwDirectory, tmp_path: Path
) -> None:
    write_tiny_mixtral(tmp_path / "hf", seed=1)
    other = converted(tmp_path / "hf", tmp_path / "ftw")
    assert other.index.region_bytes == mixtral.index.region_bytes
    with new_pool(mixtral) as pool:
        with attach(pool, mixtral).mapping:
            pass
        attached = attach(pool, other)
        with attached.mapping:
            assert not attached.reattached
            assert any("another model" in note for note in attached.notes)
            whole = other.read_region(0, other.index.region_bytes).tobytes()
            assert region(pool, other) == whole
            header = read_header(pool.fd)
            assert header.filled
            assert header.identity == bytes.fromhex(other.index.identity)


def test_a_damaged_header_is_loaded_again(mixtral: FtwDirectory) -> None:
    with new_pool(mixtral) as pool:
        with attach(pool, mixtral).mapping:
            pass
        os.pwrite(pool.fd, b"GARBAGE!", 0)
        attached = attach(pool, mixtral)
        with attached.mapping:
            assert not attached.reattached


def test_an_interrupted_fill_is_not_trusted(mixtral: FtwDirectory) -> None:
    with new_pool(mixtral) as pool:
        os.pwrite(pool.fd, b"half", POOL_DATA_OFFSET)
        attached = attach(pool, mixtral)
        with attached.mapping:
            assert not attached.reattached
            assert region(pool, mixtral)[:4] == mixtral.read_region(0, 4).tobytes()


def test_a_pool_of_another_length_is_refused(mixtral: FtwDirectory) -> None:
    pool = create_pool_file("large", 64 << 20, mixtral.index.identity)
    try:
        received = ReceivedPool(name=pool.name, length_bytes=pool.length_bytes, fd=pool.fd)
        with pytest.raises(PoolMismatchError, match=f"has {64 << 20} bytes, the model has"):
            attach(received, mixtral)
        assert not read_header(pool.fd).filled
    finally:
        pool.close()


def test_memory_is_checked_before_a_byte_is_read(mixtral: FtwDirectory) -> None:
    reads: list[int] = []
    with new_pool(mixtral) as pool:
        with pytest.raises(ResourceError, match="does not fit in this machine's memory"):
            attach_pool(
                pool,
                mixtral,
                HostMemory(mem_available_bytes=1000),
                progress=lambda done, _total: reads.append(done),
                cancel=threading.Event(),
            )
        assert reads == []
        assert not read_header(pool.fd).filled


def test_a_load_can_be_abandoned(mixtral: FtwDirectory) -> None:
    cancel = threading.Event()

    def stop_at_once(_done: int, _total: int) -> None:
        raise CancelledRequestError("stopping")

    with new_pool(mixtral) as pool:
        with pytest.raises(CancelledRequestError):
            attach_pool(pool, mixtral, PLENTY, progress=stop_at_once, cancel=cancel)
        assert not read_header(pool.fd).filled


def test_pages_that_cannot_be_spread_are_a_note(mixtral: FtwDirectory) -> None:
    with new_pool(mixtral) as pool:
        attached = attach(pool, mixtral, nodes=(1022, 1023))
        with attached.mapping as mapping:
            assert mapping.filled
            (note,) = (one for one in attached.notes if "NUMA" in one)
            assert "over the NUMA nodes 1022, 1023 (" in note
        again = attach(pool, mixtral, nodes=(1022, 1023))
        with again.mapping:
            assert again.reattached
            assert not any("NUMA" in one for one in again.notes), "nothing is moved"
