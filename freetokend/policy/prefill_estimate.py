"""How fast prompts are computed, and how long the next one will take."""

from __future__ import annotations

from typing import Final

# What was seen counts half as much when so many more tokens have been seen.
_HALF_LIFE_TOKENS: Final = 8192


class PrefillMeter:
    """Prompt tokens per second of the time in which some were waiting to be computed.

    Decode steps and pauses between are part of that time, so it is what a prompt will meet. The
    caller looks before and after whatever may compute.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_s = 0.0
        self._last_count = 0
        self._was_pending = False

    def look(self, now_s: float, computed_count: int, pending_count: int) -> None:
        """now_s: a clock that does not go back; computed_count: prompt tokens computed so far;
        pending_count: those that are accepted and not computed."""
        if self._was_pending:
            computed = computed_count - self._last_count
            kept = 0.5 ** (computed / _HALF_LIFE_TOKENS)
            self._tokens = kept * self._tokens + computed
            self._seconds = kept * self._seconds + (now_s - self._last_s)
        self._last_s, self._last_count = now_s, computed_count
        self._was_pending = pending_count > 0

    @property
    def tokens_per_s(self) -> float:
        """0 until a prompt has been computed."""
        return self._tokens / self._seconds if self._tokens > 0 and self._seconds > 0 else 0.0


def estimated_prefill_s(
    prompt_tokens: int, pending_tokens: int, tokens_per_s: float
) -> float | None:
    """Seconds until a prompt is computed behind those that wait already; None: nobody knows."""
    if tokens_per_s <= 0:
        return None
    return (pending_tokens + prompt_tokens) / tokens_per_s
