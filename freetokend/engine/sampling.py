"""Choosing a token from each row of logits: without hidden state.

A row's result depends on the row, the parameters and the draw index only, so a request gets the
same tokens alone, in any batch, and after a preemption that computed its prefix again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from freetokend.engine.work import SequenceOutcome, SequenceWork
from freetokend.native import sampling
from freetokend.native.executor import Executor
from freetokend.native.sampling import RowSampling

_SEED_BITS: Final = 64


def sample_sequences(
    executor: Executor, logits: npt.NDArray[np.float32], sequences: Sequence[SequenceWork]
) -> tuple[SequenceOutcome, ...]:
    """logits: fp32 [len(sequences), vocab], in one native call.

    A row that holds NaN or +inf, or no finite value at all, is an error of its sequence only.
    """
    rows = np.ascontiguousarray(logits, dtype=np.float32)
    samples = sampling.sample_rows(
        executor,
        rows.ctypes.data,
        vocab_size=rows.shape[1],
        rows=[_row_sampling(one) for one in sequences],
    )
    return tuple(
        SequenceOutcome(
            key=sequence.key,
            token_id=sample.token_id,
            error=""
            if sample.token_id is not None
            else f"the largest of {rows.shape[1]} logits is {sample.peak}",
        )
        for sequence, sample in zip(sequences, samples, strict=True)
    )


def _row_sampling(sequence: SequenceWork) -> RowSampling:
    params = sequence.sampling
    return RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed % (1 << _SEED_BITS),
        draw_index=sequence.draw_index or 0,
    )
