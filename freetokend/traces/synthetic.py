"""Routing traces drawn from a model of router logits with stated locality.

The logit of an expert at a token is a weighted sum of three independent standard normal terms:

- what the conversation is about: drawn once per conversation;
- what is being said just now: a first-order autoregressive process that forgets with
  `drift_tokens` (correlation exp(-1 / drift_tokens) from one token to the next);
- the token itself: fresh noise.

Their variances are `conversation_share`, `drift_share` and what is left to 1; the k greatest
logits of a layer are the experts chosen. Layers are independent, and over conversations every
expert is as likely as another, as the load balancing of training makes it. So a fixed choice of
experts that knows nothing of the routing misses by its size alone, while an order by recency
lives on the first two terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from freetokend.traces.trace import Phase, RoutingTrace, TraceShape, TraceStep

_TOKENS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """Shares of the variance of a logit, and the memory of the drifting term."""

    conversation_share: float
    drift_share: float
    drift_tokens: float

    def __post_init__(self) -> None:
        shares = (self.conversation_share, self.drift_share)
        if min(shares) < 0 or sum(shares) > 1 or self.drift_tokens <= 0:
            raise ValueError(f"shares in 0..1 with a sum up to 1 and a memory above 0, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations that take turns: in each turn a prompt is read, then tokens are written."""

    conversations_count: int
    turns_count: int
    prompt_tokens: int
    decode_tokens: int


def synthetic_trace(
    shape: TraceShape, locality: Locality, workload: Workload, *, seed: int
) -> RoutingTrace:
    """The trace: turn by turn each conversation has a prefill step, then decode steps of 1 token.

    The same arguments give the same trace (with the same numpy).
    """
    talks = [
        _Conversation(shape, locality, np.random.default_rng([seed, index]))
        for index in range(workload.conversations_count)
    ]
    steps: list[TraceStep] = []
    for _ in range(workload.turns_count):
        for talk in talks:
            steps.append(TraceStep(phase=Phase.PREFILL, ids=talk.ids(workload.prompt_tokens)))
            written = talk.ids(workload.decode_tokens)
            steps.extend(
                TraceStep(phase=Phase.DECODE, ids=written[:, token : token + 1])
                for token in range(workload.decode_tokens)
            )
    return RoutingTrace(shape=shape, steps=tuple(steps))


class _Conversation:
    """Draws the tokens of one conversation, one after another."""

    def __init__(self, shape: TraceShape, locality: Locality, random: np.random.Generator) -> None:
        self._random = random
        self._k = shape.experts_per_token
        self._size = (shape.layers_count, shape.experts_per_layer)
        rest = max(0.0, 1.0 - locality.conversation_share - locality.drift_share)
        self._drift_scale = np.float32(locality.drift_share**0.5)
        self._noise_scale = np.float32(rest**0.5)
        self._keep = np.float32(np.exp(-1.0 / locality.drift_tokens))
        self._renew = np.float32((1.0 - float(self._keep) ** 2) ** 0.5)
        self._subject = self._normal() * np.float32(locality.conversation_share**0.5)
        self._drift = self._normal()

    def ids(self, tokens_count: int) -> NDArray[np.uint16]:
        """uint16 [layers, tokens, k]: the experts of the next tokens."""
        parts = [
            np.stack(list(self._tokens(min(_TOKENS_AT_ONCE, tokens_count - start))), axis=1)
            for start in range(0, tokens_count, _TOKENS_AT_ONCE)
        ]
        return np.concatenate(parts, axis=1)

    def _tokens(self, count: int) -> Iterator[NDArray[np.uint16]]:
        for _ in range(count):
            self._drift = self._keep * self._drift + self._renew * self._normal()
            logits = self._subject + self._drift_scale * self._drift
            logits += self._noise_scale * self._normal()
            best = np.argpartition(-logits, self._k - 1, axis=1)[:, : self._k]
            yield best.astype(np.uint16)

    def _normal(self) -> NDArray[np.float32]:
        return self._random.standard_normal(self._size, dtype=np.float32)
