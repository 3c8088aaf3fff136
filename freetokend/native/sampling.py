"""Choosing tokens from rows of logits: typed face of the `_exec` extension module.

A row's result depends on the row, the parameters and the draw index only, never on other rows,
threads or the instruction set. Filters, in this order: temperature, top_k (keeps every token that
equals the k-th best), top_p (the smallest set of best tokens, the lower id first, that reaches
this share of the sum), min_p (at least this share of the best). Probabilities are fp32 relative to
the best, their sums fp64. The draw is the first 64 bits of Philox4x64-10 with the seed as key and
the draw index as counter, as numpy's `Philox(key=seed, counter=draw_index).random_raw()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freetokend.native import _exec
from freetokend.native.executor import Executor, faults


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How to choose from one row; seed and draw_index: 64 bits.

    `temperature` 0 takes the best token, the lowest id among equals; a negative top_k is off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    draw_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A token, or None when the row is not numbers: NaN or +inf in it, or nothing above -inf.

    `peak` is the largest logit, NaN if any is NaN.
    """

    token_id: int | None
    peak: float


def sample_rows(
    executor: Executor, logits: int, *, vocab_size: int, rows: Sequence[RowSampling]
) -> list[Sample]:
    """Every row in one call, spread over the executor's threads.

    logits: address of fp32 [len(rows), vocab_size]. Raises InternalError for parameters that are
    negative or NaN, or while another thread uses the executor.
    """
    asked = [
        (one.temperature, one.top_k, one.top_p, one.min_p, one.seed, one.draw_index) for one in rows
    ]
    with faults():
        found = _exec.sample_rows(executor.native, logits, vocab_size=vocab_size, rows=asked)
    return [
        Sample(token_id=token_id if numbers else None, peak=peak)
        for token_id, numbers, peak in found
    ]
