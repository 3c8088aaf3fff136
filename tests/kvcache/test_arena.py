"""Memory of KV pages that comes and goes at the end of each layer's range, at fixed addresses."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError
from freetokend.device.arena import ArenaError
from freetokend.kvcache.arena import KvArena
from freetokend.policy.kv_sizing import KvShape

# A page of one layer's keys is 1 KiB, so that four of them share one page of memory.
SHAPE = KvShape(layers_count=3, kv_heads_count=1, head_size=16, element_bytes=2, page_tokens=32)
CAPACITY = 64
PLENTY = 1 << 30


def arena(pages_count: int, available: list[int] | None = None) -> KvArena:
    left = [PLENTY] if available is None else available
    return KvArena(
        SHAPE,
        pages_count,
        capacity_count=CAPACITY,
        populated=True,
        available_bytes=lambda: left[0],
    )


def needed_bytes(pages_count: int) -> int:
    one_part = pages_count * SHAPE.page_bytes // (2 * SHAPE.layers_count)
    return 2 * SHAPE.layers_count * -(-one_part // mmap.PAGESIZE) * mmap.PAGESIZE


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, CAPACITY), max_size=8))
def test_what_is_claimed_is_what_the_kernel_shows(sizes: list[int]) -> None:
    kv = arena(5)
    pages_count = 5
    addresses = [(one.keys.data_ptr(), one.values.data_ptr()) for one in kv.layers]
    for layer in kv.layers:
        layer.keys[:5].fill_(3.0)
        layer.values[:5].fill_(5.0)
    kept = 5
    for size in sizes:
        (kv.grow_to if size > pages_count else kv.shrink_to)(size)
        pages_count = size
        kept = min(kept, size)
        assert kv.committed_bytes == kv.claimed_bytes() == needed_bytes(size)
        for layer in kv.layers:
            assert bool((layer.keys[:kept] == 3.0).all())
            assert bool((layer.values[:kept] == 5.0).all())
    assert addresses == [(one.keys.data_ptr(), one.values.data_ptr()) for one in kv.layers]


def test_a_growth_without_memory_says_the_arithmetic_and_changes_nothing() -> None:
    available = [PLENTY]
    kv = arena(4, available)
    asked = needed_bytes(40) - needed_bytes(4)
    available[0] = asked - 1
    with pytest.raises(ArenaError, match=f"{asked} more bytes, and {asked - 1} are available"):
        kv.grow_to(40)
    assert kv.committed_bytes == kv.claimed_bytes() == needed_bytes(4)
    available[0] = asked
    kv.grow_to(40)
    assert kv.claimed_bytes() == needed_bytes(40)


def test_beyond_the_reserved_range_is_a_fault_of_ours() -> None:
    with pytest.raises(InternalError, match="65 KV pages of 64"):
        arena(4).grow_to(CAPACITY + 1)
