"""The doorbell beside the host function; run with TRITON_INTERPRET=1, says "rung" at the end.

python -m tests.experts.gpu.bells SEED
"""

from __future__ import annotations

import mmap
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.experts.gpu.cpu_fork import DONE_WORD, LATE_WORD, RING_WORD, HostBuffers
from freetokend.experts.gpu.doorbells import TritonDoorbell, await_doorbell, ring_doorbell
from tests.experts.gpu.immediate import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOKENS,
    TOP_K,
    Forked,
    ImmediateDriver,
    random_work,
)

MAP_32BIT = 0x40  # of Linux on x86; Python has no name for it

_new_doorbell = partial(
    TritonDoorbell,
    device=torch.device("cpu"),
    queue_in=lambda stream: nullcontext(),
    interpreted=True,
)


def step(forked: Forked, seed: int, layers: range) -> list[torch.Tensor]:
    """Results of these layers, as a dispatch asks for them."""
    found = []
    forked.fork.begin_step()
    for layer in layers:
        y = torch.zeros(TOKENS, TOP_K, HIDDEN)
        forked.buffers.y.zero_()
        forked.fork.begin(layer, random_work(seed + layer), y)
        forked.fork.join()
        found.append(y)
    forked.fork.check()
    return found


def both_ways_give_the_same_bits(seed: int) -> None:
    """Step after step, also when a step has fewer layers; numbers need no beginning."""
    forked = Forked.begin(ImmediateDriver())
    bell = _new_doorbell(forked.branch, forked.buffers)
    bell._turns[0] = -3
    rung_count = 0
    with torch.inference_mode():
        for number in range(5):
            layers = range(LAYERS if number % 3 else 1)
            forked.fork.doorbell = None
            wanted = step(forked, seed + number, layers)
            forked.fork.doorbell = bell
            got = step(forked, seed + number, layers)
            assert all(map(torch.equal, got, wanted))
            assert all(bool(one.any()) for one in got)
            rung_count += len(layers)
    words = forked.buffers.words
    assert words[RING_WORD] == words[DONE_WORD] == bell._turns[0] == rung_count - 3
    forked.end()


def words_may_lie_low() -> None:
    """An address that fits 32 bits is one all the same."""
    memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT)
    words = torch.frombuffer(memory, dtype=torch.int32)
    turns = torch.zeros(2, dtype=torch.int32)
    assert words.data_ptr() < 1 << 31
    ring_doorbell(turns, words.data_ptr(), 7, interpreted=True)
    assert words[RING_WORD : RING_WORD + 2].tolist() == [1, 7]
    words[DONE_WORD] = 1
    await_doorbell(turns, words.data_ptr(), 3, interpreted=True)
    assert turns.tolist() == [1, 0]


def what_goes_wrong_on_the_cpu_is_told(seed: int) -> None:
    forked = Forked.begin(ImmediateDriver())
    forked.fork.doorbell = _new_doorbell(forked.branch, forked.buffers)
    work = random_work(seed)
    work.ids[0, 0] = EXPERTS
    forked.fork.begin(0, work, torch.zeros(TOKENS, TOP_K, HIDDEN))
    with pytest.raises(InternalError, match="expert id"):
        forked.fork.check()
    step(forked, seed, range(LAYERS))
    forked.end()


class Deaf:
    """A branch whose thread does not answer."""

    def begin_step(self) -> None:
        pass

    def end_step(self) -> None:
        pass


def a_cpu_that_does_not_answer_holds_nothing_up(seed: int) -> None:
    """The wait ends, the later ones of the step at once, and the next step is a new one."""
    buffers = HostBuffers.make(tokens_capacity=1, top_k=1, hidden_size=1, pinned=False)
    deaf: Any = Deaf()
    bell = _new_doorbell(deaf, buffers, limit_s=1e-5)
    words = buffers.words
    for _ in range(2):
        bell.call(seed, 0)
        assert words[LATE_WORD] == 1
        await_doorbell(bell._turns, words.data_ptr(), (1 << 31) - 1, True)
        with pytest.raises(InternalError, match="not done within 1e-05 s"):
            bell.end_step()
        assert int(words[RING_WORD]) == int(bell._turns[0]) != int(words[DONE_WORD])
        assert words[RING_WORD + 1] == seed
        bell.end_step()
    words[DONE_WORD] = words[RING_WORD] + 1
    bell.call(seed, 0)
    bell.end_step()


def main(seed: int) -> None:
    both_ways_give_the_same_bits(seed)
    what_goes_wrong_on_the_cpu_is_told(seed)
    words_may_lie_low()
    a_cpu_that_does_not_answer_holds_nothing_up(seed)
    print("rung")


if __name__ == "__main__":
    main(int(sys.argv[1]))
