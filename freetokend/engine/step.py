"""One engine step: tokens in, one sampled token per sequence that reached its end out."""

from __future__ import annotations

import numpy as np
import torch

from freetokend.engine.sampling import sample_sequences
from freetokend.engine.work import StepOutcome, StepWork
from freetokend.kvcache.batch import KvStore, SequenceSpan, kv_batch
from freetokend.native.executor import Executor
from freetokend.tensor.protocols import StepInput, StepRunner


class Engine:
    """StepEngine over a model and its KV memory. Holds no state of any sequence.

    `executor`'s threads choose the tokens.
    """

    def __init__(self, program: StepRunner, kv: KvStore, executor: Executor) -> None:
        self._program = program
        self._kv = kv
        self._executor = executor

    @torch.inference_mode()
    def run(self, work: StepWork) -> StepOutcome:
        """Compute and sample. A row that is not numbers is an error of its sequence only."""
        sequences = work.sequences
        batch = kv_batch(
            [
                SequenceSpan(
                    pages=one.pages,
                    first_position=one.first_position,
                    tokens_count=len(one.token_ids),
                )
                for one in sequences
            ],
            self._kv.page_tokens,
        )
        ends = np.cumsum([len(one.token_ids) for one in sequences])
        sampled = [index for index, one in enumerate(sequences) if one.draw_index is not None]
        token_ids = np.concatenate([np.asarray(one.token_ids, dtype=np.int64) for one in sequences])
        step = StepInput(
            token_ids=torch.from_numpy(token_ids),
            positions=batch.positions.long(),
            logits_index=torch.from_numpy(ends[sampled].astype(np.int64) - 1),
        )
        logits = self._program.forward(step, self._kv.view(batch))
        return StepOutcome(
            outcomes=sample_sequences(
                self._executor,
                logits.to(torch.float32).numpy(),
                [sequences[index] for index in sampled],
            )
        )
