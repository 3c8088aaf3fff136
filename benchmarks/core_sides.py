"""What `core_limits` times, each on the calling thread: additions, multiply-adds, streams of reads,
kernels on weights in a cache or in memory, and the clearing of pages.

Their times are cpu time of that thread: what it waits for a core is not in them, only in the share
of the burst by which a round is void.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.c_helper import c_helper
from benchmarks.fma_peak import FMA_PER_ITERATION, fma_chains
from benchmarks.memory import HugeMemory
from benchmarks.our_layer import FAST_ERROR, Numerics
from benchmarks.random_weights import random_matrix
from benchmarks.rounds import Burst, waited_s
from freetokend.ftw.formats import ROWS_PER_BLOCK, WeightFormat
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing import bf16_to_f32, f32_to_bf16
from freetokend.ftw.packing_blocks import pack_blocks, pack_factor
from freetokend.native.executor import Executor

COLUMNS: Final = 2048
CLOCK: Final = "dependent additions"
WIDTH: Final = "independent additions"
FMA: Final = "multiply-adds of 8 fp32"
CLEARING: Final = "clearing of new pages"
ADDITIONS_PER_ITERATION: Final = 64
STREAMS: Final = (1, 2, 4)
# One call; short beside a burst.
_ITERATIONS: Final = 20_000
_STREAM_BYTES: Final = 16 << 20
# What a matrix has of a cache that must hold it, and of the memory that one call reads.
_CACHE_SHARE: Final = 0.5
_CALL_BYTES: Final = 8 << 20
_EXACT_ERROR: Final = 1e-4
_SHORT_CALLS: Final = 99
_MASK: Final = (1 << 64) - 1


def cache_bytes(level: int, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of one data cache of this level, 0 for the last level. ValueError where it is not told."""
    sizes: dict[int, int] = {}
    for index in root.glob("index*"):
        if (index / "type").read_text(encoding="ascii").strip() == "Instruction":
            continue
        text = (index / "size").read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
        sizes[int((index / "level").read_text(encoding="ascii"))] = int(text.rstrip("KM")) * unit
    wanted = level or max(sizes, default=0)
    if wanted not in sizes:
        raise ValueError(f"{root} does not tell the size of a cache of level {wanted}")
    return sizes[wanted]


def stream_name(streams: int) -> str:
    """The side that reads so many streams."""
    return f"one core reading {streams} stream{'s' if streams > 1 else ''}"


def cpu_burst(call: Callable[[int], None], seconds: float, first: int) -> tuple[Burst, int]:
    """Calls numbered from `first` on for `seconds` of cpu time; calls per second of it, and the
    next number."""
    waited_before_s = waited_s()
    index = first
    start_s = time.thread_time()
    while True:
        call(index)
        index += 1
        elapsed_s = time.thread_time() - start_s
        if elapsed_s >= seconds:
            break
    lost_s = waited_s() - waited_before_s
    share = elapsed_s / (elapsed_s + lost_s)
    return Burst(rate=(index - first) / elapsed_s, cpu_share=share), index


class CoreSide:
    """Numbered calls of this thread; units of work per second of its cpu time."""

    def __init__(self, name: str, call: Callable[[int], None], work_per_call: float) -> None:
        self._name = name
        self._call = call
        self._work_per_call = work_per_call
        self._next = 0

    @property
    def name(self) -> str:
        return self._name

    def burst(self, seconds: float) -> Burst:
        burst, self._next = cpu_burst(self._call, seconds, self._next)
        return Burst(rate=burst.rate * self._work_per_call, cpu_share=burst.cpu_share)


class Core:
    """The sides without weights. Raises PeerUnavailableError without gcc."""

    def __init__(self) -> None:
        self._library = c_helper("core_chains")
        self._library.read_streams.restype = ctypes.c_uint64
        self._library.read_streams.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
        self._fma = fma_chains()

    def additions(self, name: str) -> CoreSide:
        """CLOCK or WIDTH, in additions per second: the former are one a cycle."""
        symbol = "dependent_additions" if name == CLOCK else "independent_additions"
        function = getattr(self._library, symbol)
        function.restype = ctypes.c_uint64
        function.argtypes = [ctypes.c_long]
        work = _ITERATIONS * ADDITIONS_PER_ITERATION // (4 if name == CLOCK else 1)
        iterations = work // ADDITIONS_PER_ITERATION

        def call(_index: int) -> None:
            if (found := function(iterations)) != work:
                raise RuntimeError(f"{work} additions of 1 make {found}")

        return CoreSide(name, call, float(work))

    def fma(self) -> CoreSide:
        """Instructions per second."""
        work = float(_ITERATIONS * FMA_PER_ITERATION)
        return CoreSide(FMA, lambda _index: self._fma(_ITERATIONS), work)

    def reads(self, memory: HugeMemory, streams: int) -> CoreSide:
        """Bytes per second of memory whose bytes are 1."""
        pieces = memory.length_bytes // _STREAM_BYTES
        wanted = _STREAM_BYTES // 8 * 0x0101010101010101 & _MASK

        def call(index: int) -> None:
            address = memory.address + index % pieces * _STREAM_BYTES
            if self._library.read_streams(address, _STREAM_BYTES, streams) != wanted:
                raise RuntimeError(f"{streams} streams have read something else than 1")

        return CoreSide(stream_name(streams), call, float(_STREAM_BYTES))


class ClearingSide:
    """Bytes per second at which one thread gets new pages: a first touch less a second one.

    A burst takes as long as that takes.
    """

    name = CLEARING

    def __init__(self, length_bytes: int) -> None:
        self._length_bytes = length_bytes
        self.page_bytes = 0

    def burst(self, seconds: float) -> Burst:
        waited_before_s = waited_s()
        memory = HugeMemory(self._length_bytes, touched=False)
        start_s = time.thread_time()
        memory.array[::4096] = 1
        first_s = time.thread_time()
        memory.array[::4096] = 1
        end_s = time.thread_time()
        share = (end_s - start_s) / (end_s - start_s + waited_s() - waited_before_s)
        self.page_bytes = memory.page_bytes
        cleared_s = (first_s - start_s) - (end_s - first_s)
        return Burst(rate=self._length_bytes / max(cleared_s, 1e-9), cpu_share=share)


class Weights:
    """Matrices of one format, and products of them with one token.

    A matrix is a block of 16 random rows, repeated: the times do not depend on what is in it.
    """

    def __init__(self, weight_format: WeightFormat, numerics: Numerics) -> None:
        self.format = weight_format
        self._numerics = numerics
        rng = np.random.default_rng(3)
        matrix = random_matrix(weight_format, ROWS_PER_BLOCK, COLUMNS, rng)
        self._dense = dequantise(matrix, np.float32)
        self._block = pack_blocks(matrix).reshape(-1).view(np.uint8)
        has_global = weight_format.has_global
        self._factor = pack_factor(matrix.global_scale) if has_global else np.empty(0, np.uint8)
        self._x = f32_to_bf16(rng.standard_normal((1, COLUMNS), dtype=np.float32))

    @property
    def bytes_per_64(self) -> float:
        """Of 64 weights."""
        return 64 * self._block.size / (ROWS_PER_BLOCK * COLUMNS)

    def in_cache(self, executor: Executor, size_bytes: int, name: str) -> KernelSide:
        """Calls on one matrix that fills half of a cache."""
        memory = HugeMemory(size_bytes)
        return self._side(executor, memory, int(size_bytes * _CACHE_SHARE), name)

    def in_memory(self, executor: Executor, memory: HugeMemory, name: str) -> KernelSide:
        """Calls that go through all of a memory, which they overwrite."""
        return self._side(executor, memory, _CALL_BYTES, name)

    def _side(
        self, executor: Executor, memory: HugeMemory, wanted_bytes: int, name: str
    ) -> KernelSide:
        blocks = max(2, (wanted_bytes - self._factor.size) // self._block.size)
        packed = np.concatenate([np.tile(self._block, blocks), self._factor])
        count = memory.length_bytes // packed.size if wanted_bytes == _CALL_BYTES else 1
        for index in range(count):
            memory.array[index * packed.size : (index + 1) * packed.size] = packed
        y = np.empty(blocks * ROWS_PER_BLOCK, np.float32)

        def call_with(rows: int) -> Callable[[int], None]:
            format_name = str(self.format)

            def call(index: int) -> None:
                executor.linear(
                    self._x.ctypes.data,
                    memory.address + index % count * packed.size,
                    y.ctypes.data,
                    tokens=1,
                    in_features=COLUMNS,
                    out_features=rows,
                    weight_format=format_name,
                    numerics=self._numerics,
                )

            return call

        whole = call_with(y.size)
        whole(0)
        self._check(y)
        weights = (y.size - ROWS_PER_BLOCK) * COLUMNS
        return KernelSide(name, whole, call_with(ROWS_PER_BLOCK), weights)

    def _check(self, y: NDArray[np.float32]) -> None:
        wanted = np.tile(self._dense @ bf16_to_f32(self._x[0]), y.size // ROWS_PER_BLOCK)
        error = float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))
        if not error <= (_EXACT_ERROR if self._numerics == "exact" else FAST_ERROR):
            raise ValueError(f"products of {self.format} are wrong: relative error {error:.2g}")


class KernelSide:
    """Weights per second: what a call takes more than one with 16 rows.

    So the way into the executor, and the rounding of the token, are not in it.
    """

    def __init__(
        self, name: str, call: Callable[[int], None], small: Callable[[int], None], weights: int
    ) -> None:
        self._name = name
        self._calls = (call, small)
        self._weights = weights
        self._short_s = math.inf
        self._next = 0

    @property
    def name(self) -> str:
        return self._name

    def burst(self, seconds: float) -> Burst:
        """With whole matrices; then with 16 rows, of which the least time ever counts."""
        call, small = self._calls
        burst, self._next = cpu_burst(call, seconds, self._next)
        for index in range(_SHORT_CALLS):
            start_s = time.thread_time()
            small(index)
            self._short_s = min(self._short_s, time.thread_time() - start_s)
        elapsed_s = 1 / burst.rate - self._short_s
        return Burst(rate=self._weights / elapsed_s, cpu_share=burst.cpu_share)
