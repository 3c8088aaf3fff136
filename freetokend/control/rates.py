"""Tokens per second over the last seconds, from counters that only rise."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 5.0
# Engines report every step; more samples than this make no rate better.
_SPACING_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRates:
    """Mean rates over the window, 0 while nothing is produced."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    prefill_tokens_count: int
    decode_tokens_count: int


class RateWindow:
    """Owner of the samples. Counters hold between samples, so that silence lowers the rate."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[_Sample] = deque()

    def observe(self, now_s: float, *, prefill_tokens_count: int, decode_tokens_count: int) -> None:
        """Note the counters at `now_s`; a counter that fell (a new engine) starts anew."""
        sample = _Sample(now_s, prefill_tokens_count, decode_tokens_count)
        samples = self._samples
        if samples:
            newest = samples[-1]
            fell = (
                prefill_tokens_count < newest.prefill_tokens_count
                or decode_tokens_count < newest.decode_tokens_count
            )
            if fell:
                samples.clear()
                samples.append(_Sample(now_s, 0, 0))
        if len(samples) >= 2 and samples[-1].at_s - samples[-2].at_s < _SPACING_S:
            samples.pop()
        samples.append(sample)
        # The newest sample at or before the window's start is the base of the difference.
        while len(samples) >= 2 and samples[1].at_s <= now_s - self._window_s:
            samples.popleft()

    def rates(self, now_s: float) -> TokenRates:
        """The rates of the window that ends at `now_s`."""
        if not self._samples:
            return TokenRates()
        start_s = now_s - self._window_s
        base = self._samples[0]
        for sample in self._samples:
            if sample.at_s > start_s:
                break
            base = sample
        newest = self._samples[-1]
        span_s = now_s - max(base.at_s, start_s)
        if span_s <= 0:
            return TokenRates()
        return TokenRates(
            prefill_tokens_per_s=(newest.prefill_tokens_count - base.prefill_tokens_count) / span_s,
            decode_tokens_per_s=(newest.decode_tokens_count - base.decode_tokens_count) / span_s,
        )
