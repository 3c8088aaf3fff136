"""The layer that is timed, and which experts its tokens take: the same for ours and for rivals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A mixture-of-experts layer with gated experts."""

    hidden_size: int
    intermediate_size: int
    experts_count: int
    top_k: int

    @property
    def expert_weights(self) -> int:
        """Elements of one expert's three matrices."""
        return 3 * self.hidden_size * self.intermediate_size

    def operations(self, tokens: int) -> int:
        """Floating point operations of a batch: a multiplication and an addition per weight."""
        return 2 * tokens * self.top_k * self.expert_weights


QWEN3: Final = LayerShape(hidden_size=2048, intermediate_size=768, experts_count=128, top_k=8)


def routes(shape: LayerShape, tokens: int) -> NDArray[np.int32]:
    """Expert ids int32 [batches, tokens, k], to be taken in turn: distinct for each token.

    With one token no expert comes again before all others were read, so that none is cached; with
    more, each token draws its own.
    """
    rng = np.random.default_rng(7)
    if tokens == 1:
        orders = [rng.permutation(shape.experts_count) for _ in range(4)]
        return np.concatenate(orders).astype(np.int32).reshape(-1, 1, shape.top_k)
    batches_count = 64 if tokens <= 4 else 8 if tokens <= 64 else 2
    drawn = rng.random((batches_count, tokens, shape.experts_count)).argsort(axis=2)
    return np.ascontiguousarray(drawn[:, :, : shape.top_k]).astype(np.int32)


def distinct_experts(route: NDArray[np.int32]) -> float:
    """How many experts a batch reads, on average over the batches of `routes`."""
    return float(np.mean([len(np.unique(batch)) for batch in route]))
