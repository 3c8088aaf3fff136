"""Writes a region into shard files, block by block, with checksums and a journal."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from freetokend.ftw.journal import finished_bytes
from freetokend.ftw.layout import BLOCK_BYTES, RegionPlan, ShardPlan, blocks_count


class RegionWriter:
    """Takes the region in order, from a block boundary on, and cuts it into synced blocks.

    `on_block` is called, in order and from another thread, with the checksum of each block once
    the block is on the disk: one block is synced while the next is written, so the disk never
    waits. OSError passes through (a full disk, for one); what `on_block` was told of stays valid.
    """

    def __init__(
        self,
        directory: Path,
        plan: RegionPlan,
        checksums: tuple[str, ...],
        on_block: Callable[[str], None],
    ) -> None:
        """Go on behind the blocks whose `checksums` are given."""
        self._directory = directory
        self._plan = plan
        self._on_block = on_block
        self.checksums = list(checksums)
        self.offset_bytes = finished_bytes(len(checksums), plan.shards)
        self._shard_index = next(
            (
                index
                for index, shard in enumerate(plan.shards)
                if self.offset_bytes < shard.offset_bytes + shard.length_bytes
            ),
            len(plan.shards),
        )
        self._descriptor = -1
        self._hash = xxhash.xxh3_64()
        self._zeros = memoryview(bytes(1 << 20))
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="ftw-sync")
        self._syncing: Future[None] | None = None

    def write(self, offset_bytes: int, data: NDArray[np.uint8]) -> None:
        """Put `data` at `offset_bytes`: zeros up to there, nothing of what is already written."""
        if offset_bytes > self.offset_bytes:
            self._append_zeros(offset_bytes - self.offset_bytes)
        skip_bytes = self.offset_bytes - offset_bytes
        if skip_bytes < data.nbytes:
            self._append(data.data[skip_bytes:])

    def finish(self) -> None:
        """Zeros to the end of the region; every shard is complete after it."""
        self._append_zeros(self._plan.region_bytes - self.offset_bytes)
        self._await_sync()

    def close(self) -> None:
        """Stop, complete or not; a block that is being synced is still seen through."""
        self._sync_thread.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def shard_checksums(self) -> tuple[tuple[str, ...], ...]:
        """The block checksums of each shard, once all are written."""
        result = []
        start = 0
        for shard in self._plan.shards:
            count = blocks_count(shard.length_bytes)
            result.append(tuple(self.checksums[start : start + count]))
            start += count
        return tuple(result)

    def _append_zeros(self, count_bytes: int) -> None:
        while count_bytes > 0:
            step_bytes = min(count_bytes, len(self._zeros))
            self._append(self._zeros[:step_bytes])
            count_bytes -= step_bytes

    def _append(self, data: memoryview) -> None:
        done_bytes = 0
        while done_bytes < len(data):
            shard = self._plan.shards[self._shard_index]
            within_bytes = self.offset_bytes - shard.offset_bytes
            block_end_bytes = min(
                within_bytes // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES, shard.length_bytes
            )
            step_bytes = min(len(data) - done_bytes, block_end_bytes - within_bytes)
            self._write_within(shard, data[done_bytes : done_bytes + step_bytes], within_bytes)
            done_bytes += step_bytes
            self.offset_bytes += step_bytes
            if within_bytes + step_bytes == block_end_bytes:
                self._end_block(shard, block_end_bytes)

    def _write_within(self, shard: ShardPlan, data: memoryview, within_bytes: int) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(
                self._directory / shard.file,
                os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o644,
            )
            os.ftruncate(self._descriptor, within_bytes)
        self._hash.update(data)
        while data:
            count = os.pwrite(self._descriptor, data, within_bytes)
            data = data[count:]
            within_bytes += count

    def _end_block(self, shard: ShardPlan, end_bytes: int) -> None:
        checksum = self._hash.hexdigest()
        self._hash.reset()
        self.checksums.append(checksum)
        self._await_sync()
        descriptor, is_last = self._descriptor, end_bytes == shard.length_bytes
        if is_last:
            self._descriptor = -1
            self._shard_index += 1
        self._syncing = self._sync_thread.submit(self._sync, descriptor, checksum, is_last)

    def _sync(self, descriptor: int, checksum: str, is_last: bool) -> None:
        """In the sync thread: make a block durable and say so; close the shard behind its last."""
        try:
            os.fdatasync(descriptor)
            # Nobody reads the shards soon, and the household's programs want the page cache.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            if is_last:
                os.close(descriptor)
        self._on_block(checksum)

    def _await_sync(self) -> None:
        if self._syncing is not None:
            self._syncing.result()
            self._syncing = None
