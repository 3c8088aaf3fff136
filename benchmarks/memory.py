"""Memory for benchmarks: huge pages of our own, and the expert pool's."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.rounds import Burst, run_burst
from freetokend.native.executor import Executor
from freetokend.native.host import HUGE_PAGE_BYTES
from freetokend.native.pool import PoolMapping, create_pool_file

CEILING_BYTES: Final = 1 << 30
# One call of the ceiling; whole passes would take longer than a burst.
PIECE_BYTES: Final = 128 << 20
_IDENTITY: Final = "be" * 32
_MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


class HugeMemory:
    """Anonymous memory, on huge pages where the kernel gives them; every byte is 1.

    `touched=False`: it has no pages yet.
    """

    def __init__(self, length_bytes: int, *, touched: bool = True) -> None:
        size = -(-length_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._map = mmap.mmap(
            -1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(self._map, np.uint8)
        start = -memory.ctypes.data % HUGE_PAGE_BYTES
        self.array: NDArray[np.uint8] = memory[start : start + size]
        if touched:
            self.array[:] = 1
        self.address = int(self.array.ctypes.data)
        self.length_bytes = size

    @property
    def page_bytes(self) -> int:
        """Of the pages that nearly all of it lies in."""
        huge_bytes, inside = 0, False
        for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
            if _MAPPING.match(line):
                first, last = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
                inside = first < self.address + self.length_bytes and self.address < last
            elif inside and line.startswith("AnonHugePages:"):
                huge_bytes += int(line.split()[1]) << 10
        return HUGE_PAGE_BYTES if huge_bytes > 0.9 * self.length_bytes else mmap.PAGESIZE


class PoolBank:
    """A bank of records in an expert pool as the engine has it; close it.

    page_bytes: of the pages that it really lies in.
    """

    def __init__(self, length_bytes: int, directory: str | None = None) -> None:
        self._pool = create_pool_file("freetoken-bench", length_bytes, _IDENTITY, directory)
        self._mapping = PoolMapping(self._pool.fd)
        self.address = self._mapping.region_address
        buffer = (ctypes.c_uint8 * length_bytes).from_address(self.address)
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array(buffer)
        self.page_bytes = 0

    def fill(self, records: NDArray[np.uint8]) -> None:
        """Repeat records [n, record_bytes] over the bank."""
        flat = records.reshape(-1)
        for start in range(0, self.array.size, flat.size):
            part = self.array[start : start + flat.size]
            part[:] = flat[: part.size]
        self.page_bytes = self._mapping.pages().page_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mapping.close()
        self._pool.close()


class CeilingSide:
    """The executor's threads reading memory; its rate is in bytes / `bytes_per_unit`."""

    name = "read ceiling"

    def __init__(self, executor: Executor, memory: HugeMemory) -> None:
        self._executor = executor
        self._memory = memory
        self._next = 0
        self.bytes_per_unit = 1.0

    def _read(self, index: int) -> None:
        pieces = self._memory.length_bytes // PIECE_BYTES
        self._executor.stream_read(self._memory.address + index % pieces * PIECE_BYTES, PIECE_BYTES)

    def burst(self, seconds: float) -> Burst:
        burst, self._next = run_burst(
            self._read,
            PIECE_BYTES / self.bytes_per_unit,
            seconds,
            self._executor.threads_count,
            first=self._next,
        )
        return burst
