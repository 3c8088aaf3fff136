"""The CPU's part of a step, started from a GPU's stream and joined again.

While a stream of its own copies what the CPU needs, has it compute and copies the results back,
the stream of the step goes on with the experts in slots. Everything is at addresses that never
change, so that it can be captured once and replayed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from freetokend.core.errors import InternalError
from freetokend.native.cpu_branch import CpuBranch, CpuBranchBuffers

# Of a doorbell, each in a cache line of its own: the number that was rung and, behind it, the
# layer; the number that is answered; whether the GPU gave up an answer.
RING_WORD: Final = 0
DONE_WORD: Final = 16
LATE_WORD: Final = 32
_WORDS_COUNT: Final = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBuffers:
    """Memory that the GPU copies to and from: bf16 x [T, H]; int32 ids [T, k], -1 where the CPU
    has nothing to do; fp32 weights [T, k]; int32 tokens [1]; fp32 y [T, k, H]; int32 words of a
    doorbell [48]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    y: torch.Tensor
    words: torch.Tensor

    @classmethod
    def make(
        cls, *, tokens_capacity: int, top_k: int, hidden_size: int, pinned: bool
    ) -> HostBuffers:
        """pinned: as copies that do not wait need it; for which torch needs a GPU."""
        routed = (tokens_capacity, top_k)

        def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, pin_memory=pinned)

        return cls(
            x=empty((tokens_capacity, hidden_size), torch.bfloat16),
            ids=empty(routed, torch.int32),
            weights=empty(routed, torch.float32),
            tokens=empty((1,), torch.int32),
            y=empty((*routed, hidden_size), torch.float32),
            words=empty((_WORDS_COUNT,), torch.int32),
        )

    def addresses(self) -> CpuBranchBuffers:
        """As a `CpuBranch` is given them."""
        return CpuBranchBuffers(
            x=self.x.data_ptr(),
            ids=self.ids.data_ptr(),
            weights=self.weights.data_ptr(),
            tokens=self.tokens.data_ptr(),
            y=self.y.data_ptr(),
            tokens_capacity=self.ids.shape[0],
            top_k=self.ids.shape[1],
            ring=self.words.data_ptr() + 4 * RING_WORD,
            done=self.words.data_ptr() + 4 * DONE_WORD,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWork:
    """What a layer asks of the CPU, contiguous on the device: x bf16 [t, H], ids int32 [t, k],
    weights fp32 [t, k], tokens int32 [1]; t rows at most the buffers' capacity."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor

    def into(self, buffers: HostBuffers) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """(there, here) of each copy. InternalError for more rows than there is room for."""
        if self.x.shape[0] > buffers.x.shape[0]:
            raise InternalError(
                f"{self.x.shape[0]} tokens for a CPU branch of at most {buffers.x.shape[0]}"
            )
        return (
            (buffers.x, self.x),
            (buffers.ids, self.ids),
            (buffers.weights, self.weights),
            (buffers.tokens, self.tokens),
        )


class CpuFork(Protocol):
    """One layer of the CPU's part at a time: `begin`, other work, `join`."""

    def begin_step(self) -> None:
        """A step is about to be queued, perhaps as a graph that has calls of these in it."""
        ...

    def begin(self, moe_layer_index: int, work: CpuWork, y: torch.Tensor) -> None:
        """Start. y: fp32 [t, k, H] on the device, which has the results of the pairs that were
        asked for after `join`; other rows hold anything."""
        ...

    def join(self) -> None:
        """What is queued from now on finds the results."""
        ...

    def check(self) -> None:
        """InternalError with what went wrong since the last call; after the device was waited
        for."""
        ...


class InlineFork:
    """`CpuFork` of the device "cpu": computed when `begin` returns."""

    def __init__(self, branch: CpuBranch, buffers: HostBuffers) -> None:
        self._branch = branch
        self._buffers = buffers
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(branch.host_function)

    def begin_step(self) -> None:
        """See `CpuFork.begin_step`."""

    def begin(self, moe_layer_index: int, work: CpuWork, y: torch.Tensor) -> None:
        """See `CpuFork.begin`."""
        for there, here in work.into(self._buffers):
            there.narrow(0, 0, here.shape[0]).copy_(here)
        self._function(self._branch.task(moe_layer_index))
        y.copy_(self._buffers.y.narrow(0, 0, y.shape[0]))

    def join(self) -> None:
        """See `CpuFork.join`."""

    def check(self) -> None:
        """See `CpuFork.check`."""
        self._branch.check()


class StreamDriver(Protocol):
    """What of `device.cuda_driver.CudaDriver` a fork needs."""

    def new_stream(self) -> Any: ...

    def destroy_stream(self, stream: Any) -> None: ...

    def new_event(self) -> Any: ...

    def destroy_event(self, event: Any) -> None: ...

    def record(self, event: Any, stream: Any) -> None: ...

    def wait(self, stream: Any, event: Any) -> None: ...

    def copy_to_host_async(
        self, host_address: int, device_address: int, length_bytes: int, stream: Any
    ) -> None: ...

    def copy_to_device_async(
        self, device_address: int, host_address: int, length_bytes: int, stream: Any
    ) -> None: ...

    def launch_host_function(self, function_address: int, argument: int, stream: Any) -> None: ...


class Doorbell(Protocol):
    """Another way to start the CPU from a stream than the driver's host functions."""

    def begin_step(self) -> None:
        """The CPU is to watch, until `end_step`."""
        ...

    def call(self, moe_layer_index: int, stream: Any) -> None:
        """Queue that the CPU computes a layer, and the stream's wait for it."""
        ...

    def end_step(self) -> None:
        """The CPU rests; after the device was waited for. InternalError when the GPU did not wait
        until the CPU was done."""
        ...


class StreamFork:
    """`CpuFork` of a GPU: a side stream, forked from that of the step and joined by events.

    The driver calls the CPU by a host function until a `doorbell` is set; graphs keep the way that
    they were captured with.

    `main_stream` tells the stream that work is queued in now; inside a capture that is the
    capture's, and the fork becomes part of its graph. One layer follows the other in the same
    buffers: `begin` waits for the main stream, which has joined the layer before.
    """

    def __init__(
        self,
        driver: StreamDriver,
        branch: CpuBranch,
        buffers: HostBuffers,
        main_stream: Callable[[], Any],
    ) -> None:
        self._driver = driver
        self._branch = branch
        self._buffers = buffers
        self._main_stream = main_stream
        self.doorbell: Doorbell | None = None
        self._side = driver.new_stream()
        self._forked, self._done = driver.new_event(), driver.new_event()

    def begin_step(self) -> None:
        """See `CpuFork.begin_step`."""
        if self.doorbell is not None:
            self.doorbell.begin_step()

    def begin(self, moe_layer_index: int, work: CpuWork, y: torch.Tensor) -> None:
        """See `CpuFork.begin`."""
        driver, side = self._driver, self._side
        copies = work.into(self._buffers)
        driver.record(self._forked, self._main_stream())
        driver.wait(side, self._forked)
        for there, here in copies:
            driver.copy_to_host_async(there.data_ptr(), here.data_ptr(), here.nbytes, side)
        task = self._branch.task(moe_layer_index)
        if self.doorbell is not None:
            self.doorbell.call(moe_layer_index, side)
        else:
            driver.launch_host_function(self._branch.host_function, task, side)
        driver.copy_to_device_async(y.data_ptr(), self._buffers.y.data_ptr(), y.nbytes, side)
        driver.record(self._done, side)

    def join(self) -> None:
        """See `CpuFork.join`."""
        self._driver.wait(self._main_stream(), self._done)

    def check(self) -> None:
        """See `CpuFork.check`."""
        if self.doorbell is not None:
            self.doorbell.end_step()
        self._branch.check()

    def close(self) -> None:
        """End stream and events; no graph that has them in it may be launched any more."""
        self._driver.destroy_stream(self._side)
        self._driver.destroy_event(self._forked)
        self._driver.destroy_event(self._done)
