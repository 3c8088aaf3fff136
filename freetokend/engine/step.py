"""One engine step: tokens in, one sampled token per sequence that reached its end out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from freetokend.engine.sampling import outcomes, sampling_rows
from freetokend.engine.work import SequenceWork, StepOutcome, StepWork
from freetokend.kvcache.batch import KvStore, SequenceSpan, kv_batch
from freetokend.tensor.protocols import KvView, StepInput, TokenRunner
from freetokend.tensor.sampling import ChosenTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step as the model takes it. sampled: the sequences that `step` asks a token for."""

    step: StepInput
    kv: KvView
    sampled: tuple[SequenceWork, ...]


class Engine:
    """StepEngine over a model and its KV memory. Holds no state of any sequence."""

    def __init__(self, program: TokenRunner, kv: KvStore) -> None:
        self._program = program
        self._kv = kv

    @torch.inference_mode()
    def run(self, work: StepWork) -> StepOutcome:
        """Compute and sample. A row that is not numbers is an error of its sequence only."""
        prepared = self.prepare(work)
        return self.outcome(prepared, self._program.choose(prepared.step, prepared.kv))

    def prepare(self, work: StepWork) -> Prepared:
        """Tensors of all sequences, one after another."""
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
        ends_at = [index for index, one in enumerate(sequences) if one.draw_index is not None]
        sampled = tuple(sequences[index] for index in ends_at)
        token_ids = np.concatenate([np.asarray(one.token_ids, dtype=np.int64) for one in sequences])
        step = StepInput(
            token_ids=torch.from_numpy(token_ids),
            positions=batch.positions.long(),
            logits_index=torch.from_numpy(ends[ends_at].astype(np.int64) - 1),
            sampling=sampling_rows(sampled),
        )
        return Prepared(step=step, kv=self._kv.view(batch), sampled=sampled)

    def outcome(self, prepared: Prepared, chosen: ChosenTokens) -> StepOutcome:
        """Of a step whose tokens are chosen."""
        return StepOutcome(outcomes=outcomes(prepared.sampled, chosen, self._program.vocab_size))
