"""One accepted request on its way through the scheduler."""

from __future__ import annotations

import enum
from array import array

from freetokend.engine.work import SamplingParams, SequenceWork
from freetokend.link.messages import GenerateRequest


class Place(enum.Enum):
    """Where a sequence is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Sequence:
    """State owned by the scheduler: known tokens, how many of them are in the KV pages, pages.

    `key` rises with arrival and is the age used by every decision.
    """

    __slots__ = (
        "computed_count",
        "in_sweep",
        "key",
        "max_new_tokens",
        "pages",
        "place",
        "prompt_count",
        "request_id",
        "sampling",
        "stop_ids",
        "suspect_count",
        "tokens",
    )

    def __init__(
        self,
        key: int,
        request: GenerateRequest,
        sampling: SamplingParams,
        max_new_tokens: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.key = key
        self.request_id = request.request_id
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.tokens = list(request.prompt_token_ids)
        self.prompt_count = len(self.tokens)
        self.computed_count = 0
        self.pages = array("i")
        self.place = Place.WAITING
        self.suspect_count = 0  # tokens of a step that failed, to be computed alone
        self.in_sweep = False  # a sweep writes into its pages, even when it has ended meanwhile

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - self.prompt_count

    @property
    def pending_count(self) -> int:
        """Known tokens that are not in the KV pages yet; never 0 while running."""
        return len(self.tokens) - self.computed_count

    @property
    def is_decoding(self) -> bool:
        return self.pending_count == 1 and self.generated_count > 0

    @property
    def is_movable(self) -> bool:
        """Whether its pages may be given to others."""
        return not self.in_sweep and self.suspect_count == 0

    def work(self, count: int) -> SequenceWork:
        """The next `count` pending tokens; the last pending one is followed by a draw."""
        start = self.computed_count
        reaches_end = start + count == len(self.tokens)
        return SequenceWork(
            key=self.key,
            token_ids=self.tokens[start : start + count],
            first_position=start,
            pages=self.pages,
            sampling=self.sampling,
            draw_index=self.generated_count if reaches_end else None,
        )
