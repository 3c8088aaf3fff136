"""How fast a pool is loaded: against raw direct reads of the same files into buffers used again.

usage: python -m benchmarks.pool_load [--quick] [--json FILE] [--directory DIR]
                                      [--pool-directory TMPFS] [--bytes N]

The rival reads with a fixed number of threads, O_DIRECT, and keeps nothing: it pays for the disk
alone, so it is the ceiling of any loader. Ours also has the kernel allocate and clear the pool's
pages; the case "again" loads into a pool whose pages exist and shows what that costs. Both
have memory on huge pages where the machine gives them. Ours and the rival are measured in pairs,
in turns first; a row holds medians over the rounds. Caches: the files are
dropped from the page cache before each read; a cache below the guest's kernel cannot be.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.result import Row, write
from freetokend.native.host import HUGE_PAGE_BYTES
from freetokend.native.loader import LoadSettings, ShardFile
from freetokend.native.pool import PoolMapping, create_pool_file

SHARDS_COUNT: Final = 4
BLOCK_BYTES: Final = 4 << 20
RIVAL_THREADS_COUNT: Final = 8
RIVAL_NAME: Final = f"raw O_DIRECT reads, {RIVAL_THREADS_COUNT} in flight, huge pages used again"
GOAL_RATIO: Final = 0.9
IDENTITY: Final = "be" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of loading; `again` fills a pool whose memory is already there."""

    name: str
    settings: LoadSettings
    again: bool = False


CASES: Final = (
    Case(name="io_uring into a new pool", settings=LoadSettings()),
    Case(name="threads into a new pool", settings=LoadSettings(use_uring=False)),
    Case(name="io_uring, again", settings=LoadSettings(), again=True),
)


def write_shards(directory: Path, total_bytes: int) -> list[ShardFile]:
    """Files of random bytes: a file system or disk that compresses must not help anyone."""
    length_bytes = total_bytes // SHARDS_COUNT // BLOCK_BYTES * BLOCK_BYTES
    shards = []
    for index in range(SHARDS_COUNT):
        path = directory / f"{index:05d}.ftw"
        with open(path, "wb", buffering=0) as file:
            for _ in range(length_bytes // BLOCK_BYTES):
                file.write(os.urandom(BLOCK_BYTES))
            os.fsync(file.fileno())
        shards.append(
            ShardFile(path=str(path), offset_bytes=index * length_bytes, length_bytes=length_bytes)
        )
    return shards


def drop_caches(shards: Sequence[ShardFile]) -> None:
    """Ask the kernel to forget the files."""
    for shard in shards:
        fd = os.open(shard.path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def huge_buffer(length_bytes: int) -> memoryview:
    """Memory on huge pages, touched: a device is faster into few large pieces than into many."""
    size = length_bytes + 2 * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -address % HUGE_PAGE_BYTES
    view = memoryview(memory)[start : start + length_bytes]
    view[:] = bytes(length_bytes)
    return view


def raw_bytes_per_s(shards: Sequence[ShardFile], chunk_bytes: int) -> float:
    """Direct reads by a fixed number of threads, each into a buffer of its own."""
    drop_caches(shards)
    fds = [os.open(shard.path, os.O_RDONLY | os.O_DIRECT) for shard in shards]
    work = [
        (fd, at)
        for fd, shard in zip(fds, shards, strict=True)
        for at in range(0, shard.length_bytes, chunk_bytes)
    ]
    buffers = [huge_buffer(chunk_bytes) for _ in range(RIVAL_THREADS_COUNT)]

    def read_share(worker: int) -> int:
        share = work[worker::RIVAL_THREADS_COUNT]
        return sum(os.preadv(fd, [buffers[worker]], at) for fd, at in share)

    started_s = time.perf_counter()
    with ThreadPoolExecutor(RIVAL_THREADS_COUNT) as threads:
        read_bytes = sum(threads.map(read_share, range(RIVAL_THREADS_COUNT)))
    elapsed_s = time.perf_counter() - started_s
    for fd in fds:
        os.close(fd)
    assert read_bytes == sum(shard.length_bytes for shard in shards)
    return read_bytes / elapsed_s


def our_bytes_per_s(shards: Sequence[ShardFile], case: Case, pool_directory: str | None) -> float:
    """One load into a pool of its own."""
    region_bytes = sum(shard.length_bytes for shard in shards)
    pool = create_pool_file("freetoken-pool-bench", region_bytes, IDENTITY, pool_directory)
    try:
        with PoolMapping(pool.fd) as mapping:
            if case.again:
                mapping.load(shards)
            drop_caches(shards)
            result = mapping.load(shards, settings=case.settings)
            print(
                f"  {case.name}: {result.bytes_per_s / 1e9:.2f} GB/s with {result.io}, "
                f"depth {result.depth_count}, {pool.backing}, "
                f"pages of {mapping.pages().page_bytes >> 10} KiB {' '.join(result.notes)}"
            )
            return result.bytes_per_s
    finally:
        pool.close()


def measure_pair(
    shards: Sequence[ShardFile], case: Case, pool_directory: str | None, ours_first: bool
) -> tuple[float, float]:
    """(ours, raw) in bytes/s, one directly after the other."""
    if ours_first:
        ours = our_bytes_per_s(shards, case, pool_directory)
        raw = raw_bytes_per_s(shards, case.settings.chunk_bytes)
    else:
        raw = raw_bytes_per_s(shards, case.settings.chunk_bytes)
        ours = our_bytes_per_s(shards, case, pool_directory)
    print(f"  raw: {raw / 1e9:.2f} GB/s", flush=True)
    return ours, raw


def row(name: str, measured: Sequence[tuple[float, float]]) -> Row:
    """Medians; the ratio is the median over the pairs."""
    return Row(
        case=name,
        ours=statistics.median(ours for ours, _ in measured) / 1e9,
        rival=RIVAL_NAME,
        rival_value=statistics.median(raw for _, raw in measured) / 1e9,
        unit="GB/s",
        ratio=statistics.median(ours / raw for ours, raw in measured),
        goal=GOAL_RATIO,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 512 MiB")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--directory", default=None, help="where the shards are written")
    parser.add_argument("--pool-directory", default=None, help="a tmpfs for the pool")
    parser.add_argument("--bytes", type=int, default=None, help="size of all shards")
    arguments = parser.parse_args()
    total_bytes = arguments.bytes or (512 << 20 if arguments.quick else 2 << 30)
    rounds_count = 3 if arguments.quick else 5
    pairs: dict[str, list[tuple[float, float]]] = {case.name: [] for case in CASES}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="pool-load-") as directory:
        print(f"writing {total_bytes >> 20} MiB to {directory}", flush=True)
        shards = write_shards(Path(directory), total_bytes)
        for round_index in range(rounds_count):
            print(f"round {round_index + 1} of {rounds_count}", flush=True)
            for case in CASES:
                ours_first = round_index % 2 == 1
                pairs[case.name].append(
                    measure_pair(shards, case, arguments.pool_directory, ours_first)
                )
    rows = [row(name, measured) for name, measured in pairs.items()]
    write(rows, arguments.json)


if __name__ == "__main__":
    main()
