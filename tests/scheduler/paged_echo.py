"""A torch-free StepEngine with a real page memory: its tokens are a function of what the pages say.

It writes every token of a step into the sequence's pages and computes the next token from the
whole history read back through the page table, so a page given to two sequences, a wrong position
or a lost token changes the result.
"""

from __future__ import annotations

from freetokend.engine.work import SequenceOutcome, SequenceWork, StepOutcome, StepWork

VOCAB_SIZE = 97


def next_token(history: list[int]) -> int:
    """The token after `history`, for a sequence that is computed as it should be."""
    value = 7
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB_SIZE


def solo_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    """What `prompt` continues with."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class PagedEchoEngine:
    """Fails steps that hold a token of `poison_ids`; answers not-a-number after `nan_ids`."""

    def __init__(
        self,
        page_tokens: int,
        *,
        poison_ids: frozenset[int] = frozenset(),
        nan_ids: frozenset[int] = frozenset(),
        largest_step_tokens: int = 1 << 30,
    ) -> None:
        self._page_tokens = page_tokens
        self._memory: dict[tuple[int, int], int] = {}
        self._poison_ids = poison_ids
        self._nan_ids = nan_ids
        self.largest_step_tokens = largest_step_tokens
        self.steps: list[StepWork] = []

    def run(self, work: StepWork) -> StepOutcome:
        assert len({sequence.key for sequence in work.sequences}) == len(work.sequences)
        self.steps.append(work)
        if work.tokens_count > self.largest_step_tokens:
            raise MemoryError("the step is too large")
        for sequence in work.sequences:
            assert len(sequence.token_ids) > 0
            if self._poison_ids.intersection(sequence.token_ids):
                raise RuntimeError("a poisoned token")
            for offset, token in enumerate(sequence.token_ids):
                self._memory[self._slot(sequence, sequence.first_position + offset)] = token
        return StepOutcome(
            outcomes=tuple(
                self._outcome(one) for one in work.sequences if one.draw_index is not None
            )
        )

    def _slot(self, sequence: SequenceWork, position: int) -> tuple[int, int]:
        return sequence.pages[position // self._page_tokens], position % self._page_tokens

    def _outcome(self, sequence: SequenceWork) -> SequenceOutcome:
        end = sequence.first_position + len(sequence.token_ids)
        history = [self._memory[self._slot(sequence, position)] for position in range(end)]
        if self._nan_ids.intersection(history):
            return SequenceOutcome(key=sequence.key, token_id=None, error="not a number")
        return SequenceOutcome(key=sequence.key, token_id=next_token(history))
