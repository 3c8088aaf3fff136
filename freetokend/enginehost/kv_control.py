"""KV pages as control steers them: how many there are, and the context that they can hold.

Torch-free; called between steps, except where it says "from any thread".
"""

from __future__ import annotations

from typing import Protocol

from freetokend.core.errors import InvalidInputError
from freetokend.kvcache.allocator import PageAllocator
from freetokend.policy.kv_sizing import KvShape
from freetokend.scheduler.scheduler import Scheduler


class KvMemory(Protocol):
    """As of `kvcache.arena.KvMemory`."""

    @property
    def committed_bytes(self) -> int: ...

    def grow_to(self, pages_count: int) -> None: ...

    def shrink_to(self, pages_count: int) -> None: ...


class KvControl:
    """Keeps memory, allocator and scheduler of one mind about the number of pages."""

    def __init__(
        self,
        memory: KvMemory,
        allocator: PageAllocator,
        scheduler: Scheduler,
        *,
        shape: KvShape,
        capacity_count: int,
        context_limit_tokens: int,
        reserved_count: int = 0,
    ) -> None:
        """context_limit_tokens: of one request, however many pages there are; reserved_count:
        pages of the memory that belong to nobody."""
        self._memory = memory
        self._allocator = allocator
        self._scheduler = scheduler
        self._shape = shape
        self._capacity_count = capacity_count
        self._context_limit_tokens = context_limit_tokens
        self._reserved_count = reserved_count

    @property
    def pages_count(self) -> int:
        """Pages that have memory; from any thread."""
        return self._allocator.pages_count

    @property
    def used_count(self) -> int:
        """Pages in use; from any thread."""
        return self._allocator.used_count

    @property
    def capacity_count(self) -> int:
        """The most pages there can be."""
        return self._capacity_count

    @property
    def committed_bytes(self) -> int:
        """In whole granules; from any thread."""
        return self._memory.committed_bytes

    def check_count(self, pages_count: int) -> None:
        """Raises InvalidInputError for a number of pages that there cannot be."""
        if not 1 <= pages_count <= self._capacity_count:
            raise InvalidInputError(
                f"there can be 1 to {self._capacity_count} KV pages of {self._shape.page_tokens} "
                f"tokens, not {pages_count}",
                param="kv_pages_count",
            )

    def shrink(self, pages_count: int) -> str:
        """Give back what lies behind so many pages, as far as nobody needs it; why there are more
        than that now, else empty.

        What was accepted is finished: pages in use stay, and so do those that a request may come
        to need alone. No page behind the new end is given out any more. ResourceError when the
        memory is not taken back.
        """
        needed_count = max(pages_count, self._scheduler.promised_pages())
        end_count = min(needed_count, self._allocator.pages_count)
        self._allocator.grow_to(end_count)  # where an earlier shrink wanted to go further
        left_count = self._allocator.shrink_to(end_count)
        self._tell_servable()
        self._memory.shrink_to(left_count + self._reserved_count)
        if left_count <= pages_count:
            return ""
        if needed_count > pages_count:
            why = (
                f"a request that was accepted may need {needed_count} of "
                f"{self._shape.page_tokens} tokens each"
            )
        else:
            why = f"{self._allocator.used_count} are in use, and some of them lie behind that"
        return f"{left_count} KV pages are kept instead of {pages_count} for now: {why}"

    def grow(self, pages_count: int) -> None:
        """Have so many pages. Raises `ArenaError`, with nothing changed."""
        self._memory.grow_to(pages_count + self._reserved_count)
        self._allocator.grow_to(pages_count)
        self._tell_servable()

    def release(self) -> None:
        """Give all memory back; no page is in use, and none can be had until `grow`. What can be
        accepted stays as it is, for whoever waits until then."""
        self._allocator.shrink_to(0)
        self._memory.shrink_to(0)

    def refuse_what_does_not_fit(self) -> None:
        """Of what waited for `grow`, end what needs more than there is now."""
        self._scheduler.refuse_larger(
            "The service has less memory for this request's context than when it was accepted: "
            f"{self._scheduler.servable_context_tokens} tokens. Send it again with fewer."
        )

    def _tell_servable(self) -> None:
        held_tokens = self._allocator.end_count * self._shape.page_tokens
        self._scheduler.set_servable_context(min(self._context_limit_tokens, held_tokens))
