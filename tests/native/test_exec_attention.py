"""Paged attention of the CPU executor against float64, and bit for bit across batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.native import executor as native
from freetokend.native.executor import Executor
from tests.native.exec_support import KvPages, KvShape, from_bf16, relative_error, to_bf16

ISAS = native.available_isas()
PAGE = 16
GROUPED = KvShape(q_heads=9, kv_heads=3, head_size=64, page_tokens=PAGE)
# The output is rounded to bf16: at most 2^-9 per element, about 2^-9 / sqrt(3) in the norm.
BF16_ERROR = 2.0**-9


@pytest.fixture(params=ISAS, scope="module")
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with Executor([0, 1], isa=request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def auto_executor() -> Iterator[Executor]:
    with Executor([0, 1]) as opened:
        yield opened


def queries(rng: np.random.Generator, tokens: int, shape: KvShape) -> np.ndarray:
    return rng.normal(size=(tokens, shape.q_heads, shape.head_size)).astype(np.float32)


@pytest.mark.parametrize("position", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 200])
def test_one_token_at_page_boundaries(executor: Executor, position: int) -> None:
    rng = np.random.default_rng(position)
    kv = KvPages(rng, GROUPED, [position + 1])
    kv.store_all(executor)
    q = queries(rng, 1, GROUPED)
    out = kv.attend(executor, q, [(0, position)], 0.125)
    expected = kv.reference(q, [(0, position)], 0.125)
    assert relative_error(from_bf16(out), expected) < BF16_ERROR


@pytest.mark.parametrize(
    "shape",
    [
        KvShape(q_heads=4, kv_heads=4, head_size=128, page_tokens=16),
        KvShape(q_heads=32, kv_heads=4, head_size=128, page_tokens=16),
        KvShape(q_heads=6, kv_heads=2, head_size=37, page_tokens=5),
        KvShape(q_heads=24, kv_heads=1, head_size=80, page_tokens=32),
    ],
    ids=str,
)
def test_prefill_of_several_sequences(executor: Executor, shape: KvShape) -> None:
    rng = np.random.default_rng(1)
    kv = KvPages(rng, shape, [33, 1, 48])
    kv.store_all(executor)
    tokens = [(s, p) for s, length in enumerate([33, 1, 48]) for p in range(length)]
    q = queries(rng, len(tokens), shape)
    scale = shape.head_size**-0.5
    out = kv.attend(executor, q, tokens, scale)
    assert relative_error(from_bf16(out), kv.reference(q, tokens, scale)) < BF16_ERROR
    for index in (0, 20, 32, 33, 34, len(tokens) - 1):
        alone = kv.attend(executor, q[index : index + 1], tokens[index : index + 1], scale)
        assert np.array_equal(alone[0], out[index])


def test_long_context_in_parts(executor: Executor) -> None:
    """More than one part of 1024 keys: computed in parallel or in turn, with equal bits."""
    rng = np.random.default_rng(2)
    kv = KvPages(rng, GROUPED, [2500, 2049, 1024, 1025])
    kv.store_all(executor)
    ends = [(0, 2499), (1, 2048), (2, 1023), (3, 1024)]
    q = queries(rng, len(ends), GROUPED)
    expected = kv.reference(q, ends, 0.125)
    together = kv.attend(executor, q, ends, 0.125)
    assert relative_error(from_bf16(together), expected) < BF16_ERROR
    for index, end in enumerate(ends):
        alone = kv.attend(executor, q[index : index + 1], [end], 0.125)
        assert np.array_equal(alone[0], together[index])
    with Executor([0], isa=executor.isa) as single:
        assert np.array_equal(kv.attend(single, q, ends, 0.125), together)


def test_prefill_equals_token_by_token(executor: Executor) -> None:
    rng = np.random.default_rng(3)
    kv = KvPages(rng, GROUPED, [40])
    tokens = [(0, position) for position in range(40)]
    q = queries(rng, 40, GROUPED)
    steps = []
    for index, token in enumerate(tokens):
        kv.store(executor, [token])
        steps.append(kv.attend(executor, q[index : index + 1], [token], 0.125)[0])
    assert np.array_equal(np.stack(steps), kv.attend(executor, q, tokens, 0.125))


def test_large_scores_do_not_overflow(executor: Executor) -> None:
    rng = np.random.default_rng(4)
    shape = KvShape(q_heads=2, kv_heads=1, head_size=64, page_tokens=PAGE)
    kv = KvPages(rng, shape, [70], scale=30.0)
    kv.store_all(executor)
    q = queries(rng, 1, shape) * 30
    expected = kv.reference(q, [(0, 69)], 1.0)
    out = kv.attend(executor, q, [(0, 69)], 1.0)
    assert relative_error(from_bf16(out), expected) < BF16_ERROR


def test_very_negative_scores(executor: Executor) -> None:
    """All scores far below zero: the maximum must come from them, not from a start value."""
    rng = np.random.default_rng(5)
    shape = KvShape(q_heads=1, kv_heads=1, head_size=16, page_tokens=PAGE)
    kv = KvPages(rng, shape, [20])
    kv.k[0][:] = 100 + rng.normal(size=kv.k[0].shape)
    kv.store_all(executor)
    q = np.full((1, 1, 16), -50, np.float32)
    out = kv.attend(executor, q, [(0, 19)], 1.0)
    assert relative_error(from_bf16(out), kv.reference(q, [(0, 19)], 1.0)) < BF16_ERROR


def test_instruction_sets_agree_bit_for_bit() -> None:
    rng = np.random.default_rng(6)
    kv = KvPages(rng, GROUPED, [90, 1100])
    tokens = [(0, 88), (0, 89), (1, 1099)]
    q = queries(rng, len(tokens), GROUPED)
    results = []
    for isa in ISAS:
        with Executor([0, 1], isa=isa) as executor:
            kv.store_all(executor)
            results.append(kv.attend(executor, q, tokens, 0.125))
    assert all(np.array_equal(result, results[0]) for result in results)


def test_store_writes_only_its_own_places(executor: Executor) -> None:
    rng = np.random.default_rng(7)
    kv = KvPages(rng, GROUPED, [20, 7])
    kv.store(executor, [(0, 16), (1, 3)])
    page = int(kv.table[0, 1])
    assert np.array_equal(kv.k_pages[page, :, 0], to_bf16(kv.k[0][16]))
    assert np.array_equal(kv.v_pages[kv.table[1, 0], :, 3], to_bf16(kv.v[1][3]))
    written = 2 * GROUPED.kv_heads * GROUPED.head_size
    assert np.count_nonzero(kv.k_pages != 0x7FC0) == written
    assert np.count_nonzero(kv.v_pages != 0x7FC0) == written


@given(
    data=st.data(),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    head_size=st.integers(1, 40),
    page_tokens=st.integers(1, 20),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_and_batch(
    auto_executor: Executor,
    data: st.DataObject,
    group: int,
    kv_heads: int,
    head_size: int,
    page_tokens: int,
) -> None:
    shape = KvShape(
        q_heads=group * kv_heads, kv_heads=kv_heads, head_size=head_size, page_tokens=page_tokens
    )
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    kv = KvPages(rng, shape, lengths)
    kv.store_all(auto_executor)
    tokens = [(s, p) for s, n in enumerate(lengths) for p in range(n) if rng.uniform() < 0.5]
    tokens = tokens or [(0, 0)]
    q = queries(rng, len(tokens), shape)
    out = kv.attend(auto_executor, q, tokens, 0.3)
    expected = kv.reference(q, tokens, 0.3)
    limit = 2.0**-8 * np.abs(expected) + 1e-5
    assert np.all(np.abs(from_bf16(out) - expected) <= limit)
