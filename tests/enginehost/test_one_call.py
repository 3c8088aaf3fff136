"""A step on the CPU is one call of native code, from token ids to token ids."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest
import torch

from freetokend.engine.work import SamplingParams, SequenceWork, StepWork
from freetokend.ftw.reader import FtwDirectory
from freetokend.native.executor import Executor
from freetokend.tensor.sampling import SAMPLING_ROW, sample_logits
from tests.enginehost.local_engine import local_engine

# Addresses and room for the inputs; nothing of the model is computed in them.
BOOKKEEPING = ("prepare", "buffer")


@contextmanager
def native_calls() -> Iterator[Counter[str]]:
    """Every function of the executor's extension module that this thread calls, by name."""
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, function: object) -> None:
        if event == "c_call" and getattr(function, "__module__", "") == "freetokend.native._exec":
            calls[getattr(function, "__name__", "")] += 1

    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def computing(calls: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in calls.items() if name not in BOOKKEEPING}


def work(*draws: int | None) -> StepWork:
    """Three tokens of each sequence, a different way to choose for each."""
    return StepWork(
        sequences=tuple(
            SequenceWork(
                key=key,
                token_ids=[3 + key, 4, 5],
                first_position=0,
                pages=array("i", [key]),
                sampling=SamplingParams(temperature=key / 2, top_k=20 * key, seed=key),
                draw_index=draw,
            )
            for key, draw in enumerate(draws)
        )
    )


@pytest.mark.parametrize("draws", [(0,), (0, None, 7, 2), (None, None)])
@pytest.mark.parametrize(
    "settings",
    [{"backend": "cpu"}, {"device": "host", "backend": "hybrid", "slots_count": 10}],
    ids=["cpu", "host"],
)
def test_a_step_is_one_call(
    deep: FtwDirectory, settings: dict[str, int | str], draws: tuple[int | None, ...]
) -> None:
    with local_engine(deep, **settings) as built:
        expected = built.engine.run(work(*draws))
        with native_calls() as calls:
            found = built.engine.run(work(*draws))
    assert computing(calls) == {"run": 1}
    assert found == expected
    assert [one.key for one in found.outcomes] == [
        key for key, draw in enumerate(draws) if draw is not None
    ]
    assert all(one.token_id is not None for one in found.outcomes)


def test_a_call_of_the_sampler_would_be_seen() -> None:
    with Executor([0]) as executor, native_calls() as calls:
        sample_logits(executor, torch.ones(1, 4), np.ones(1, SAMPLING_ROW))
    assert computing(calls) == {"sample": 1}
