"""The native sampler against its numpy reference, its generator and its refusals."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError
from freetokend.native.executor import Executor
from freetokend.tensor.sampling import SAMPLING_ROW, ChosenTokens, SamplingRows, sample_logits
from freetokend.tensor.sampling_reference import Row, choose

# Choices nearer to a boundary than this may go either way.
MARGIN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    token_id: int
    peak: float


def asked(filters: Filters, seed: int = 0, draw_index: int = 0) -> SamplingRows:
    """One row."""
    return np.array(
        [
            (
                filters.temperature,
                filters.top_k,
                filters.top_p,
                filters.min_p,
                seed,
                draw_index,
            )
        ],
        SAMPLING_ROW,
    )


@cache
def executor() -> Executor:
    return Executor(sorted(os.sched_getaffinity(0))[:1])


def only(chosen: ChosenTokens) -> Sample:
    return Sample(token_id=int(chosen.token_ids), peak=float(chosen.peaks))


def sample(row: Row, filters: Filters, seed: int = 0, draw_index: int = 0) -> Sample:
    logits = torch.from_numpy(np.ascontiguousarray(row, np.float32)[None])
    return only(sample_logits(executor(), logits, asked(filters, seed, draw_index)))


def differences(row: Row, filters: Filters, seed: int, draws: range) -> int:
    """Draws that differ from the reference within the margin; beyond it none may."""
    close = 0
    for draw_index in draws:
        expected = choose(row, asked(filters, seed, draw_index)[0])
        if sample(row, filters, seed, draw_index).token_id != expected.token_id:
            assert expected.margin < MARGIN, (filters, seed, draw_index)
            close += 1
    return close


@pytest.mark.parametrize(
    ("seed", "draw_index"),
    [(0, 0), (1, 0), (0, 1), (2**64 - 1, 2**64 - 1), (2**63, 2**32), (2**64 - 1, 2**64 - 2)],
)
def test_the_generator_is_numpys_philox(seed: int, draw_index: int) -> None:
    # Equal weights: the token is the first ten bits of the draw.
    row = np.zeros(1024, np.float32)
    bits = int(np.random.Philox(key=seed, counter=draw_index).random_raw())
    assert sample(row, Filters(temperature=1.0), seed, draw_index).token_id == bits >> 54


@given(seed=st.integers(0, 2**64 - 1), draw_index=st.integers(0, 2**64 - 1))
@settings(max_examples=300, deadline=None)
def test_the_generator_is_numpys_philox_for_any_key_and_counter(seed: int, draw_index: int) -> None:
    row = np.zeros(1 << 12, np.float32)
    bits = int(np.random.Philox(key=seed, counter=draw_index).random_raw())
    assert sample(row, Filters(temperature=1.0), seed, draw_index).token_id == bits >> 52


filters = st.builds(
    Filters,
    temperature=st.sampled_from([1e-300, 0.25, 0.7, 1.0, 2.0, 1e300]),
    top_k=st.one_of(st.just(0), st.integers(1, 70), st.just(2**40)),
    top_p=st.sampled_from([0.0, 1e-6, 0.11, 0.5, 0.93, 0.9999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-30, 0.03, 0.3, 1.0]),
)
# Few distinct values: ties everywhere. -inf: forbidden tokens.
logits = st.one_of(st.integers(-40, 40).map(lambda value: value / 4), st.just(-math.inf))
rows = (
    st.lists(logits, min_size=1, max_size=60)
    .filter(lambda values: any(map(math.isfinite, values)))
    .map(lambda values: np.array(values, np.float32))
)


@given(row=rows, filters=filters, seed=st.integers(0, 2**64 - 1))
@settings(max_examples=500, deadline=None)
def test_small_rows_with_ties_agree_with_the_reference(
    row: Row, filters: Filters, seed: int
) -> None:
    differences(row, filters, seed, range(10))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 512, 513, 5000, 152_064])
def test_random_rows_agree_with_the_reference(size: int) -> None:
    rng = np.random.default_rng(size)
    draws, close = 0, 0
    for spread in (0.01, 1.0, 4.0):
        row = (rng.normal(size=size) * spread).astype(np.float32)
        for top_k, top_p, min_p in [
            (0, 1.0, 0.0),
            (0, 0.95, 0.0),
            (0, 0.3, 0.0),
            (40, 1.0, 0.0),
            (700, 0.9, 0.0),
            (0, 1.0, 0.05),
            (50, 0.99, 0.01),
        ]:
            chosen = Filters(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
            few = range(6 if size < 10_000 else 1)
            close += differences(row, chosen, size, few)
            draws += len(few)
    assert close <= max(1, draws // 50), "close calls are rare in random rows"


def test_a_nucleus_of_a_flat_row_is_cut_by_id() -> None:
    row = np.zeros(4096, np.float32)
    row[::2] = 0.001  # the even ids come first, then the odd ones
    chosen = Filters(temperature=1.0, top_p=0.75)
    drawn = {sample(row, chosen, 1, index).token_id for index in range(4000)}
    odd = [token for token in drawn if token % 2]
    assert 1500 < max(odd) < 2060
    assert max(token for token in drawn if token % 2 == 0) > 4000


@given(
    values=st.lists(st.integers(-8, 8), min_size=1, max_size=600),
    shift=st.sampled_from([0.0, -1e4, 1e4]),
)
@settings(max_examples=200, deadline=None)
def test_greedy_takes_the_lowest_of_equal_ids(values: list[int], shift: float) -> None:
    row = np.array(values, np.float32) + np.float32(shift)
    best = sample(row, Filters(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0))
    assert best == Sample(token_id=int(np.argmax(row)), peak=float(row.max()))


@pytest.mark.parametrize("size", [1, 7, 16, 300, 1000])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_number_that_is_none_is_found_anywhere(size: int, bad: float) -> None:
    for place in range(0, size, 11):
        row = np.zeros(size, np.float32)
        row[place] = bad
        found = sample(row, Filters(temperature=0.0))
        assert found.token_id == -1
        assert np.array_equal(found.peak, abs(bad), equal_nan=True)


def test_a_row_of_forbidden_tokens_has_no_token() -> None:
    row = np.full(40, -np.inf, np.float32)
    assert sample(row, Filters(temperature=1.0)) == Sample(token_id=-1, peak=-math.inf)


def test_weights_that_vanish_are_never_drawn() -> None:
    row = np.full(3000, -500.0, np.float32)
    row[[7, 2999]] = 0.0
    drawn = {sample(row, Filters(temperature=1.0), 5, index).token_id for index in range(40)}
    assert drawn == {7, 2999}


def test_a_memory_of_other_rows_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    chosen = Filters(temperature=1.3, top_k=200, top_p=0.9, min_p=0.001)
    for size in (10, 5000, 300, 5001, 1):
        row = rng.normal(size=size).astype(np.float32)
        with Executor(sorted(os.sched_getaffinity(0))[:1]) as fresh:
            logits = torch.from_numpy(row[None])
            alone = only(sample_logits(fresh, logits, asked(chosen, 9, 4)))
        assert alone == sample(row, chosen, 9, 4)


@pytest.mark.parametrize("threads_count", [1, 2, 3])
def test_rows_of_one_call_get_what_they_get_alone(threads_count: int) -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(40, 700)).astype(np.float32)
    rows[7, 3], rows[20, 0], rows[21] = np.nan, np.inf, -np.inf
    ways = [Filters(temperature=(i % 4) / 2, top_k=i % 9 * 5, top_p=0.9) for i in range(40)]
    cpus = [sorted(os.sched_getaffinity(0))[0]] * threads_count
    params = [asked(way, index, index + 1) for index, way in enumerate(ways)]
    with Executor(cpus) as several:
        logits = torch.from_numpy(rows)
        together = sample_logits(several, logits, np.concatenate(params))
        assert not sample_logits(several, logits[:0], params[0][:0]).token_ids.numel()
    for index, way in enumerate(ways):
        alone = sample(rows[index], way, index, index + 1)
        assert together.token_ids[index] == alone.token_id
        assert np.array_equal(together.peaks[index], alone.peak, equal_nan=True)
    assert (together.token_ids == -1).nonzero().flatten().tolist() == [7, 20, 21]


@pytest.mark.parametrize(
    "bad", [Filters(temperature=math.nan), Filters(temperature=-1.0), Filters(temperature=1.0)]
)
def test_wrong_calls_are_refused(bad: Filters) -> None:
    row = np.zeros(0 if bad.temperature == 1.0 else 4, np.float32)
    with pytest.raises(InternalError, match="sample: "):
        sample(row, bad)


def test_parameters_must_be_there_for_every_row() -> None:
    logits, one = torch.zeros(2, 4), asked(Filters(temperature=1.0))
    with pytest.raises(InternalError, match="sample: null address"):
        sample_logits(executor(), logits, None)
    with pytest.raises(InternalError, match=r"2 rows are to be sampled .* shape \(1,\)"):
        sample_logits(executor(), logits, one)
    with pytest.raises(InternalError, match="2 rows are to be sampled"):
        sample_logits(executor(), logits, np.concatenate([one] * 4)[::2])


@pytest.mark.parametrize(
    "row", [[1.0, math.nan], [math.inf, 1.0], [-math.inf] * 3, [1.0, 2.0, 2.0]]
)
def test_the_reference_finds_what_is_not_numbers_too(row: list[float]) -> None:
    chosen = Filters(temperature=0.0)
    found, values = sample(np.array(row), chosen), np.array(row, np.float32)
    expected = choose(values, asked(chosen)[0])
    assert found.token_id == expected.token_id
    assert np.array_equal(found.peak, expected.peak, equal_nan=True)


@pytest.mark.parametrize(
    "logits", [torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(1, 8)[:, ::2]]
)
def test_rows_of_other_types_and_strides_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(InternalError, match=r"contiguous torch\.float32 tensor"):
        sample_logits(executor(), logits, asked(Filters(temperature=1.0)))
