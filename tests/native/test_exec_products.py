"""Linear layers and experts of the CPU executor against float64, and bit for bit with itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError
from freetokend.native import executor as native
from freetokend.native.executor import Executor, Numerics
from tests.native.exec_support import (
    Bank,
    Bf16,
    Floats,
    experts_reference,
    from_bf16,
    linear,
    make_bank,
    pack,
    relative_error,
    run_experts,
    to_bf16,
)

ISAS = native.available_isas()


@pytest.fixture(params=ISAS, scope="module")
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with Executor([0, 1], isa=request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def auto_executor() -> Iterator[Executor]:
    with Executor([0, 1]) as opened:
        yield opened


def activations(rng: np.random.Generator, tokens: int, features: int) -> Bf16:
    return to_bf16(rng.normal(size=(tokens, features)))


def routing(
    rng: np.random.Generator, tokens: int, top_k: int, experts_count: int
) -> tuple[np.ndarray, Floats]:
    ids = np.stack([rng.permutation(experts_count)[:top_k] for _ in range(tokens)])
    weights = rng.uniform(0.05, 1, size=(tokens, top_k)).astype(np.float32)
    return ids.astype(np.int32), weights


@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"),
    [(1, 2048, 768), (1, 576, 1536), (9, 576, 1536), (70, 37, 50), (3, 1, 1), (5, 16, 17)],
)
def test_linear_is_close_to_float64(
    executor: Executor, tokens: int, in_features: int, out_features: int
) -> None:
    rng = np.random.default_rng(tokens)
    x = activations(rng, tokens, in_features)
    w = activations(rng, out_features, in_features)
    bias = rng.normal(size=out_features).astype(np.float32)
    expected = from_bf16(x) @ from_bf16(w).T
    assert relative_error(linear(executor, x, w), expected) < 1e-6
    assert relative_error(linear(executor, x, w, bias), expected + bias) < 1e-6


@given(
    tokens=st.integers(1, 20),
    in_features=st.integers(1, 90),
    out_features=st.integers(1, 90),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_linear_of_any_shape(
    auto_executor: Executor, tokens: int, in_features: int, out_features: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = activations(rng, tokens, in_features)
    w = activations(rng, out_features, in_features)
    y = linear(auto_executor, x, w)
    expected = from_bf16(x) @ from_bf16(w).T
    # Against the size of the terms: with one column a sum may cancel to nothing.
    size = np.abs(from_bf16(x)) @ np.abs(from_bf16(w)).T
    assert np.all(np.abs(y - expected) <= 1e-5 * size)


def test_linear_does_not_depend_on_the_number_of_tokens(executor: Executor) -> None:
    rng = np.random.default_rng(3)
    x = activations(rng, 64, 576)
    w = activations(rng, 208, 576)
    whole = linear(executor, x, w)
    for count in [*range(1, 14), 25, 63]:
        assert np.array_equal(linear(executor, x[:count], w), whole[:count]), count
    assert np.array_equal(linear(executor, x[40:41], w), whole[40:41])


@pytest.mark.parametrize("isa", ISAS)
def test_linear_does_not_depend_on_the_number_of_threads(isa: str) -> None:
    rng = np.random.default_rng(4)
    x = activations(rng, 5, 576)
    w = activations(rng, 640, 576)
    with Executor([0], isa=isa) as one, Executor([0, 1], isa=isa) as two:
        assert np.array_equal(linear(one, x, w), linear(two, x, w))


def single_precision_isas() -> list[str]:
    """Those whose products are fp32 FMAs; vdpbf16ps has roundings of its own."""
    return [isa for isa in ISAS if isa not in {"avx512_bf16", "amx"}]


def test_instruction_sets_agree_bit_for_bit() -> None:
    rng = np.random.default_rng(5)
    # Magnitudes over the whole range, so that rounding differences could not hide.
    x = to_bf16(rng.normal(size=(9, 300)) * 10.0 ** rng.integers(-30, 8, size=(9, 300)))
    w = to_bf16(rng.normal(size=(70, 300)) * 10.0 ** rng.integers(-12, 8, size=(70, 300)))
    bank = make_bank(rng, 4, 96, 40)
    tokens = activations(rng, 6, 96)
    ids, weights = routing(rng, 6, 2, 4)
    products, experts = [], []
    for isa in single_precision_isas():
        with Executor([0, 1], isa=isa) as executor:
            products.append(linear(executor, x, w))
            experts.append(run_experts(executor, bank, tokens, ids, weights))
    for product, expert in zip(products, experts, strict=True):
        assert np.array_equal(product, products[0])
        assert np.array_equal(expert, experts[0])


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden_size", "intermediate_size", "experts_count"),
    [(1, 8, 2048, 768, 12), (4, 2, 576, 1536, 8), (70, 2, 37, 50, 3), (1, 1, 16, 16, 1)],
)
def test_experts_are_close_to_float64(
    executor: Executor,
    tokens: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    experts_count: int,
) -> None:
    rng = np.random.default_rng(tokens)
    bank = make_bank(rng, experts_count, hidden_size, intermediate_size)
    x = activations(rng, tokens, hidden_size)
    ids, weights = routing(rng, tokens, top_k, experts_count)
    y = run_experts(executor, bank, x, ids, weights)
    # A sum next to a rounding boundary of bf16 may land on its other side: 2^-9 of one element.
    assert relative_error(y, experts_reference(bank, x, ids, weights)) < 3e-4


@pytest.fixture(scope="module")
def bank() -> Bank:
    return make_bank(np.random.default_rng(6), 8, 144, 112)


def test_experts_do_not_depend_on_the_batch(executor: Executor, bank: Bank) -> None:
    rng = np.random.default_rng(7)
    x = activations(rng, 64, bank.hidden_size)
    ids, weights = routing(rng, 64, 2, bank.experts_count)
    whole = run_experts(executor, bank, x, ids, weights)
    for token in range(64):
        one = slice(token, token + 1)
        alone = run_experts(executor, bank, x[one], ids[one], weights[one])
        assert np.array_equal(alone, whole[one])
    for count in (2, 3, 17):
        part = run_experts(executor, bank, x[:count], ids[:count], weights[:count])
        assert np.array_equal(part, whole[:count])


def test_tokens_that_all_go_to_one_expert(executor: Executor, bank: Bank) -> None:
    rng = np.random.default_rng(8)
    x = activations(rng, 70, bank.hidden_size)
    ids = np.full((70, 1), 5, np.int32)
    weights = np.ones((70, 1), np.float32)
    y = run_experts(executor, bank, x, ids, weights)
    assert relative_error(y, experts_reference(bank, x, ids, weights)) < 3e-4
    alone = run_experts(executor, bank, x[69:], ids[69:], weights[69:])
    assert np.array_equal(alone, y[69:])


def test_minus_one_skips_an_expert(executor: Executor, bank: Bank) -> None:
    rng = np.random.default_rng(9)
    x = activations(rng, 5, bank.hidden_size)
    ids, weights = routing(rng, 5, 3, bank.experts_count)
    whole = run_experts(executor, bank, x, ids, weights)
    holes = ids.copy()
    holes[0, 1] = holes[3, 0] = holes[4] = -1
    y = run_experts(executor, bank, x, holes, weights)
    assert np.array_equal(y[holes >= 0], whole[holes >= 0])
    assert not y[holes < 0].any()
    assert not run_experts(executor, bank, x, np.full_like(ids, -1), weights).any()


@given(
    data=st.data(),
    tokens=st.integers(1, 12),
    hidden_size=st.integers(1, 60),
    intermediate_size=st.integers(1, 60),
    experts_count=st.integers(1, 6),
)
@settings(max_examples=40, deadline=None)
def test_experts_of_any_shape(
    auto_executor: Executor,
    data: st.DataObject,
    tokens: int,
    hidden_size: int,
    intermediate_size: int,
    experts_count: int,
) -> None:
    top_k = data.draw(st.integers(1, experts_count))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    bank = make_bank(rng, experts_count, hidden_size, intermediate_size)
    x = activations(rng, tokens, hidden_size)
    ids, weights = routing(rng, tokens, top_k, experts_count)
    ids[rng.uniform(size=ids.shape) < 0.2] = -1
    y = run_experts(auto_executor, bank, x, ids, weights)
    expected = experts_reference(bank, x, ids, weights)
    # One element beyond its rounding boundary can be the whole norm here.
    assert np.linalg.norm(y - expected) <= 2.0**-7 * np.linalg.norm(expected)
    assert not y[ids < 0].any()


def test_unknown_numerics_are_refused_before_anything_is_read(auto_executor: Executor) -> None:
    unknown = cast(Numerics, "foo")
    refusal = 'numerics "foo" are unknown: pass "exact" or "fast"'
    with pytest.raises(InternalError, match=refusal):
        auto_executor.linear(0, 0, 0, tokens=1, in_features=16, out_features=16, numerics=unknown)
    with pytest.raises(InternalError, match=refusal):
        auto_executor.experts(
            *(0, 0, 0, 0),
            tokens=1,
            top_k=1,
            hidden_size=16,
            intermediate_size=16,
            bank=0,
            record_bytes=4096,
            experts_count=1,
            numerics=unknown,
        )


def test_an_expert_at_a_64_bit_offset(auto_executor: Executor) -> None:
    """The last record of a bank larger than 2^32 bytes, in memory of which little is touched."""
    rng = np.random.default_rng(10)
    small = make_bank(rng, 1, 32, 16)
    record_bytes = 1 << 30
    memory = np.zeros(5 * record_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    records = memory[start : start + 5 * record_bytes]
    records[4 * record_bytes :][: len(small.records)] = small.records
    x = activations(rng, 1, 32)
    weights = np.ones((1, 1), np.float32)
    many = Bank(
        gate=np.repeat(small.gate, 5, axis=0),
        up=small.up,
        down=small.down,
        records=records,
        record_bytes=record_bytes,
    )
    far = run_experts(auto_executor, many, x, np.full((1, 1), 4, np.int32), weights)
    near = run_experts(auto_executor, small, x, np.zeros((1, 1), np.int32), weights)
    assert near.any()
    assert np.array_equal(far, near)


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_packed_weights_are_where_the_layout_says(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.integers(1, 2**16, size=(rows, columns), dtype=np.uint16)
    packed = pack(matrix)
    words = packed.view(np.uint16).reshape(-(-rows // 16), -(-columns // 2), 16, 2)
    full = words.transpose(0, 2, 1, 3).reshape(words.shape[0] * 16, words.shape[1] * 2)
    assert np.array_equal(full[:rows, :columns], matrix)
    assert np.count_nonzero(full) == matrix.size
    back = np.zeros_like(matrix)
    native.unpack_rows16(packed.ctypes.data, rows, columns, back.ctypes.data)
    assert np.array_equal(back, matrix)
