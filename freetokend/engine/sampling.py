"""Choosing a token from one row of logits: in float64, row by row, without hidden state.

A row's result depends on the row, the parameters and the draw index only, so a request gets the
same tokens alone, in any batch, and after a preemption that computed its prefix again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from freetokend.engine.work import SamplingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

# top_p looks at this many of the largest probabilities first: sorting a whole vocabulary of 50k
# takes 3 ms, and nucleus sets of useful p are far smaller.
FIRST_NUCLEUS_COUNT: Final = 1024
_SEED_BITS: Final = 64


class NotNumbersError(ValueError):
    """The logits hold NaN or +inf, or no finite value at all."""


def sample_row(logits: npt.NDArray[np.float32], params: SamplingParams, draw_index: int) -> int:
    """logits: fp32 [vocab]. Returns a token id; raises NotNumbersError."""
    peak = logits.max()  # NaN if any is NaN
    if not np.isfinite(peak):
        raise NotNumbersError(f"the largest of {logits.size} logits is {peak}")
    if params.temperature <= 0.0:
        return int(np.argmax(logits))  # the lowest id among equals
    kept_ids, weights = _kept(logits.astype(np.float64), float(peak), params)
    cumulative = np.cumsum(weights)
    threshold = _uniform(params.seed, draw_index) * cumulative[-1]
    chosen = int(np.searchsorted(cumulative, threshold, side="right"))
    return int(kept_ids[min(chosen, kept_ids.size - 1)])


def _kept(
    logits: Floats, peak: float, params: SamplingParams
) -> tuple[npt.NDArray[np.intp], Floats]:
    """The ids that survive the filters, ascending, and their unnormalised probabilities."""
    # exp of a difference that overflows only downwards: a tiny temperature tends to greedy.
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - peak) / params.temperature)
    ids = np.arange(weights.size)
    if 0 < params.top_k < weights.size:
        smallest = np.partition(weights, weights.size - params.top_k)[-params.top_k]
        ids = np.flatnonzero(weights >= smallest)
    if params.top_p < 1.0:
        ids = ids[_nucleus(weights[ids], params.top_p)]
    if params.min_p > 0.0:
        ids = ids[weights[ids] >= params.min_p]  # the largest weight is 1
    return ids, weights[ids]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Ascending indices of the smallest set of largest weights that reaches top_p of the sum."""
    goal = top_p * weights.sum()
    count = FIRST_NUCLEUS_COUNT
    while True:
        if count < weights.size:
            smallest = np.partition(weights, weights.size - count)[-count]
            candidates = np.flatnonzero(weights >= smallest)
        else:
            candidates = np.arange(weights.size)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= goal or candidates.size == weights.size:
            reached = int(np.searchsorted(cumulative, goal, side="left"))
            return np.sort(order[: reached + 1])
        count *= 8


def _uniform(seed: int, draw_index: int) -> float:
    """A number in [0, 1) from a counter-based generator: no state to keep or to lose."""
    bits = np.random.Philox(key=seed % (1 << _SEED_BITS), counter=draw_index).random_raw()
    return float(int(bits) >> 11) * 2.0**-53
