"""The page allocator against a naive model, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.errors import InternalError
from freetokend.kvcache.allocator import PageAllocator


@given(
    pages_count=st.integers(1, 12),
    first_page=st.integers(0, 1),
    moves=st.lists(st.tuples(st.sampled_from("tsrfkg"), st.integers(0, 5)), max_size=60),
)
def test_pages_are_never_in_two_hands_unless_shared(
    pages_count: int, first_page: int, moves: list[tuple[str, int]]
) -> None:
    """The model: `end` pages may be given out; those in use behind them exist until let go and
    the end is looked at again."""
    allocator = PageAllocator(pages_count, first_page=first_page)
    holders: list[list[int]] = []
    end = existing = pages_count
    for move, number in moves:
        if move == "t":
            free_count = allocator.free_count
            pages = allocator.take(number)
            if pages is None:
                assert number > free_count
                assert allocator.free_count == free_count
            else:
                assert len(set(pages)) == len(pages) == number
                used = {page for held in holders for page in held}
                free = sorted(set(range(first_page, first_page + end)) - used)
                assert pages == free[:number], "the lowest come first, and none behind the end"
                holders.append(pages)
        elif move == "k":
            end = min(end, number)
            used = {page for held in holders for page in held}
            existing = max([end, *(page - first_page + 1 for page in used)])
            assert allocator.shrink_to(number) == existing
        elif move == "g":
            allocator.grow_to(number)
            if number > end:
                end, existing = number, max(existing, number)
        elif holders and move == "s":
            shared = holders[number % len(holders)]
            allocator.retain(shared)
            holders.append(list(shared))
        elif holders:
            allocator.release(holders.pop(number % len(holders)))
        allocator.check_integrity(holders)
        in_use = {page for held in holders for page in held}
        assert allocator.used_count == len(in_use)
        assert allocator.free_count == end - sum(page < first_page + end for page in in_use)
        assert (allocator.end_count, allocator.pages_count) == (end, existing)


def test_low_pages_are_used_first_and_freed_pages_again() -> None:
    allocator = PageAllocator(8)
    first = allocator.take(3)
    assert first == [0, 1, 2]
    allocator.release([1])
    assert allocator.take(1) == [1]
    assert allocator.take(1) == [3]


def test_misuse_is_a_fault_of_ours() -> None:
    with pytest.raises(InternalError, match="at least one page"):
        PageAllocator(0)
    allocator = PageAllocator(2)
    with pytest.raises(InternalError, match="page 1 is retained but free"):
        allocator.retain([1])
    with pytest.raises(InternalError, match="page 0 is released but free"):
        allocator.release([0])
    pages = allocator.take(2)
    assert pages is not None
    with pytest.raises(InternalError, match="page 1 has 1 references, its holders have 0"):
        allocator.check_integrity([[0]])
    with pytest.raises(InternalError, match="page 0 has 1 references, its holders have 2"):
        allocator.check_integrity([[0, 1], [0]])
