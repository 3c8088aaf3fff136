"""How fast a model is loaded: against raw direct reads of the same bytes, and safetensors.

usage: python -m benchmarks.ftw_load [--quick] [--json FILE] [--directory DIR]
                                      [--pool-directory TMPFS] [--bytes N]

The raw rival reads with O_DIRECT into buffers that it uses again, with as many threads as are
fastest here (tried first), and keeps nothing: it pays for the disk alone, so it is the ceiling of
any loader. Ours also has the kernel allocate and clear the pool's pages; the case "again" loads
into a pool whose pages exist and shows what that costs. Both have memory on huge pages where the
machine gives them. safetensors reads a file of as many bytes as numpy arrays. Sides are measured
one directly after the other, in turns first; a row holds medians over the rounds. Caches: the
files are dropped from the page cache before each read; a cache below the guest's kernel cannot be.
"""

from __future__ import annotations

import argparse
import ctypes
import json
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

from safetensors import safe_open

from benchmarks.result import Row, write
from benchmarks.rounds import Burst, is_busy, verdict
from freetokend.native.host import HUGE_PAGE_BYTES
from freetokend.native.loader import LoadSettings, ShardFile
from freetokend.native.pool import PoolMapping, create_pool_file

SHARDS_COUNT: Final = 4
BLOCK_BYTES: Final = 4 << 20
# Reads in flight that are tried; the fastest stays.
DEPTHS: Final = (2, 4, 8, 16, 32)
GOAL_RATIO: Final = 0.9
SAFETENSORS: Final = "safetensors"
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
        _drop(shard.path)


def _drop(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
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


def raw_bytes_per_s(shards: Sequence[ShardFile], chunk_bytes: int, depth: int) -> float:
    """Direct reads by `depth` threads, each into a buffer of its own."""
    drop_caches(shards)
    fds = [os.open(shard.path, os.O_RDONLY | os.O_DIRECT) for shard in shards]
    work = [
        (fd, at)
        for fd, shard in zip(fds, shards, strict=True)
        for at in range(0, shard.length_bytes, chunk_bytes)
    ]
    buffers = [huge_buffer(chunk_bytes) for _ in range(depth)]

    def read_share(worker: int) -> int:
        share = work[worker::depth]
        return sum(os.preadv(fd, [buffers[worker]], at) for fd, at in share)

    started_s = time.perf_counter()
    with ThreadPoolExecutor(depth) as threads:
        read_bytes = sum(threads.map(read_share, range(depth)))
    elapsed_s = time.perf_counter() - started_s
    for fd in fds:
        os.close(fd)
    assert read_bytes == sum(shard.length_bytes for shard in shards)
    return read_bytes / elapsed_s


def our_bytes_per_s(
    shards: Sequence[ShardFile], case: Case, pool_directory: str | None
) -> tuple[float, int]:
    """One load into a pool of its own, and the size of the pool's pages in bytes."""
    region_bytes = sum(shard.length_bytes for shard in shards)
    pool = create_pool_file("freetoken-pool-bench", region_bytes, IDENTITY, pool_directory)
    try:
        with PoolMapping(pool.fd) as mapping:
            if case.again:
                mapping.load(shards)
            drop_caches(shards)
            result = mapping.load(shards, settings=case.settings)
            page_bytes = mapping.pages().page_bytes
            print(
                f"  {case.name}: {result.bytes_per_s / 1e9:.2f} GB/s with {result.io}, "
                f"depth {result.depth_count}, {pool.backing}, "
                f"pages of {page_bytes >> 10} KiB {' '.join(result.notes)}"
            )
            return result.bytes_per_s, page_bytes
    finally:
        pool.close()


def best_depth(shards: Sequence[ShardFile], chunk_bytes: int) -> int:
    """How many raw reads in flight are fastest, the better of two tries each."""
    rates = {
        depth: max(raw_bytes_per_s(shards, chunk_bytes, depth) for _ in range(2))
        for depth in DEPTHS
    }
    for depth, rate in rates.items():
        print(f"  raw, {depth} in flight: {rate / 1e9:.2f} GB/s", flush=True)
    return max(rates, key=lambda depth: rates[depth])


def write_safetensors(directory: Path, total_bytes: int) -> Path:
    """One file of random tensors of 4 MiB."""
    count = total_bytes // BLOCK_BYTES
    entries = {
        f"t{index}": {
            "dtype": "U8",
            "shape": [BLOCK_BYTES],
            "data_offsets": [index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES],
        }
        for index in range(count)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    path = directory / "model.safetensors"
    with open(path, "wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(count):
            file.write(os.urandom(BLOCK_BYTES))
        os.fsync(file.fileno())
    return path


def safetensors_bytes_per_s(path: Path) -> float:
    """Every tensor as an array of its own."""
    _drop(str(path))
    started_s = time.perf_counter()
    with safe_open(path, "numpy") as file:
        arrays = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - no mapping
    elapsed_s = time.perf_counter() - started_s
    return float(sum(array.nbytes for array in arrays)) / elapsed_s


class Disk:
    """The files and what is measured on them."""

    def __init__(self, shards: Sequence[ShardFile], file: Path, pool_directory: str | None) -> None:
        self._shards = shards
        self._file = file
        self._pool_directory = pool_directory
        self._chunk_bytes = LoadSettings().chunk_bytes
        self.depth = best_depth(shards, self._chunk_bytes)
        self.measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.page_bytes: dict[str, int] = {}

    def measure(self, case: Case, *, ours_first: bool) -> None:
        """Ours beside each rival, in bytes/s, one directly after the other."""

        def ours() -> float:
            rate, page_bytes = our_bytes_per_s(self._shards, case, self._pool_directory)
            self.page_bytes[case.name] = page_bytes
            return rate

        def raw() -> float:
            return raw_bytes_per_s(self._shards, self._chunk_bytes, self.depth)

        own, rate = (ours(), raw()) if ours_first else (raw(), ours())[::-1]
        print(f"  raw: {rate / 1e9:.2f} GB/s", flush=True)
        name = f"raw O_DIRECT reads, {self.depth} in flight, huge pages used again"
        self.measured.setdefault((case.name, name), []).append((own, rate))
        if case is CASES[0]:
            rate = safetensors_bytes_per_s(self._file)
            self.measured.setdefault((case.name, SAFETENSORS), []).append((own, rate))

    def rows(self) -> list[Row]:
        """Medians; the ratio is the median over the pairs."""
        found = []
        # What else used the disk meanwhile shows in the raw reads.
        busy = is_busy(
            [
                Burst(rate=raw, cpu_share=1.0)
                for (_, rival), pairs in self.measured.items()
                if rival != SAFETENSORS
                for _, raw in pairs
            ]
        )
        for (case, rival), pairs in self.measured.items():
            ratios = [ours / other for ours, other in pairs]
            goal = GOAL_RATIO if rival != SAFETENSORS else 0.0
            found.append(
                Row(
                    case=case,
                    ours=statistics.median(ours for ours, _ in pairs) / 1e9,
                    rival=rival,
                    rival_value=statistics.median(other for _, other in pairs) / 1e9,
                    unit="GB/s",
                    ratio=statistics.median(ratios),
                    goal=goal,
                    ratio_min=min(ratios),
                    ratio_max=max(ratios),
                    rounds_count=len(ratios),
                    verdict=verdict(ratios, goal, busy=busy),
                    page_bytes=self.page_bytes[case],
                )
            )
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 512 MiB")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--directory", default=None, help="where the shards are written")
    parser.add_argument("--pool-directory", default=None, help="a tmpfs for the pool")
    parser.add_argument("--bytes", type=int, default=None, help="size of all shards")
    arguments = parser.parse_args()
    if arguments.directory is not None and not Path(arguments.directory).is_dir():
        parser.error(f"--directory {arguments.directory}: there is no such directory")
    total_bytes = arguments.bytes or (512 << 20 if arguments.quick else 2 << 30)
    rounds_count = 3 if arguments.quick else 7
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="ftw-load-") as directory:
        print(f"writing twice {total_bytes >> 20} MiB to {directory}", flush=True)
        shards = write_shards(Path(directory), total_bytes)
        disk = Disk(
            shards, write_safetensors(Path(directory), total_bytes), arguments.pool_directory
        )
        for round_index in range(rounds_count):
            print(f"round {round_index + 1} of {rounds_count}", flush=True)
            for case in CASES:
                disk.measure(case, ours_first=round_index % 2 == 1)
    write(disk.rows(), arguments.json)


if __name__ == "__main__":
    main()
