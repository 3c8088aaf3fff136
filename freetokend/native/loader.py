"""Loading FTW shards into a mapped pool: direct reads in C++, errors and checksums here.

A load checks the length of every shard and nothing else: the disk and the transport have their
own checks, and reading is what a start waits for. With `verify=True` the xxh3_64 checksum of
every block is computed over the loaded memory, in threads, after the reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import xxhash

from freetokend.core.errors import (
    CancelledRequestError,
    FreetokenError,
    InternalError,
    ModelDataError,
    Reason,
    ResourceError,
)
from freetokend.native import _host

CHECKSUM_BLOCK_BYTES: Final = 64 << 20
# (bytes done, bytes in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One shard: a whole file and its place in the region.

    `block_checksums`: xxh3_64 of each block of 64 MiB, in hexadecimal; empty if there are none.
    """

    path: str
    offset_bytes: int
    length_bytes: int
    block_checksums: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How to read. The defaults adapt by themselves; the rest is for measurements and tests."""

    use_uring: bool = True
    use_direct: bool = True
    use_huge_pages: bool = True
    chunk_bytes: int = 2 << 20
    start_depth_count: int = 8
    max_depth_count: int = 64
    workers_count: int = 0  # 0: the loader's choice
    poll_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What a load did. `notes`: one sentence for each way in which it was not the fast path."""

    loaded_bytes: int
    elapsed_s: float
    io: str
    direct: bool
    depth_count: int
    verified_bytes: int
    verify_s: float
    notes: tuple[str, ...]

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the reads alone."""
        return self.loaded_bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0


def load_shards(
    mapping: _host.Mapping,
    shards: Sequence[ShardFile],
    *,
    data_offset_bytes: int,
    region_bytes: int,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    settings: LoadSettings | None = None,
) -> LoadResult:
    """Read `shards` to their places in the region that starts at `data_offset_bytes`.

    `progress` is called in this thread, about every `poll_s`; if it raises, the load ends and the
    exception goes on. Raises `ModelDataError` (missing, wrong length, does not cover the region),
    `ResourceError` (I/O error, no memory) naming file and offset, `CancelledRequestError`.
    """
    chosen = settings if settings is not None else LoadSettings()
    check_cover(shards, region_bytes)
    loader = _host.Loader(
        mapping,
        [
            (os.fspath(shard.path), data_offset_bytes + shard.offset_bytes, shard.length_bytes)
            for shard in shards
        ],
        use_uring=chosen.use_uring,
        use_direct=chosen.use_direct,
        use_huge_pages=chosen.use_huge_pages,
        chunk_bytes=chosen.chunk_bytes,
        start_depth_count=chosen.start_depth_count,
        max_depth_count=chosen.max_depth_count,
        workers_count=chosen.workers_count,
    )
    loader.start()
    try:
        while not loader.wait(chosen.poll_s):
            if cancel is not None and cancel.is_set():
                loader.cancel()
            if progress is not None:
                progress(loader.done_bytes, region_bytes)
    finally:
        # The kernel writes to the pool until every read has ended.
        loader.cancel()
        while not loader.wait(chosen.poll_s):
            pass
    outcome = loader.outcome
    if outcome.failure != "none":
        raise _error(outcome, shards)
    if outcome.loaded_bytes != region_bytes:
        raise InternalError(
            f"the load ended with {outcome.loaded_bytes} of {region_bytes} bytes read"
        )
    if progress is not None:
        progress(region_bytes, region_bytes)
    return LoadResult(
        loaded_bytes=outcome.loaded_bytes,
        elapsed_s=outcome.elapsed_s,
        io=outcome.io,
        direct=outcome.buffered_files_count == 0,
        depth_count=outcome.depth_count,
        verified_bytes=0,
        verify_s=0.0,
        notes=tuple(_notes(outcome, len(shards), chosen)),
    )


def check_cover(shards: Sequence[ShardFile], region_bytes: int) -> None:
    """Raise `ModelDataError` unless the shards lie end to end and fill the region exactly."""
    end_bytes = 0
    for shard in sorted(shards, key=lambda shard: (shard.offset_bytes, shard.length_bytes)):
        if shard.length_bytes < 0 or shard.offset_bytes != end_bytes:
            raise ModelDataError(
                f"shard {shard.path} starts at {shard.offset_bytes} of the region where "
                f"{end_bytes} is next: the index is damaged; convert the model again"
            )
        end_bytes += shard.length_bytes
    if end_bytes != region_bytes:
        raise ModelDataError(
            f"the shards hold {end_bytes} bytes and the region needs {region_bytes}: "
            "the index is damaged; convert the model again"
        )


def _notes(outcome: _host.LoadOutcome, files_count: int, settings: LoadSettings) -> Iterator[str]:
    if outcome.io != "io_uring" and settings.use_uring:
        yield f"read with threads because io_uring is not usable here ({outcome.io_note})"
    if outcome.buffered_files_count > 0 and settings.use_direct:
        yield (
            f"{outcome.buffered_files_count} of {files_count} shards were read through the page "
            "cache because their file system refuses direct I/O"
        )


def _error(outcome: _host.LoadOutcome, shards: Sequence[ShardFile]) -> FreetokenError:
    where = f"{outcome.path} at byte {outcome.offset_bytes}"
    cause = os.strerror(outcome.error_number)
    match outcome.failure:
        case "cancelled":
            return CancelledRequestError("the load was cancelled; the pool is not filled")
        case "open" if outcome.error_number == 0:
            return ModelDataError(f"shard {outcome.path} is not a regular file")
        case "open":
            return ModelDataError(
                f"cannot open shard {outcome.path}: {cause}; "
                "check that it exists and that the service's user may read it"
            )
        case "length":
            wanted = next(s.length_bytes for s in shards if os.fspath(s.path) == outcome.path)
            return ModelDataError(
                f"shard {outcome.path} has {outcome.actual_bytes} bytes where the index says "
                f"{wanted} (differs at byte {outcome.offset_bytes}): copy or convert it again"
            )
        case "memory":
            return ResourceError(
                f"no memory for the pool while reading {where}: {cause}; the machine, its cgroup "
                "or the pool's tmpfs is full"
            )
        case "read":
            return ResourceError(
                f"reading shard {where} failed: {cause}; check the disk (dmesg, smartctl)",
                reason=Reason.IO_FAILED,
            )
        case _:
            return ResourceError(
                f"io_uring failed during the load: {cause}", reason=Reason.IO_FAILED
            )


def verify_blocks(
    mapping: _host.Mapping,
    shards: Sequence[ShardFile],
    *,
    data_offset_bytes: int,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    threads_count: int = 0,
) -> int:
    """Check the checksum of every block of loaded shards; returns the bytes checked.

    Raises `ModelDataError` naming shard and block (the first damaged one in region order), or
    when a shard carries no checksums; `CancelledRequestError`.
    """
    blocks = [block for shard in shards for block in _blocks(shard)]
    total_bytes = sum(length_bytes for _, _, length_bytes, _ in blocks)
    done_bytes = 0

    def is_sound(block: tuple[ShardFile, int, int, str]) -> bool:
        shard, index, length_bytes, checksum = block
        if cancel is not None and cancel.is_set():
            return True
        offset_bytes = shard.offset_bytes + index * CHECKSUM_BLOCK_BYTES
        with mapping.view(data_offset_bytes + offset_bytes, length_bytes) as view:
            digest = xxhash.xxh3_64()
            digest.update(view)  # releases the GIL
        return digest.hexdigest() == checksum.lower()

    with ThreadPoolExecutor(threads_count or len(os.sched_getaffinity(0))) as pool:
        for block, sound in zip(blocks, pool.map(is_sound, blocks), strict=True):
            shard, index, length_bytes, _ = block
            if cancel is not None and cancel.is_set():
                raise CancelledRequestError("the check of the pool was cancelled")
            if not sound:
                pool.shutdown(cancel_futures=True)
                raise ModelDataError(
                    f"block {index} of shard {shard.path} (from byte "
                    f"{index * CHECKSUM_BLOCK_BYTES}) does not match its checksum: "
                    "run `freetokenctl ftw verify`, then copy or convert the model again"
                )
            done_bytes += length_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    return done_bytes


def _blocks(shard: ShardFile) -> Iterator[tuple[ShardFile, int, int, str]]:
    wanted_count = -(-shard.length_bytes // CHECKSUM_BLOCK_BYTES)
    if len(shard.block_checksums) != wanted_count:
        raise ModelDataError(
            f"shard {shard.path} has {len(shard.block_checksums)} block checksums and needs "
            f"{wanted_count}: the index is damaged; convert the model again"
        )
    for index, checksum in enumerate(shard.block_checksums):
        start_bytes = index * CHECKSUM_BLOCK_BYTES
        yield shard, index, min(CHECKSUM_BLOCK_BYTES, shard.length_bytes - start_bytes), checksum
