"""Row-wise operations of the CPU executor: norm, merge, embedding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from freetokend.native import executor as native
from freetokend.native.executor import Executor
from tests.native.exec_support import from_bf16, pack, relative_error, to_bf16

ISAS = native.available_isas()


@pytest.fixture(params=ISAS, scope="module")
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with Executor([0, 1], isa=request.param) as opened:
        yield opened


def norm(executor: Executor, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = np.ascontiguousarray(x)
    y = np.zeros(x.shape, np.uint16)
    executor.rms_norm(
        x.ctypes.data, weight.ctypes.data, y.ctypes.data, rows=len(x), size=x.shape[1], eps=eps
    )
    return y


@pytest.mark.parametrize("size", [1, 15, 128, 576, 2049])
def test_rms_norm(executor: Executor, size: int) -> None:
    rng = np.random.default_rng(size)
    x = (rng.normal(size=(70, size)) * 3).astype(np.float32)
    weight = rng.normal(size=size).astype(np.float32)
    y = norm(executor, x, weight, 1e-5)
    wide = x.astype(np.float64)
    mean = (wide**2).mean(axis=1, keepdims=True)
    expected = wide / np.sqrt(mean + 1e-5) * weight
    # Right up to bf16 rounding: half a unit in the last of 8 bits, and a hair for the fp32 sum.
    assert np.all(np.abs(from_bf16(y) - expected) <= np.abs(expected) * 2.0**-8 * 1.001)
    assert np.array_equal(norm(executor, x[11:12], weight, 1e-5), y[11:12])


def test_rms_norm_agrees_between_instruction_sets() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 576)).astype(np.float32)
    weight = rng.normal(size=576).astype(np.float32)
    results = []
    for isa in ISAS:
        with Executor([0], isa=isa) as executor:
            results.append(norm(executor, x, weight, 1e-6))
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("tokens", "top_k", "size"), [(1, 1, 5), (70, 8, 300), (3, 2, 64)])
def test_merge_adds_in_routed_order(executor: Executor, tokens: int, top_k: int, size: int) -> None:
    y = np.random.default_rng(2).normal(size=(tokens, top_k, size)).astype(np.float32)
    out = np.zeros((tokens, size), np.float32)
    executor.merge(y.ctypes.data, out.ctypes.data, tokens=tokens, top_k=top_k, hidden_size=size)
    expected = y[:, 0].copy()
    for slot in range(1, top_k):
        expected += y[:, slot]
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(("vocab_size", "features"), [(50, 37), (1000, 576)])
def test_embedding_copies_rows(executor: Executor, vocab_size: int, features: int) -> None:
    rng = np.random.default_rng(3)
    matrix = to_bf16(rng.normal(size=(vocab_size, features)))
    packed = pack(matrix)
    ids = np.array([0, vocab_size - 1, 17, 17, 15, 16], np.int64)
    out = np.zeros((len(ids), features), np.float32)
    executor.embed_rows16(
        packed.ctypes.data,
        ids.ctypes.data,
        out.ctypes.data,
        tokens=len(ids),
        features=features,
        vocab_size=vocab_size,
    )
    assert np.array_equal(out, from_bf16(matrix[ids]))
    assert relative_error(out, from_bf16(matrix[ids])) == 0


def test_stream_read_sees_every_word(executor: Executor) -> None:
    memory = np.zeros(3 * (1 << 20) // 8 + 64, np.uint64)
    start = -memory.ctypes.data % 64 // 8
    data = memory[start : start + 2 * (1 << 20) // 8 + 512]
    assert executor.stream_read(data.ctypes.data, data.nbytes) == 0
    for index in (0, len(data) // 2, len(data) - 1):
        data[index] = 12345
        assert executor.stream_read(data.ctypes.data, data.nbytes) == 12345
        data[index] = 0
