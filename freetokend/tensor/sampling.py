"""Choosing a token from each row of logits: how it is asked for, and what comes back.

A row's token depends on the row, its parameters and its draw index only, never on other rows,
threads or the instruction set, so a request gets the same tokens alone, in any batch, and after a
preemption that computed its prefix again. `temperature` 0 takes the best token, the lowest id among
equals. Filters, in this order: temperature, top_k (keeps every token that equals the k-th best; off
if not positive), top_p (the smallest set of best tokens, the lower id first, that reaches this
share of the sum), min_p (at least this share of the best). Probabilities are fp32 relative to the
best, their sums fp64. The draw is the first 64 bits of Philox4x64-10 with the seed as key and the
draw index as counter, as numpy's `Philox(key=seed, counter=draw_index).random_raw()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freetokend.core.errors import InternalError
from freetokend.native.executor import Executor
from freetokend.tensor.memory import address_of

# [rows] of SAMPLING_ROW
SamplingRows = npt.NDArray[np.void]

# As native code reads it.
SAMPLING_ROW: Final = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("draw_index", np.uint64),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """The caller's own.

    token_ids: int32 [rows], -1 for a row that is not numbers: NaN or +inf in it, or nothing above
    -inf. peaks: fp32 [rows], the largest logit, NaN if any is NaN.
    """

    token_ids: torch.Tensor
    peaks: torch.Tensor


def sampling_address(rows: SamplingRows | None, rows_count: int) -> int:
    """For a native call, which trusts it; 0 for None, which the call refuses.

    InternalError for another number of rows.
    """
    if rows is None:
        return 0
    fits = rows.dtype == SAMPLING_ROW and rows.shape == (rows_count,) and rows.flags.c_contiguous
    if not fits:
        raise InternalError(
            f"{rows_count} rows are to be sampled with parameters of shape {rows.shape}."
        )
    return rows.ctypes.data


def sample_logits(
    executor: Executor, logits: torch.Tensor, rows: SamplingRows | None
) -> ChosenTokens:
    """In a native call of its own, for logits that no native program computed.

    logits: fp32 [rows, vocab], contiguous, on the CPU. InternalError without parameters or for some
    that are negative or NaN, and while another thread uses the executor.
    """
    count, vocab_size = logits.shape
    chosen = ChosenTokens(
        token_ids=torch.empty(count, dtype=torch.int32),
        peaks=torch.empty(count, dtype=torch.float32),
    )
    executor.sample(
        address_of(logits, torch.float32),
        sampling_address(rows, count),
        address_of(chosen.token_ids, torch.int32),
        address_of(chosen.peaks, torch.float32),
        rows=count,
        vocab_size=vocab_size,
    )
    return chosen
