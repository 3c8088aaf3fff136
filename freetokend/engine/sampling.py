"""Choosing a token from one row of logits: row by row, without hidden state.

A row's result depends on the row, the parameters and the draw index only, so a request gets the
same tokens alone, in any batch, and after a preemption that computed its prefix again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from freetokend.engine.work import SamplingParams
from freetokend.native.sampling import Sampler

_SEED_BITS: Final = 64


class NotNumbersError(ValueError):
    """The logits hold NaN or +inf, or no finite value at all."""


def sample_row(
    sampler: Sampler, logits: npt.NDArray[np.float32], params: SamplingParams, draw_index: int
) -> int:
    """logits: fp32 [vocab]. Returns a token id; raises NotNumbersError."""
    row = np.ascontiguousarray(logits, dtype=np.float32)
    sample = sampler.sample_row(
        row.ctypes.data,
        vocab_size=row.size,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed % (1 << _SEED_BITS),
        draw_index=draw_index,
    )
    if sample.token_id is None:
        raise NotNumbersError(f"the largest of {row.size} logits is {sample.peak}")
    return sample.token_id
