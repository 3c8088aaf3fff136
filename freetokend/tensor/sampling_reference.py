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
class Choice:
    """token_id: -1 for a row that is not numbers. peak: the largest logit, NaN if any is NaN.
    margin: the smallest relative distance of any decision on the way to its boundary."""

    token_id: int
    peak: float
    margin: float


def choose(row: Row, params: np.void) -> Choice:
    """params: one SAMPLING_ROW, as `freetokend.tensor.sampling` says what it means."""
    peak = float(row.max())
    if not np.isfinite(peak):
        return Choice(token_id=-1, peak=peak, margin=1.0)
    if params["temperature"] == 0:
        return Choice(token_id=int(row.argmax()), peak=peak, margin=1.0)
    kept, weights, margin = _kept(row, params)
    bits = np.random.Philox(key=int(params["seed"]), counter=int(params["draw_index"])).random_raw()
    cumulative = np.cumsum(weights)
    threshold = float(int(bits) >> 11) * 2.0**-53 * cumulative[-1]
    index = int(np.searchsorted(cumulative, threshold, side="right"))
    margin = min(margin, float(np.abs(cumulative - threshold).min() / cumulative[-1]))
    return Choice(token_id=int(kept[min(index, len(kept) - 1)]), peak=peak, margin=margin)


def _kept(row: Row, params: np.void) -> tuple[Ids, Doubles, float]:
    """The ids that pass, ascending, their weights relative to the best, and the margin."""
    top_k, top_p, min_p = int(params["top_k"]), float(params["top_p"]), float(params["min_p"])
    ids: Ids = np.arange(row.size)
    if 0 < top_k < row.size:
        ids = np.flatnonzero(row >= np.sort(row)[-top_k])
    temperature = np.float32(min(max(float(params["temperature"]), 1e-30), 1e30))
    with np.errstate(over="ignore", under="ignore"):
        scores = (row[ids] - row.max()) / temperature
    weights = np.where(scores < -87.0, 0.0, np.exp(scores.astype(np.float64)))
    margin = 1.0
    if top_p < 1.0:
        goal = top_p * weights.sum()
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        inside = order[: int(np.searchsorted(cumulative, goal, side="left")) + 1]
        margin = min(margin, float(np.abs(cumulative - goal).min() / weights.sum()))
        inside = np.sort(inside)
        ids, weights = ids[inside], weights[inside]
    if min_p > 0.0:
        margin = min(margin, float(np.abs(weights - min_p).min() / min_p))
        inside = np.flatnonzero(weights >= np.float32(min_p))
        ids, weights = ids[inside], weights[inside]
    return ids, weights, margin
