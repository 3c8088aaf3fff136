"""The one owner of KV pages: who holds which page, and which are free. No torch, no memory."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from freetokend.core.errors import InternalError


class PageAllocator:
    """Reference-counted page numbers, from first_page on.

    The lowest free page is given out first: memory that is already committed is used again before
    untouched memory is, and the end of the pool, where it shrinks, is free as soon as it can be.

    Shrinking sets the end behind which no page is given out any more; those in use there stay
    until their holders let go. Raises InternalError on a release too many: a fault of ours.
    """

    def __init__(self, pages_count: int, *, first_page: int = 0) -> None:
        """first_page: those below are never given out."""
        if pages_count < 1:
            raise InternalError(f"a page allocator needs at least one page, not {pages_count}")
        self._first_page = first_page
        self._references = [0] * pages_count
        self._end_count = pages_count
        self._used_count = 0
        # Sorted, which is a heap.
        self._free = list(range(first_page, first_page + pages_count))

    @property
    def pages_count(self) -> int:
        """Pages that exist: those that can be given out, and up to the last in use behind them."""
        return len(self._references)

    @property
    def end_count(self) -> int:
        """Of these so many can be given out when they are free."""
        return self._end_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self._used_count

    def shrink_to(self, pages_count: int) -> int:
        """Give out no page behind this many, and forget those behind the last in use; how many
        pages there are now. More than there are changes nothing."""
        if pages_count < 0:
            raise InternalError(f"a page allocator cannot have {pages_count} pages")
        if pages_count < self._end_count:
            self._end_count = pages_count
            end_page = self._first_page + pages_count
            self._free = sorted(page for page in self._free if page < end_page)
        while len(self._references) > self._end_count and not self._references[-1]:
            self._references.pop()
        return len(self._references)

    def grow_to(self, pages_count: int) -> None:
        """Have so many pages to give out; fewer than it has changes nothing."""
        if pages_count <= self._end_count:
            return
        self._references += [0] * (pages_count - len(self._references))
        for index in range(self._end_count, pages_count):
            if not self._references[index]:
                heapq.heappush(self._free, self._first_page + index)
        self._end_count = pages_count

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page - self._first_page] = 1
        self._used_count += count
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each page, which must be in use."""
        for page in pages:
            if not self._is_used(page):
                raise InternalError(f"KV page {page} is retained but free")
            self._references[page - self._first_page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; a page without references is free again."""
        for page in pages:
            if not self._is_used(page):
                raise InternalError(f"KV page {page} is released but free")
            index = page - self._first_page
            self._references[index] -= 1
            if self._references[index] == 0:
                self._used_count -= 1
                if index < self._end_count:
                    heapq.heappush(self._free, page)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise InternalError unless references are exactly what `holders` (page lists) hold."""
        held: Counter[int] = Counter()
        for pages in holders:
            held.update(pages)
        free = Counter(self._free)
        for index, references in enumerate(self._references):
            page = index + self._first_page
            holders_count = held.pop(page, 0)
            if holders_count != references:
                raise InternalError(
                    f"KV page {page} has {references} references, its holders have {holders_count}"
                )
            if free[page] != (1 if references == 0 and index < self._end_count else 0):
                raise InternalError(
                    f"KV page {page} with {references} references is {free[page]} times free"
                )
        if held:
            raise InternalError(f"KV pages {sorted(held)} are held and do not exist")
        if self._used_count != sum(one > 0 for one in self._references):
            raise InternalError(f"{self._used_count} KV pages are counted as used, which is wrong")

    def _is_used(self, page: int) -> bool:
        index = page - self._first_page
        return 0 <= index < len(self._references) and self._references[index] > 0
