"""The arithmetic ceiling of the AVX2 paths that sum in fp32: multiply-adds and nothing else.

One thread per core, each with independent chains in registers. `expert_layer` runs it beside
batches that compute more than they read.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.peers.cache import PeerUnavailableError, cache_directory, locked, run
from benchmarks.rounds import Burst, run_burst

OPERATIONS_PER_ITERATION: Final = 12 * 8 * 2
_ITERATIONS: Final = 200_000


class FmaSide:
    """A Side whose rate is in operations / `operations_per_unit` per second."""

    name = "fp32 FMA peak"

    def __init__(self, cpus: Sequence[int], operations_per_unit: float = 1.0) -> None:
        """Raises PeerUnavailableError without gcc."""
        self._function = ctypes.CDLL(str(_library())).fma_chains
        self._function.restype = ctypes.c_float
        self._function.argtypes = [ctypes.c_long]
        self._threads = [ThreadPoolExecutor(1, initializer=_pin, initargs=(cpu,)) for cpu in cpus]
        self._operations_per_unit = operations_per_unit
        self._next = 0

    def _call(self, _index: int) -> None:
        results = [thread.submit(self._function, _ITERATIONS) for thread in self._threads]
        for result in results:
            if not math.isclose(result.result(), 2.0, rel_tol=1e-6):
                raise RuntimeError(f"the chains end at {result.result()}, not at 2")

    def burst(self, seconds: float) -> Burst:
        work = len(self._threads) * _ITERATIONS * OPERATIONS_PER_ITERATION
        burst, self._next = run_burst(
            self._call,
            work / self._operations_per_unit,
            seconds,
            len(self._threads),
            first=self._next,
        )
        return burst

    def close(self) -> None:
        """End its threads."""
        for thread in self._threads:
            thread.shutdown()


def _pin(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})


def _library() -> Path:
    source = Path(__file__).with_name("fma_chains.c")
    library = cache_directory() / "fma_chains.so"
    with locked("fma-chains"):
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
            if shutil.which("gcc") is None:
                raise PeerUnavailableError("the fp32 FMA peak needs gcc")
            run(["gcc", "-O2", "-shared", "-fPIC", source, "-o", library], "building fma_chains")
    return library
