"""A word from a GPU's stream to the CPU and back, in Triton: one program of one warp each."""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from freetokend.experts.gpu.cpu_fork import DONE_WORD, LATE_WORD, RING_WORD

_RING = tl.constexpr(4 * RING_WORD)
_DONE = tl.constexpr(4 * DONE_WORD)
_LATE = tl.constexpr(4 * LATE_WORD)


@triton.jit
def store_release(address, value, INTERPRETED: tl.constexpr):
    """The CPU that finds the value finds all that was written before it. By one thread."""
    if INTERPRETED:
        tl.store(address.to(tl.pointer_type(tl.int32)), value)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred %first;
            .reg .u32 %thread;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %first, %thread, 0;
            @%first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, $2;
            }""",
            "=r,l,r,~{memory}",
            [address, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_acquire(address, INTERPRETED: tl.constexpr):
    """Finds all that the CPU wrote before the value; never kept from an earlier call."""
    if INTERPRETED:
        value = tl.load(address.to(tl.pointer_type(tl.int32)), volatile=True)
    else:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];",
            "=r,l,~{memory}",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return value


@triton.jit(do_not_specialize=["moe_layer_index"])
def ring_kernel(turns, words, moe_layer_index, INTERPRETED: tl.constexpr):
    """Count on, and show the CPU the layer and then the number.

    turns: int32 [2] on the device, (number, whether an answer was late); words: address of the
    shared words. Plain stores: an exchange with the host's memory is none for the CPU on every
    link.
    """
    words = words.to(tl.int64)  # an address that fits 32 bits comes as such
    number = tl.load(turns) + 1
    tl.store(turns, number)
    store_release(words + _RING + 4, moe_layer_index, INTERPRETED)
    store_release(words + _RING, number, INTERPRETED)


@triton.jit(do_not_specialize=["most_polls"])
def await_kernel(turns, words, most_polls, INTERPRETED: tl.constexpr):
    """Until the CPU shows the number, but for so many looks at most; then say that it is late.

    Once it was, nothing is waited for any more until the host has noticed.
    """
    words = words.to(tl.int64)
    number = tl.load(turns)
    left = tl.where(tl.load(turns + 1) == 0, most_polls, 0)
    seen = load_acquire(words + _DONE, INTERPRETED)
    while (seen != number) & (left > 0):
        seen = load_acquire(words + _DONE, INTERPRETED)
        left -= 1
    if seen != number:
        tl.store(turns + 1, 1)
        store_release(words + _LATE, 1, INTERPRETED)
