"""Who waits, who runs, and through the allocator which pages each of them holds."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from freetokend.core.errors import InternalError
from freetokend.kvcache.allocator import PageAllocator
from freetokend.policy.kv_sizing import pages_for
from freetokend.scheduler.limits import SchedulerLimits
from freetokend.scheduler.sequence import Place, Sequence

# So many of a sequence's next tokens are to be computed.
Share = tuple[Sequence, int]

# A sweep keeps its pages for about as many steps as the model has layers, and an older sequence
# that decodes meanwhile would have to wait for its end: so many pages more are left for each.
SPARE_PAGES: Final = 2

_AGE: Final = attrgetter("key")


class Roster:
    """Owner of all accepted sequences; both lists are ordered by age."""

    def __init__(self, limits: SchedulerLimits, allocator: PageAllocator) -> None:
        self._limits = limits
        self._allocator = allocator
        self._departed: list[Sequence] = []  # ended, but a sweep still writes into their pages
        self.by_id: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions_count = 0

    @property
    def free_places_count(self) -> int:
        return self._limits.max_running_count - len(self.running)

    @property
    def pending_prompt_tokens(self) -> int:
        """Tokens to be computed before those who do not decode yet can."""
        waiting = sum(one.pending_count for one in self.waiting)
        return waiting + sum(one.pending_count for one in self.running if not one.is_decoding)

    @property
    def longest_context_tokens(self) -> int:
        """Known tokens of the longest sequence that runs."""
        return max((len(one.tokens) for one in self.running), default=0)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of all that do not run."""
        return sum(len(one.tokens) for one in self.waiting)

    def promised_pages(self) -> int:
        """What the largest of the accepted sequences may come to hold, alone if need be."""
        most_tokens = max(
            (one.prompt_count + one.max_new_tokens for one in self.by_id.values()), default=0
        )
        return pages_for(most_tokens, self._limits.page_tokens)

    def add(self, sequence: Sequence) -> None:
        """A new sequence, which is the youngest."""
        self.by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """From waiting to running; pages come with the first share."""
        self.waiting.remove(sequence)
        sequence.place = Place.RUNNING
        insort(self.running, sequence, key=_AGE)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ends. Its pages are free now or, while a sweep writes into them, after it."""
        del self.by_id[sequence.request_id]
        (self.running if sequence.place is Place.RUNNING else self.waiting).remove(sequence)
        sequence.place = Place.ENDED
        if sequence.in_sweep:
            self._departed.append(sequence)
        else:
            self._release_pages(sequence)

    def release_departed(self) -> None:
        """No sweep writes any more."""
        for sequence in self._departed:
            self._release_pages(sequence)
        self._departed.clear()

    def admission_pages(self, sequence: Sequence) -> int:
        """Pages for all that is known and one more token."""
        return pages_for(len(sequence.tokens) + 1, self._limits.page_tokens)

    def unpromised_pages(self) -> int:
        """Free pages less those that running prompts will still take: prevents thrashing."""
        promised = sum(max(self.admission_pages(one) - len(one.pages), 0) for one in self.running)
        if self._limits.sweep_tokens > 0:
            promised += SPARE_PAGES * sum(1 for one in self.running if one.is_decoding)
        return self._allocator.free_count - promised

    def with_pages(self, shares: Iterable[Share]) -> list[Share]:
        """Give pages to the shares, oldest first; the youngest running make room.

        Who makes room is never older than who needs it, so what has been chosen stays.
        """
        chosen: list[Share] = []
        for sequence, count in shares:
            if sequence.place is Place.RUNNING and self._take_pages(sequence, count):
                chosen.append((sequence, count))
        return chosen

    def check_integrity(self) -> None:
        """Raise InternalError unless places, ages and pages agree with each other."""
        holders = (*self.running, *self._departed)
        self._allocator.check_integrity(sequence.pages for sequence in holders)
        for place, sequences in ((Place.WAITING, self.waiting), (Place.RUNNING, self.running)):
            keys = [sequence.key for sequence in sequences]
            if keys != sorted(set(keys)):
                raise InternalError(f"{place.name} sequences are not ordered by age: {keys}")
            for sequence in sequences:
                held = len(sequence.pages) * self._limits.page_tokens
                if sequence.place is not place or sequence.computed_count > held:
                    raise InternalError(f"sequence {sequence.key} is inconsistent")
        if len(self.by_id) != len(self.waiting) + len(self.running):
            raise InternalError("a request is nowhere or in two places")
        if any(one.in_sweep for one in self.waiting) or not all(
            one.in_sweep and one.place is Place.ENDED for one in self._departed
        ):
            raise InternalError("a sweep computes who waits, or pages are kept for no sweep")

    def _take_pages(self, sequence: Sequence, count: int) -> bool:
        """False when `sequence` itself was preempted, or has to wait for pages.

        It waits while others hold pages that cannot be taken from them now: those of a sweep, and
        those that a failed step has left with who is to run alone.
        """
        needed = pages_for(sequence.computed_count + count, self._limits.page_tokens)
        needed -= len(sequence.pages)
        while needed > 0:
            pages = self._allocator.take(needed)
            if pages is not None:
                sequence.pages.extend(pages)
                return True
            movable = [one for one in self.running if one.is_movable]
            youngest = movable[-1]  # `sequence` is one of them
            if youngest is sequence:
                if self._departed or len(movable) < len(self.running):
                    return False
                if len(movable) == 1:
                    raise InternalError(
                        f"a request of {len(sequence.tokens)} tokens was admitted but "
                        f"{self._allocator.pages_count} pages do not hold it"
                    )
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give its pages back; it will be computed again, prompt and generated tokens, in turn."""
        self.running.remove(sequence)
        self._release_pages(sequence)
        sequence.place = Place.WAITING
        insort(self.waiting, sequence, key=_AGE)
        self.preemptions_count += 1

    def _release_pages(self, sequence: Sequence) -> None:
        self._allocator.release(sequence.pages)
        del sequence.pages[:]
        sequence.computed_count = 0
