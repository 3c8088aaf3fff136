"""One known token: the warm-up before READY, and the question "is the engine still sound?"."""

from __future__ import annotations

import time
from array import array

from freetokend.core.errors import InternalError, ModelDataError
from freetokend.engine.work import SamplingParams, SequenceWork, StepEngine, StepWork
from freetokend.kvcache.allocator import PageAllocator


class TokenProbe:
    """Computes one greedy token from `token_id` on a page of its own, between steps."""

    def __init__(self, engine: StepEngine, allocator: PageAllocator, token_id: int) -> None:
        self._engine = engine
        self._allocator = allocator
        self._token_id = token_id

    def run(self) -> float:
        """Seconds it took. Raises what the step raises; ModelDataError when no number comes out."""
        pages = self._allocator.take(1)
        if pages is None:
            raise InternalError("no KV page is free for a probe")
        try:
            started_s = time.monotonic()
            work = SequenceWork(
                key=-1,
                token_ids=[self._token_id],
                first_position=0,
                pages=array("i", pages),
                sampling=SamplingParams(temperature=0.0),
                draw_index=0,
            )
            (outcome,) = self._engine.run(StepWork(sequences=(work,))).outcomes
            if outcome.token_id is None:
                raise ModelDataError(
                    f"The model's first token is not a number ({outcome.error}): its weights are "
                    "damaged. Run `freetokenctl ftw verify` on the model's directory."
                )
            return time.monotonic() - started_s
        finally:
            self._allocator.release(pages)
