"""One engine step over a fake model: what reaches the model, and what is sampled from it."""

from __future__ import annotations

import os
from array import array

import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.engine.step import Engine
from freetokend.engine.work import SamplingParams, SequenceWork, StepWork
from freetokend.kvcache.torch_store import TorchKvStore
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.protocols import KvView, StepInput
from freetokend.tensor.sampling import ChosenTokens, sample_logits

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)


class FakeProgram:
    """Logits point at token id + position; a token 13 gives NaN."""

    def __init__(self) -> None:
        self.steps: list[StepInput] = []
        self._executor = Executor(sorted(os.sched_getaffinity(0))[:1])

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def choose(self, step: StepInput, kv: KvView) -> ChosenTokens:
        self.steps.append(step)
        ids, positions = step.token_ids[step.logits_index], step.positions[step.logits_index]
        logits = torch.zeros(len(ids), VOCAB)
        logits[torch.arange(len(ids)), (ids + positions) % VOCAB] = 5.0
        logits[ids == 13] = float("nan")
        return sample_logits(self._executor, logits, step.sampling)


def engine() -> tuple[Engine, FakeProgram]:
    shape = KvShape(layers_count=1, kv_heads_count=1, head_size=2, element_bytes=4, page_tokens=4)
    store = TorchKvStore(shape, 8, kv_dtype=torch.float32, activation_dtype=torch.float32)
    program = FakeProgram()
    return Engine(program, store), program


def sequence(key: int, tokens: list[int], first: int, draw: int | None) -> SequenceWork:
    return SequenceWork(
        key=key,
        token_ids=tokens,
        first_position=first,
        pages=array("i", [key, key + 4]),
        sampling=GREEDY,
        draw_index=draw,
    )


def test_only_sequences_that_reach_their_end_are_sampled() -> None:
    under_test, program = engine()
    work = StepWork(
        sequences=(
            sequence(0, [7], 5, 2),
            sequence(1, [1, 2, 3], 0, None),
            sequence(2, [4, 5], 1, 0),
        )
    )
    outcomes = under_test.run(work).outcomes
    assert [(one.key, one.token_id) for one in outcomes] == [(0, 12), (2, 7)]
    (step,) = program.steps
    assert step.token_ids.tolist() == [7, 1, 2, 3, 4, 5]
    assert step.positions.tolist() == [5, 0, 1, 2, 1, 2]
    assert step.logits_index.tolist() == [0, 5]
    assert {one.dtype for one in (step.token_ids, step.positions, step.logits_index)} == {
        torch.int64
    }


def test_a_step_of_prompt_chunks_samples_nothing() -> None:
    under_test, _ = engine()
    work = StepWork(sequences=(sequence(0, [1, 2], 0, None), sequence(1, [3], 0, None)))
    assert under_test.run(work).outcomes == ()


def test_logits_that_are_not_numbers_are_an_error_of_their_sequence() -> None:
    under_test, _ = engine()
    outcomes = under_test.run(
        StepWork(sequences=(sequence(0, [13], 0, 0), sequence(1, [9], 0, 0)))
    ).outcomes
    assert outcomes[0].token_id is None
    assert "nan" in outcomes[0].error
    assert outcomes[1].token_id == 9


def test_a_span_beyond_its_pages_never_reaches_the_model() -> None:
    under_test, program = engine()
    with pytest.raises(InternalError, match="its 2 pages hold 8"):
        under_test.run(StepWork(sequences=(sequence(0, [1, 2], 7, 0),)))
    assert program.steps == []
