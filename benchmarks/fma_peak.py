"""The arithmetic ceiling of the AVX2 paths that sum in fp32: multiply-adds and nothing else.

One thread per core, each with independent chains in registers. `expert_layer` runs it beside
batches that compute more than they read.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.c_helper import c_helper
from benchmarks.rounds import Burst, run_burst

FMA_PER_ITERATION: Final = 12
OPERATIONS_PER_ITERATION: Final = FMA_PER_ITERATION * 8 * 2
_ITERATIONS: Final = 200_000


def fma_chains() -> Callable[[int], None]:
    """FMA_PER_ITERATION multiply-adds of 8 fp32 numbers, so many times, on the calling thread.

    Raises PeerUnavailableError without gcc; the function RuntimeError when its result is wrong.
    """
    function = c_helper("fma_chains").fma_chains
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_long]

    def chains(iterations: int) -> None:
        end = function(iterations)
        if not math.isclose(end, 2.0, rel_tol=1e-6):
            raise RuntimeError(f"the chains end at {end}, not at 2")

    return chains


class FmaSide:
    """A Side whose rate is in operations / `operations_per_unit` per second."""

    name = "fp32 FMA peak"

    def __init__(self, cpus: Sequence[int], operations_per_unit: float = 1.0) -> None:
        """Raises PeerUnavailableError without gcc."""
        self._chains = fma_chains()
        self._threads = [ThreadPoolExecutor(1, initializer=_pin, initargs=(cpu,)) for cpu in cpus]
        self._operations_per_unit = operations_per_unit
        self._next = 0

    def _call(self, _index: int) -> None:
        for done in [thread.submit(self._chains, _ITERATIONS) for thread in self._threads]:
            done.result()

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
