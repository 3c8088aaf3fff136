"""The one owner of KV pages: who holds which page, and which are free. No torch, no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from freetokend.core.errors import InternalError


class PageAllocator:
    """Reference-counted page numbers 0..pages_count-1.

    Pages freed last are given out first, so that memory which is already committed is used again
    before untouched memory is. Raises InternalError on a release too many: that is a fault of ours.
    """

    def __init__(self, pages_count: int) -> None:
        if pages_count < 1:
            raise InternalError(f"a page allocator needs at least one page, not {pages_count}")
        self._references = [0] * pages_count
        self._free = list(range(pages_count - 1, -1, -1))

    @property
    def pages_count(self) -> int:
        return len(self._references)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._references) - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each page, which must be in use."""
        for page in pages:
            if self._references[page] < 1:
                raise InternalError(f"KV page {page} is retained but free")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; a page without references is free again."""
        for page in pages:
            if self._references[page] < 1:
                raise InternalError(f"KV page {page} is released but free")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise InternalError unless references are exactly what `holders` (page lists) hold."""
        held: Counter[int] = Counter()
        for pages in holders:
            held.update(pages)
        for page, references in enumerate(self._references):
            if held[page] != references:
                raise InternalError(
                    f"KV page {page} has {references} references, its holders have {held[page]}"
                )
        free = Counter(self._free)
        for page, references in enumerate(self._references):
            if free[page] != (1 if references == 0 else 0):
                raise InternalError(
                    f"KV page {page} with {references} references is {free[page]} times free"
                )
