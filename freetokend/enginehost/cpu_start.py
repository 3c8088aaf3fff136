"""Whether a host function or a doorbell starts the CPU: what is quicker on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch

from freetokend.core.errors import InternalError, ResourceError
from freetokend.engine.graphs import GraphBackend
from freetokend.experts.gpu.cpu_fork import CpuWork, Doorbell, HostBuffers, StreamFork

# Layers in a graph, and graphs; with both ways some tens of milliseconds at most.
_CALLS_COUNT: Final = 8
_TIMES: Final = 7


def choose_start(
    fork: StreamFork,
    doorbell: Doorbell,
    buffers: HostBuffers,
    backend: GraphBackend,
    device: torch.device,
    synchronize: Callable[[], None],
    clock_s: Callable[[], float] = time.perf_counter,
) -> str:
    """Set the fork's `doorbell` where that is quicker; why, for people, with both figures.

    Timed by graphs whose layers leave nothing to the CPU. What fails is not chosen; errors of the
    host function are the caller's.
    """
    time_calls = _Calls(fork, buffers, backend, device, synchronize, clock_s)
    function_s = time_calls.median_s()
    fork.doorbell = doorbell
    try:
        doorbell_s = time_calls.median_s()
    except (InternalError, ResourceError, RuntimeError) as error:
        fork.doorbell = None
        with suppress(InternalError):
            doorbell.end_step()
        return f"a host function ({function_s * 1e6:.0f} µs a layer; a doorbell failed: {error})"
    if doorbell_s < function_s:
        return (
            f"a doorbell ({doorbell_s * 1e6:.0f} µs a layer; a host function takes "
            f"{function_s * 1e6:.0f})"
        )
    fork.doorbell = None
    return (
        f"a host function ({function_s * 1e6:.0f} µs a layer; a doorbell takes "
        f"{doorbell_s * 1e6:.0f})"
    )


class _Calls:
    """Steps of nothing but calls of the CPU that find nothing to do."""

    def __init__(
        self,
        fork: StreamFork,
        buffers: HostBuffers,
        backend: GraphBackend,
        device: torch.device,
        synchronize: Callable[[], None],
        clock_s: Callable[[], float],
    ) -> None:
        self._fork, self._backend = fork, backend
        self._synchronize, self._clock_s = synchronize, clock_s
        top_k, hidden = buffers.y.shape[1:]
        self._work = CpuWork(
            x=torch.zeros(1, hidden, dtype=torch.bfloat16, device=device),
            ids=torch.full((1, top_k), -1, dtype=torch.int32, device=device),
            weights=torch.zeros(1, top_k, device=device),
            tokens=torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._y = torch.zeros(1, top_k, hidden, device=device)

    def median_s(self) -> float:
        """Seconds of a call."""
        self._step(self._queue)  # compiles and loads
        graph = self._backend.capture(self._queue)
        return statistics.median(self._step(graph.replay) for _ in range(_TIMES)) / _CALLS_COUNT

    def _queue(self) -> torch.Tensor:
        for _ in range(_CALLS_COUNT):
            self._fork.begin(0, self._work, self._y)
            self._fork.join()
        return self._y

    def _step(self, run: Callable[[], torch.Tensor]) -> float:
        """Seconds until all of it is done."""
        self._synchronize()
        self._fork.begin_step()
        began_s = self._clock_s()
        run()
        self._synchronize()
        took_s = self._clock_s() - began_s
        self._fork.check()
        return took_s
