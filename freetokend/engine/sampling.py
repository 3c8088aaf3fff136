"""From sequences to the parameters of their rows of logits, and from tokens to outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from freetokend.engine.work import SequenceOutcome, SequenceWork
from freetokend.tensor.sampling import SAMPLING_ROW, ChosenTokens, SamplingRows

_SEED_BITS: Final = 64


def sampling_rows(sequences: Sequence[SequenceWork]) -> SamplingRows:
    """One row per sequence, in their order."""
    return np.array(
        [
            (
                one.sampling.temperature,
                one.sampling.top_k,
                one.sampling.top_p,
                one.sampling.min_p,
                one.sampling.seed % (1 << _SEED_BITS),
                one.draw_index or 0,
            )
            for one in sequences
        ],
        dtype=SAMPLING_ROW,
    )


def outcomes(
    sequences: Sequence[SequenceWork], chosen: ChosenTokens, vocab_size: int
) -> tuple[SequenceOutcome, ...]:
    """A row that holds NaN or +inf, or no finite value at all, is an error of its sequence only."""
    rows = zip(sequences, chosen.token_ids.tolist(), chosen.peaks.tolist(), strict=True)
    return tuple(
        SequenceOutcome(key=sequence.key, token_id=token_id)
        if token_id >= 0
        else SequenceOutcome(
            key=sequence.key,
            token_id=None,
            error=f"the largest of {vocab_size} logits is {peak}",
        )
        for sequence, token_id, peak in rows
    )
