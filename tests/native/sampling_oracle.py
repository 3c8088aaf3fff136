"""Sampling in numpy, written for clarity: the reference of the native sampler.

The sums are added in another order and the exponentials rounded otherwise than in the native code,
so a token may differ where a choice hangs on the last bits; `margin` says how close that was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """margin: the smallest relative distance of any decision on the way to its boundary."""

    token_id: int
    kept: Ids
    margin: float


def choose(row: Row, filters: Filters, seed: int, draw_index: int) -> Choice:
    """row: finite or -inf logits, at least one finite; filters.temperature > 0."""
    kept, weights, margin = _kept(row, filters)
    bits = np.random.Philox(key=seed, counter=draw_index).random_raw()
    cumulative = np.cumsum(weights)
    threshold = float(int(bits) >> 11) * 2.0**-53 * cumulative[-1]
    index = int(np.searchsorted(cumulative, threshold, side="right"))
    margin = min(margin, float(np.abs(cumulative - threshold).min() / cumulative[-1]))
    return Choice(token_id=int(kept[min(index, len(kept) - 1)]), kept=kept, margin=margin)


def _kept(row: Row, filters: Filters) -> tuple[Ids, Doubles, float]:
    """The ids that pass, ascending, their weights relative to the best, and the margin."""
    ids: Ids = np.arange(row.size)
    if 0 < filters.top_k < row.size:
        ids = np.flatnonzero(row >= np.sort(row)[-filters.top_k])
    temperature = np.float32(min(max(filters.temperature, 1e-30), 1e30))
    with np.errstate(over="ignore", under="ignore"):
        scores = (row[ids] - row.max()) / temperature
    weights = np.where(scores < -87.0, 0.0, np.exp(scores.astype(np.float64)))
    margin = 1.0
    if filters.top_p < 1.0:
        goal = filters.top_p * weights.sum()
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        inside = order[: int(np.searchsorted(cumulative, goal, side="left")) + 1]
        margin = min(margin, float(np.abs(cumulative - goal).min() / weights.sum()))
        inside = np.sort(inside)
        ids, weights = ids[inside], weights[inside]
    if filters.min_p > 0.0:
        margin = min(margin, float(np.abs(weights - filters.min_p).min() / filters.min_p))
        inside = np.flatnonzero(weights >= np.float32(filters.min_p))
        ids, weights = ids[inside], weights[inside]
    return ids, weights, margin
