"""One engine step: tokens in, one sampled token per sequence that reached its end out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from freetokend.engine.sampling import sample_sequences
from freetokend.engine.work import SequenceWork, StepOutcome, StepWork
from freetokend.kvcache.batch import KvStore, SequenceSpan, kv_batch
from freetokend.native.executor import Executor
from freetokend.tensor.protocols import KvView, StepInput, StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A step as the model takes it. sampled: the sequences whose logits `step` asks for."""

    step: StepInput
    kv: KvView
    sampled: tuple[SequenceWork, ...]


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
        prepared = self.prepare(work)
        return self.sample(prepared, self._program.forward(prepared.step, prepared.kv))

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
        sampled = [index for index, one in enumerate(sequences) if one.draw_index is not None]
        token_ids = np.concatenate([np.asarray(one.token_ids, dtype=np.int64) for one in sequences])
        step = StepInput(
            token_ids=torch.from_numpy(token_ids),
            positions=batch.positions.long(),
            logits_index=torch.from_numpy(ends[sampled].astype(np.int64) - 1),
        )
        return Prepared(
            step=step,
            kv=self._kv.view(batch),
            sampled=tuple(sequences[index] for index in sampled),
        )

    def sample(self, prepared: Prepared, logits: torch.Tensor) -> StepOutcome:
        """logits: [sampled sequences, vocab] of the step."""
        return StepOutcome(
            outcomes=sample_sequences(
                self._executor, logits.to(torch.float32).numpy(), prepared.sampled
            )
        )
