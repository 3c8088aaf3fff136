"""Getting the weights: the pool as it was left, or filled from the FTW directory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from freetokend.core.errors import InternalError
from freetokend.core.host_facts import HostMemory
from freetokend.ftw.index import FtwIndex
from freetokend.ftw.reader import FtwDirectory
from freetokend.native.lifeline import ReceivedPool
from freetokend.native.loader import ShardFile
from freetokend.native.pool import (
    PoolHeader,
    PoolMapping,
    PoolMismatchError,
    identity_bytes,
    pool_length_bytes,
    read_header,
)
from freetokend.policy.memory import MemoryDemand, require_host_memory

_BLOCK_BYTES: Final = 512  # the unit of st_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedPool:
    """A filled, read-only pool. `load_s` and `load_bytes_per_s` are 0 after a re-attach."""

    mapping: PoolMapping
    reattached: bool
    attach_s: float
    load_s: float
    load_bytes_per_s: float
    notes: tuple[str, ...]


def attach_pool(
    pool: ReceivedPool,
    directory: FtwDirectory,
    memory: HostMemory,
    *,
    progress: Callable[[int, int], None],
    cancel: threading.Event,
    nodes: tuple[int, ...] = (),
) -> AttachedPool:
    """Map the pool; fill it unless its header says that it holds this very content.

    The mark is written last and the mapping is read-only from then on. The pages of a pool that is
    filled are spread over the NUMA `nodes` of the CPUs that will read it. Raises PoolMismatchError
    (the file has another length), ResourceError (memory, disk), ModelDataError, and
    CancelledRequestError when `cancel` was set.
    """
    started_s = time.monotonic()
    index = directory.index
    notes: list[str] = []
    reason = _claim_header(pool, index)
    if reason:
        notes.append(reason)
    mapping = PoolMapping(pool.fd)
    reattached = mapping.filled
    attach_s = time.monotonic() - started_s
    load_s = load_bytes_per_s = 0.0
    if not reattached:
        paid_bytes = os.fstat(pool.fd).st_blocks * _BLOCK_BYTES
        demand = MemoryDemand(pool_bytes=index.region_bytes, pool_paid_bytes=paid_bytes)
        require_host_memory(memory, demand)
        shards = [
            ShardFile(
                path=str(path),
                offset_bytes=shard.offset_bytes,
                length_bytes=shard.length_bytes,
                block_checksums=shard.block_checksums,
            )
            for path, shard in zip(directory.shard_paths(), index.shards, strict=True)
        ]
        notes.extend(_spread(mapping, nodes))
        result = mapping.load(shards, progress, cancel=cancel)
        mapping.mark_filled()
        load_s, load_bytes_per_s = result.elapsed_s, result.bytes_per_s
        notes.extend(result.notes)
    mapping.protect()
    return AttachedPool(
        mapping=mapping,
        reattached=reattached,
        attach_s=attach_s,
        load_s=load_s,
        load_bytes_per_s=load_bytes_per_s,
        notes=tuple(notes),
    )


def _spread(mapping: PoolMapping, nodes: tuple[int, ...]) -> tuple[str, ...]:
    """Every thread reads every part of the weights: one node's memory would be the bottleneck."""
    error_number = mapping.interleave(nodes) if len(nodes) > 1 else 0
    if error_number == 0:
        return ()
    named = ", ".join(str(node) for node in nodes)
    return (
        f"The weights could not be spread over the NUMA nodes {named} "
        f"({os.strerror(error_number)}), so they are read at the speed of fewer nodes.",
    )


def _claim_header(pool: ReceivedPool, index: FtwIndex) -> str:
    """Make sure that the header is this content's; returns why it had to be written anew, or "".

    A pool of the right length that holds something else is emptied by its new header. One of
    another length cannot be used: the file's size is sealed.
    """
    try:
        read_header(pool.fd).check(
            identity=index.identity,
            region_bytes=index.region_bytes,
            format_version=index.format_version,
        )
    except PoolMismatchError as error:
        length_bytes = os.fstat(pool.fd).st_size
        if length_bytes != pool_length_bytes(index.region_bytes):
            raise
        header = PoolHeader(
            identity=identity_bytes(index.identity),
            region_bytes=index.region_bytes,
            format_version=index.format_version,
        )
        page = replace(header, filled=False).pack()
        if os.pwrite(pool.fd, page, 0) != len(page):
            raise InternalError("the header of the pool could not be written") from error
        return error.message
    return ""
