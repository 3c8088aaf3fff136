"""Paged attention: both stores against float64, page boundaries, shared steps, bad page tables."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator

import pytest
import torch

from freetokend.core.errors import InternalError, ResourceError
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.batch import KvStore, SequenceSpan, kv_batch
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.kvcache.torch_store import TorchKvStore
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvShape

SHAPE = KvShape(layers_count=2, kv_heads_count=2, head_size=24, element_bytes=2, page_tokens=16)
Q_HEADS = 6
SCALE = 0.2
PAGES_COUNT = 40


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:2]) as executor:
        yield executor


def drawn(tokens: int, heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, SHAPE.head_size, generator=generator)


class Feeder:
    """Random q, k, v of several sequences, fed in spans; remembers k and v for the oracle."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pages: dict[int, array[int]] = {}

    def feed(self, counts: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One step; (what the store gives, float64 attention over bf16 keys and values)."""
        spans, qs, ks, vs, wanted = [], [], [], [], []
        for sequence, count in counts.items():
            start = self.kept[sequence][0].shape[0] if sequence in self.kept else 0
            # every fourth page belongs to a sequence, so that pages lie apart
            pages = array("i", range(sequence, PAGES_COUNT, 4))
            spans.append(SequenceSpan(pages=pages, first_position=start, tokens_count=count))
            seed = 1000 * sequence + start
            q = drawn(count, Q_HEADS, seed)
            k, v = drawn(count, SHAPE.kv_heads_count, seed + 1), drawn(count, 2, seed + 2)
            qs.append(q)
            ks.append(k)
            vs.append(v)
            if sequence in self.kept:
                k = torch.cat((self.kept[sequence][0], k))
                v = torch.cat((self.kept[sequence][1], v))
            self.kept[sequence] = (k, v)
            wanted.append(exact_attention(q, k, v))
        view = self._store.view(kv_batch(spans, SHAPE.page_tokens))
        out = view.attend(1, torch.cat(qs), torch.cat(ks), torch.cat(vs), SCALE)
        return out, torch.cat(wanted)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last len(q) positions of a sequence, in float64 over bf16 keys and values."""
    k, v = k.bfloat16().double(), v.bfloat16().double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q.double(), k) * SCALE
    first = k.shape[0] - q.shape[0]
    seen = torch.arange(k.shape[0])[None, :] <= first + torch.arange(q.shape[0])[:, None]
    weights = scores.masked_fill(~seen[None], float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The worst row's ||a - b|| / ||b||."""
    return float(((got.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def stores(executor: Executor) -> dict[str, tuple[KvStore, float]]:
    """Name -> store and the relative error its arithmetic allows."""
    return {
        "native": (NativeKvStore(executor, KvArena(SHAPE, PAGES_COUNT)), 4e-3),
        "torch-bf16": (
            TorchKvStore(
                SHAPE,
                PAGES_COUNT,
                kv_dtype=torch.bfloat16,
                activation_dtype=torch.bfloat16,
            ),
            4e-3,
        ),
        "torch-fp64": (
            TorchKvStore(
                SHAPE,
                PAGES_COUNT,
                kv_dtype=torch.bfloat16,
                activation_dtype=torch.float64,
                accumulator_dtype=torch.float64,
            ),
            1e-12,
        ),
    }


@pytest.mark.parametrize("name", ["native", "torch-bf16", "torch-fp64"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
def test_prefill_then_decode_over_page_boundaries(
    executor: Executor, name: str, length: int
) -> None:
    store, allowed = stores(executor)[name]
    feeder = Feeder(store)
    for counts in ({0: length}, {0: 1}, {0: 1}, {0: 3}):
        got, wanted = feeder.feed(counts)
        assert relative_error(got, wanted) < allowed


@pytest.mark.parametrize("name", ["native", "torch-bf16"])
def test_a_shared_step_gives_each_sequence_what_it_gets_alone(
    executor: Executor, name: str
) -> None:
    plans: list[dict[int, int]] = [{0: 20, 1: 3}, {0: 1, 1: 30, 2: 17}, {2: 1, 0: 1, 1: 1, 3: 50}]
    shared = Feeder(stores(executor)[name][0])
    alone = {sequence: Feeder(stores(executor)[name][0]) for sequence in range(4)}
    for counts in plans:
        got, _ = shared.feed(counts)
        parts = torch.split(got, list(counts.values()))
        for (sequence, count), part in zip(counts.items(), parts, strict=True):
            single, _ = alone[sequence].feed({sequence: count})
            assert torch.equal(part, single)


def test_chunked_and_whole_prefill_are_the_same_bits(executor: Executor) -> None:
    whole = Feeder(stores(executor)["native"][0])
    whole.feed({0: 60})
    chunked_store = stores(executor)["native"][0]
    chunked = Feeder(chunked_store)
    for count in (7, 16, 1, 20, 16):
        # the same keys and values as the whole prompt has at these positions
        start = chunked.kept[0][0].shape[0] if chunked.kept else 0
        view = chunked_store.view(
            kv_batch(
                [
                    SequenceSpan(
                        pages=array("i", range(0, PAGES_COUNT, 4)),
                        first_position=start,
                        tokens_count=count,
                    )
                ],
                SHAPE.page_tokens,
            )
        )
        k, v = whole.kept[0][0][start : start + count], whole.kept[0][1][start : start + count]
        q = drawn(60, Q_HEADS, 0)[start : start + count].contiguous()
        part = view.attend(1, q, k.contiguous(), v.contiguous(), SCALE)
        chunked.kept[0] = (whole.kept[0][0][: start + count], whole.kept[0][1][: start + count])
        expected = exact_attention(
            q, whole.kept[0][0][: start + count], whole.kept[0][1][: start + count]
        )
        assert relative_error(part, expected) < 4e-3
    last_whole, _ = whole.feed({0: 1})
    last_chunked, _ = chunked.feed({0: 1})
    assert torch.equal(last_whole, last_chunked)


def test_a_span_beyond_its_pages_is_refused_before_anything_is_written() -> None:
    span = SequenceSpan(pages=array("i", [3]), first_position=10, tokens_count=7)
    with pytest.raises(InternalError, match="ends at position 17, its 1 pages hold 16"):
        kv_batch([span], 16)


def test_a_page_number_outside_the_arena_is_refused(executor: Executor) -> None:
    store = NativeKvStore(executor, KvArena(SHAPE, 2))
    span = SequenceSpan(pages=array("i", [2]), first_position=0, tokens_count=1)
    view = store.view(kv_batch([span], 16))
    with pytest.raises(InternalError):
        view.attend(0, drawn(1, Q_HEADS, 0), drawn(1, 2, 1), drawn(1, 2, 2), SCALE)


def test_the_batch_as_tensors() -> None:
    batch = kv_batch(
        [
            SequenceSpan(pages=array("i", [5, 2]), first_position=15, tokens_count=3),
            SequenceSpan(pages=array("i", [7]), first_position=0, tokens_count=1),
        ],
        16,
    )
    assert batch.page_table.tolist() == [[5, 2], [7, 0]]
    assert batch.sequence_index.tolist() == [0, 0, 0, 1]
    assert batch.positions.tolist() == [15, 16, 17, 0]
    assert {one.dtype for one in (batch.page_table, batch.sequence_index, batch.positions)} == {
        torch.int32
    }


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_is_committed_as_it_is_written() -> None:
    shape = KvShape(
        layers_count=8, kv_heads_count=8, head_size=128, element_bytes=2, page_tokens=32
    )
    before = resident_bytes()
    arena = KvArena(shape, 20_000)
    assert arena.length_bytes == 20_000 * shape.page_bytes > 19 << 30
    arena.layers[7].values[19_999].fill_(1.0)
    arena.layers[0].keys[0].fill_(1.0)
    assert float(arena.layers[7].values[19_999].float().sum()) == 8 * 32 * 128
    assert resident_bytes() - before < 64 << 20


def test_an_impossible_reservation_is_a_clear_error() -> None:
    shape = KvShape(
        layers_count=100, kv_heads_count=64, head_size=256, element_bytes=2, page_tokens=32
    )
    with pytest.raises(ResourceError, match="address space for keys and values"):
        KvArena(shape, 1 << 24)
