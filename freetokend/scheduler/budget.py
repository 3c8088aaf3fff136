"""How many tokens one step or sweep may have, after memory was short for one."""

from __future__ import annotations

from typing import Final

# After so many times as many successes as before it the next shortage is waited out.
_IMPATIENCE: Final = 2
_MOST_PATIENCE_COUNT: Final = 1 << 20


class TokenBudget:
    """Halved when memory is short; doubled again, up to what it was, after many successes.

    What took the memory may be gone by then. Every shortage doubles the successes asked for, so
    that a machine that never has the memory is asked ever more rarely.
    """

    def __init__(self, limit_tokens: int, *, least_tokens: int, patience_count: int) -> None:
        """limit_tokens: to begin with, and the most; least_tokens: never less, unless the limit is;
        patience_count: successes before the first doubling."""
        self._limit_tokens = limit_tokens
        self._least_tokens = min(least_tokens, limit_tokens)
        self._patience_count = patience_count
        self._successes_count = 0
        self._tokens = limit_tokens

    @property
    def tokens(self) -> int:
        """The present budget."""
        return self._tokens

    def succeeded(self) -> None:
        """Memory sufficed once."""
        if self._tokens == self._limit_tokens:
            return
        self._successes_count += 1
        if self._successes_count >= self._patience_count:
            self._successes_count = 0
            self._tokens = min(max(2 * self._tokens, 1), self._limit_tokens)

    def fell_short(self, tokens_count: int) -> None:
        """There was no memory for so many tokens."""
        self._tokens = max(min(self._tokens, tokens_count) // 2, self._least_tokens)
        self._successes_count = 0
        self._patience_count = min(_IMPATIENCE * self._patience_count, _MOST_PATIENCE_COUNT)
