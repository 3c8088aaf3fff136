"""The doorbell: a GPU's stream starts the CPU and waits for it without its driver.

Two small kernels in the stream write and read words in memory that the CPU shares, where a thread
watches while a step is under way. The numbers they show are counted on the device, so that a graph
that holds them can be replayed as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.gpu.cpu_fork import LATE_WORD, HostBuffers
from freetokend.experts.gpu.triton_bells import await_kernel, ring_kernel
from freetokend.native.cpu_branch import CpuBranch

# Longer than the largest part of a prompt takes the CPU in one layer.
LIMIT_S: Final = 30.0
# A look at the host's memory goes over the link and back, which no link does in less.
_LEAST_POLL_S: Final = 0.4e-6
BELL_OPTIONS: Final = MappingProxyType({"num_warps": 1})


@torch.library.custom_op("freetokend::ring_doorbell", mutates_args=("turns",))
def ring_doorbell(
    turns: torch.Tensor, words_address: int, moe_layer_index: int, interpreted: bool
) -> None:
    """Start the CPU on a layer, behind what is in the stream.

    turns: int32 [2] on the device, zeros at first: how often it was rung, and whether an answer
    was late; words_address: of `HostBuffers.words`. interpreted: under Triton's interpreter.
    """
    _check(turns, words_address)
    kernel: Any = ring_kernel  # else its arguments would be checked as those of a function
    kernel[(1,)](turns, words_address, moe_layer_index, INTERPRETED=interpreted, **BELL_OPTIONS)


@ring_doorbell.register_fake
def _rings_nothing(
    turns: torch.Tensor, words_address: int, moe_layer_index: int, interpreted: bool
) -> None:
    _check(turns, words_address)


@torch.library.custom_op("freetokend::await_doorbell", mutates_args=("turns",))
def await_doorbell(
    turns: torch.Tensor, words_address: int, most_polls: int, interpreted: bool
) -> None:
    """Hold the stream until the last ring is answered, or was looked for so often."""
    _check(turns, words_address)
    kernel: Any = await_kernel
    kernel[(1,)](turns, words_address, most_polls, INTERPRETED=interpreted, **BELL_OPTIONS)


@await_doorbell.register_fake
def _waits_for_nothing(
    turns: torch.Tensor, words_address: int, most_polls: int, interpreted: bool
) -> None:
    _check(turns, words_address)


class TritonDoorbell:
    """`cpu_fork.Doorbell` by kernels. Every tensor and word stays where it is."""

    def __init__(
        self,
        branch: CpuBranch,
        buffers: HostBuffers,
        device: torch.device,
        *,
        queue_in: Callable[[Any], AbstractContextManager[object]],
        limit_s: float = LIMIT_S,
        interpreted: bool = False,
    ) -> None:
        """queue_in: as of `transfers.StreamTransfers`. limit_s: at least so long an answer is
        waited for."""
        self._branch = branch
        self._words = buffers.words
        self._queue_in = queue_in
        self._limit_s = limit_s
        self._most_polls = max(1, round(limit_s / _LEAST_POLL_S))
        self._interpreted = interpreted
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)

    def begin_step(self) -> None:
        """See `Doorbell.begin_step`."""
        self._branch.begin_step()

    def call(self, moe_layer_index: int, stream: Any) -> None:
        """See `Doorbell.call`."""
        self._branch.begin_step()
        words = self._words.data_ptr()
        with self._queue_in(stream):
            ring_doorbell(self._turns, words, moe_layer_index, self._interpreted)
            await_doorbell(self._turns, words, self._most_polls, self._interpreted)

    def end_step(self) -> None:
        """See `Doorbell.end_step`."""
        self._branch.end_step()
        late = self._words.narrow(0, LATE_WORD, 1)
        if int(late.item()):
            late.zero_()
            self._turns.narrow(0, 1, 1).zero_()
            raise InternalError(
                f"the CPU's part of a step was not done within {self._limit_s:g} s; the step is "
                "void"
            )


def _check(turns: torch.Tensor, words_address: int) -> None:
    if turns.dtype is not torch.int32 or tuple(turns.shape) != (2,) or not turns.is_contiguous():
        raise InternalError(f"turns of a doorbell are int32 [2], not {turns.dtype} {turns.shape}")
    if words_address <= 0 or words_address % 64:
        raise InternalError(
            f"words of a doorbell at {words_address:#x}: not a cache line's address"
        )
