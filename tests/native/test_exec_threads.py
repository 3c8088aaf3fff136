"""Threads of the executor: contention, one caller at a time, and what it refuses."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from freetokend.core.errors import ConfigError, InternalError, ResourceError
from freetokend.native import executor as native
from freetokend.native.executor import Executor
from tests.native.exec_support import Bank, make_bank, run_experts, to_bf16


@pytest.fixture(scope="module")
def bank() -> Bank:
    return make_bank(np.random.default_rng(0), 8, 256, 192)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor([0, 1]) as opened:
        yield opened


def test_more_workers_than_cores_agree_and_finish(bank: Bank) -> None:
    """Eight workers on the cpus of this machine, spinning hogs beside them."""
    rng = np.random.default_rng(1)
    x = to_bf16(rng.normal(size=(4, bank.hidden_size)))
    ids = np.stack([rng.permutation(8)[:4] for _ in range(4)]).astype(np.int32)
    weights = np.ones((4, 4), np.float32)
    cpus = sorted(os.sched_getaffinity(0))
    crowd = list(itertools.islice(itertools.cycle(cpus), 8))
    with Executor(crowd[:1]) as alone:
        expected = run_experts(alone, bank, x, ids, weights)
    with Executor(crowd) as many, Executor(crowd, spin_s=0.01) as hogs:
        stop = threading.Event()

        def burn() -> None:
            while not stop.is_set():
                run_experts(hogs, bank, x, ids, weights)

        neighbour = threading.Thread(target=burn)
        neighbour.start()
        try:
            for _ in range(100):
                assert np.array_equal(run_experts(many, bank, x, ids, weights), expected)
        finally:
            stop.set()
            neighbour.join()


@pytest.mark.parametrize("spin_s", [0.0, 50e-6])
def test_workers_wake_from_sleep(bank: Bank, spin_s: float) -> None:
    """With no spinning every job has to wake sleepers; a lost wake-up would hang here."""
    rng = np.random.default_rng(2)
    x = to_bf16(rng.normal(size=(1, bank.hidden_size)))
    ids = np.array([[1, 6]], np.int32)
    weights = np.ones((1, 2), np.float32)
    with Executor([0, 1, 0, 1], spin_s=spin_s) as executor:
        first = run_experts(executor, bank, x, ids, weights)
        for _ in range(300):
            assert np.array_equal(run_experts(executor, bank, x, ids, weights), first)


def test_idle_workers_use_no_cpu_time() -> None:
    with Executor([0, 1], spin_s=50e-6):
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # asleep once a stretch of wall time costs nothing
            start, used = time.monotonic(), time.process_time()
            threading.Event().wait(0.05)
            if time.process_time() - used < 0.1 * (time.monotonic() - start):
                return
    pytest.fail("the idle worker keeps using its cpu")


def test_the_callers_affinity_is_left_alone(executor: Executor, bank: Bank) -> None:
    before = os.sched_getaffinity(0)
    x = to_bf16(np.ones((1, bank.hidden_size)))
    for _ in range(20):
        run_experts(executor, bank, x, np.array([[0]], np.int32), np.ones((1, 1), np.float32))
    assert os.sched_getaffinity(0) == before


def test_calls_release_the_gil_and_a_second_caller_is_refused(executor: Executor) -> None:
    """While one thread reads 2 GiB, this one runs Python and gets a clear error."""
    memory = np.zeros(64 * (1 << 20) // 8 + 8, np.uint64)
    address = memory.ctypes.data + -memory.ctypes.data % 64
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            try:
                executor.stream_read(address, 64 << 20)
            except InternalError:
                continue  # this thread was the second caller

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        refused = ""
        while not refused and time.monotonic() < deadline:
            try:
                executor.stream_read(address, 64)
            except InternalError as error:
                refused = str(error)
    finally:
        stop.set()
        thread.join()
    assert "another thread" in refused
    assert executor.stream_read(address, 64) == 0


def test_a_closed_executor_refuses() -> None:
    executor = Executor([0, 1])
    executor.close()
    executor.close()
    with pytest.raises(InternalError, match="closed"):
        executor.stream_read(64, 64)


def test_instruction_sets_by_name() -> None:
    assert native.available_isas()[-1] == "portable"
    with Executor([0]) as executor:
        assert executor.isa == native.available_isas()[0]
        assert executor.threads_count == 1
    with pytest.raises(ConfigError, match=r"unknown instruction set 'sse9'.*portable"):
        Executor([0], isa="sse9")
    for isa in {"avx2", "avx512", "avx512_bf16"} - set(native.available_isas()):
        with pytest.raises(ResourceError, match=f"'{isa}' is not supported by this processor"):
            Executor([0], isa=isa)


@pytest.mark.parametrize("cpus", [[], [-1], [100000], [0] * 2000])
def test_impossible_cpus(cpus: list[int]) -> None:
    with pytest.raises(ConfigError, match="cpu"):
        Executor(cpus)


def test_impossible_spin() -> None:
    with pytest.raises(ConfigError, match="spin_s"):
        Executor([0], spin_s=-1)


def linear_arguments(x: np.ndarray) -> dict[str, Any]:
    return {
        "x": x.ctypes.data,
        "w": x.ctypes.data + -x.ctypes.data % 64,
        "y": x.ctypes.data,
        "tokens": 1,
        "in_features": 4,
        "out_features": 4,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 0}, "in_features is 0"),
        ({"out_features": 2**40}, "out_features is"),
        ({"tokens": 2**40}, "too many tokens"),
        ({"tokens": -1}, "incompatible"),
        ({"w": 0}, "64-byte boundary"),
        ({"w": 96}, "64-byte boundary"),
        ({"x": 0}, "null address"),
        ({"y": 0}, "null address"),
    ],
)
def test_linear_refuses(executor: Executor, change: dict[str, int], message: str) -> None:
    arguments = linear_arguments(np.zeros(4096, np.uint8)) | change
    with pytest.raises(InternalError, match=message):
        executor.linear(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 3}, "larger than experts_count"),
        ({"experts_count": 0}, "experts_count is 0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"record_bytes": 1024}, "size of one expert"),
        ({"record_bytes": 4096 + 32}, "multiple of 64"),
        ({"bank": 32}, "64-byte boundary"),
        ({"expert_ids": 0}, "null address"),
        ({"activation": "relu"}, "relu"),
    ],
)
def test_experts_refuse(executor: Executor, change: dict[str, Any], message: str) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    address = memory.ctypes.data + -memory.ctypes.data % 64
    arguments: dict[str, Any] = {
        "x": address,
        "expert_ids": address,
        "weights": address,
        "y": address,
        "tokens": 1,
        "top_k": 2,
        "hidden_size": 32,
        "intermediate_size": 16,
        "bank": address,
        "record_bytes": 4096,
        "experts_count": 2,
    }
    with pytest.raises(InternalError, match=message):
        executor.experts(**arguments | change)


@pytest.mark.parametrize("expert", [-2, 8, 2**31 - 1, -(2**31)])
def test_an_expert_id_out_of_range(executor: Executor, bank: Bank, expert: int) -> None:
    x = to_bf16(np.ones((1, bank.hidden_size)))
    with pytest.raises(InternalError, match=f"expert id {expert} is out of range"):
        run_experts(
            executor, bank, x, np.array([[0, expert]], np.int32), np.ones((1, 2), np.float32)
        )


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_id_out_of_range(executor: Executor, token: int) -> None:
    memory = np.zeros(8192, np.uint8)
    address = memory.ctypes.data + -memory.ctypes.data % 64
    ids = np.array([token], np.int64)
    with pytest.raises(InternalError, match=f"token id {token} is out of range"):
        executor.embed_rows16(
            address, ids.ctypes.data, address, tokens=1, features=8, vocab_size=50
        )


def paged_call(executor: Executor, name: str, change: dict[str, int]) -> Callable[[], None]:
    floats = np.zeros(1 << 12, np.float32)
    pages = np.zeros(1 << 12, np.uint16)
    table = np.array([[0, 1], [2, change.pop("page", 3)]], np.int32)
    sequence_index = np.array([change.pop("sequence", 1)], np.int32)
    positions = np.array([change.pop("position", 7)], np.int32)
    shape = {
        "tokens": 1,
        "kv_heads": 2,
        "head_size": 16,
        "page_tokens": 4,
        "max_pages": 2,
        "sequences_count": 2,
        "pages_count": 4,
    } | change
    where = [pages.ctypes.data, pages.ctypes.data, table.ctypes.data]
    where += [sequence_index.ctypes.data, positions.ctypes.data]
    address = floats.ctypes.data
    keep = (floats, pages, table, sequence_index, positions)

    def call() -> None:
        assert keep
        if name == "store_kv":
            executor.store_kv(address, address, *where, **shape)
        else:
            heads = {"q_heads": 4, "scale": 1.0}
            executor.paged_attention(address, *where, address, **shape | heads)

    return call


@pytest.mark.parametrize("name", ["store_kv", "paged_attention"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 8}, r"position 8 is out of range \[0, 8\)"),
        ({"position": -1}, "position -1"),
        ({"sequence": 2}, "sequence index 2"),
        ({"page": 4}, "page number 4"),
        ({"page": -1}, "page number -1"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"page_tokens": 0}, "page_tokens is 0"),
    ],
)
def test_paged_calls_refuse(
    executor: Executor, name: str, change: dict[str, int], message: str
) -> None:
    paged_call(executor, name, {})()
    with pytest.raises(InternalError, match=message):
        paged_call(executor, name, dict(change))()


def test_attention_refuses_heads_that_do_not_divide(executor: Executor) -> None:
    with pytest.raises(InternalError, match="multiple of kv_heads"):
        paged_call(executor, "paged_attention", {"kv_heads": 3, "head_size": 8})()


def test_no_tokens_is_no_work(executor: Executor) -> None:
    """Empty tensors have no address."""
    shape = {"top_k": 2, "hidden_size": 32}
    executor.linear(0, 64, 0, tokens=0, in_features=8, out_features=8)
    executor.experts(
        0,
        0,
        0,
        0,
        tokens=0,
        intermediate_size=16,
        bank=64,
        record_bytes=4096,
        experts_count=2,
        **shape,
    )
    executor.merge(0, 0, tokens=0, **shape)
    executor.rms_norm(0, 64, 0, rows=0, size=8, eps=0.0)
    executor.embed_rows16(64, 0, 0, tokens=0, features=8)
    pages = {"tokens": 0, "kv_heads": 1, "head_size": 8, "page_tokens": 4, "max_pages": 1}
    executor.store_kv(0, 0, 64, 64, 0, 0, 0, **pages)
    executor.paged_attention(0, 64, 64, 0, 0, 0, 0, q_heads=1, scale=1.0, **pages)
