"""Choosing a token from one row of logits: row by row, without hidden state.

A row's result depends on the row, the parameters and the draw index only, so a request gets the
same tokens alone, in any batch, and after a preemption that computed its prefix again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from freetokend.engine.work import SamplingParams

Weights = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

# top_p looks at this many of the largest probabilities first: nucleus sets of useful p are far
# smaller than a vocabulary, and sorting all of it would take longer than everything else.
FIRST_NUCLEUS_COUNT: Final = 1024
_SEED_BITS: Final = 64
_BLOCK_COUNT: Final = 512
# Beyond these a temperature is greedy or uniform anyway, and fp32 could not hold it.
_TEMPERATURES: Final = (1e-30, 1e30)


class NotNumbersError(ValueError):
    """The logits hold NaN or +inf, or no finite value at all."""


def sample_row(logits: npt.NDArray[np.float32], params: SamplingParams, draw_index: int) -> int:
    """logits: fp32 [vocab]. Returns a token id; raises NotNumbersError."""
    peak = logits.max()  # NaN if any is NaN
    if not np.isfinite(peak):
        raise NotNumbersError(f"the largest of {logits.size} logits is {peak}")
    if params.temperature <= 0.0:
        return int(np.argmax(logits))  # the lowest id among equals
    ids, weights = _kept(logits, peak, params)
    return int(ids[_draw(weights, _uniform(params.seed, draw_index))])


def _draw(weights: Weights, uniform: float) -> int:
    """The index at which the running sum passes `uniform` of the whole sum.

    Blocks first, then within one block: a running sum over a vocabulary costs as much as all else.
    """
    starts = np.arange(0, weights.size, _BLOCK_COUNT)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    threshold = uniform * blocks[-1]
    block = min(int(np.searchsorted(blocks, threshold, side="right")), blocks.size - 1)
    start = int(starts[block])
    before = blocks[block - 1] if block else 0.0
    inside = before + np.cumsum(weights[start : start + _BLOCK_COUNT], dtype=np.float64)
    index = min(start + int(np.searchsorted(inside, threshold, side="right")), weights.size - 1)
    # Rounding at a block's end may point at a weight of zero, which must never be drawn.
    return index if weights[index] > 0.0 else int(np.flatnonzero(weights[: index + 1])[-1])


def _kept(logits: Weights, peak: np.float32, params: SamplingParams) -> tuple[Ids, Weights]:
    """The ids that survive the filters, ascending, and their probabilities relative to the best.

    fp32 is enough for weights that are summed in fp64, and eight times as fast as fp64 here.
    """
    ids, scores = np.arange(logits.size), logits
    if 0 < params.top_k < logits.size:
        smallest = np.partition(logits, logits.size - params.top_k)[-params.top_k]
        ids = np.flatnonzero(logits >= smallest)
        scores = logits[ids]
    coldest, hottest = _TEMPERATURES
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores - peak) / min(max(params.temperature, coldest), hottest))
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)  # the best has weight 1
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _nucleus(weights: Weights, top_p: float) -> Ids:
    """Ascending indices of the smallest set of largest weights that reaches top_p of the sum."""
    goal = top_p * weights.sum(dtype=np.float64)
    count = FIRST_NUCLEUS_COUNT
    while True:
        if count < weights.size:
            smallest = np.partition(weights, weights.size - count)[-count]
            candidates = np.flatnonzero(weights >= smallest)
        else:
            candidates = np.arange(weights.size)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if cumulative[-1] >= goal or candidates.size == weights.size:
            reached = int(np.searchsorted(cumulative, goal, side="left"))
            return np.sort(order[: reached + 1])
        count *= 8


def _uniform(seed: int, draw_index: int) -> float:
    """A number in [0, 1) from a counter-based generator: no state to keep or to lose."""
    bits = np.random.Philox(key=seed % (1 << _SEED_BITS), counter=draw_index).random_raw()
    return float(int(bits) >> 11) * 2.0**-53
