"""Paged attention in Triton beside float64; run with TRITON_INTERPRET=1, says how far off it is.

    python -m tests.kvcache.gpu.interpreted SEED

The interpreter replaces kernels when their module is imported: hence a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.batch import KvBatch
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.kvcache.gpu.triton_store import TritonKvStore
from tests.kvcache.gpu.contexts import CONTEXT, LAYER, SCALE, Contexts, Heads, units_off


def patch_once() -> None:
    """Calls among our functions without patching Triton's language again, which is most of what
    the interpreter does: their kernel has done it."""
    patching = InterpretedFunction.__call__

    def call(self: object, *args: object, **kwargs: object) -> object:
        if self.fn.__module__.startswith("freetokend."):  # type: ignore[attr-defined]
            return self.rewrite()(*args, **kwargs)  # type: ignore[attr-defined]
        return patching(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def multiply_in_order() -> None:
    """Products whose rows do not depend on one another: one column after the other, as hardware
    adds them. A library's choose their order by the place of a row."""

    def create_dot(
        self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object
    ) -> TensorHandle:
        total = d.data.copy()
        for column in range(a.data.shape[1]):
            total += a.data[:, column, None] * b.data[column]
        return TensorHandle(total, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def short_parts(contexts: Contexts, page_tokens: int, *, part_tokens: int = 32) -> TritonKvStore:
    """With parts so short that a context has several; what no sequence wrote is no number."""
    pages = contexts.pages(page_tokens, torch.device("cpu"))
    for layer in pages.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    store = TritonKvStore(pages, context_tokens=CONTEXT, interpreted=True)
    object.__setattr__(store, "part_tokens", part_tokens)
    return store


CASES = (
    # heads, page_tokens, length
    (Heads(queries=6, keys=2, size=24), 16, 83),
    (Heads(queries=4, keys=4, size=16), 4, 33),
    (Heads(queries=5, keys=1, size=64), 32, 65),
    (Heads(queries=17, keys=1, size=20), 16, 40),
    (Heads(queries=4, keys=2, size=160), 32, 37),
)


def errors(seed: int) -> Iterator[dict[str, float | str]]:
    """A prompt, then single tokens, over boundaries of blocks, pages and parts."""
    for heads, page_tokens, length in CASES:
        contexts = Contexts(heads, [length], seed)
        store = short_parts(contexts, page_tokens)
        worst = {}
        for name, first, end in (
            ("prompt", 0, length - 3),
            ("token", length - 3, length - 2),
            ("tokens", length - 2, length),
        ):
            got = contexts.feed(store, [(0, first, end)])
            worst[name] = units_off(got, contexts.exact(0, first, end))
        yield {"case": f"{heads} {page_tokens}", **worst}


def chunks_and_company_change_no_bit(seed: int) -> None:
    """A sequence alone and whole, in chunks of all lengths, and among others in the same steps."""
    for heads, page_tokens in ((CASES[0][0], 16), (CASES[1][0], 4)):
        contexts = Contexts(heads, [70, 41, 20], seed)
        whole = contexts.feed(short_parts(contexts, page_tokens), [(0, 0, 70)])
        store = short_parts(contexts, page_tokens)
        first, parts = 0, []
        for count in (1, 7, 16, 1, 1, 31, 13):
            parts.append(contexts.feed(store, [(0, first, first + count)]))
            first += count
        assert torch.equal(torch.cat(parts), whole)
        store, parts = short_parts(contexts, page_tokens), []
        for spans in (
            [(0, 0, 30), (1, 0, 1), (2, 0, 11)],
            [(1, 1, 38), (0, 30, 31), (2, 11, 12)],
            [(0, 31, 32), (1, 38, 39)],
            [(2, 12, 20), (1, 39, 41), (0, 32, 70)],
        ):
            got = contexts.feed(store, spans)
            at = 0
            for sequence, start, end in spans:
                if sequence == 0:
                    parts.append(got[at : at + end - start])
                at += end - start
        assert torch.equal(torch.cat(parts), whole)


def padding_is_only_computed(seed: int) -> None:
    """Rows on a page that no sequence has change nothing and are numbers."""
    contexts = Contexts(CASES[0][0], [20, 9, 1], seed)
    store = short_parts(contexts, 16)
    contexts.feed(store, [(0, 0, 19), (1, 0, 8)])
    got = contexts.feed(store, [(0, 19, 20), (1, 8, 9), (2, 0, 1), (2, 0, 1)])
    again = short_parts(contexts, 16)
    contexts.feed(again, [(0, 0, 19)])
    assert torch.equal(contexts.feed(again, [(0, 19, 20)])[0], got[0])
    assert bool(torch.isfinite(got).all())


def pages_beyond_32_bits(seed: int) -> None:
    """A page whose place is 2^31 numbers and more behind the first."""
    heads = Heads(queries=2, keys=2, size=64)
    contexts = Contexts(heads, [18], seed)
    shape = heads.shape(16)
    far = (1 << 31) // (shape.kv_heads_count * shape.page_tokens * shape.head_size) + 5
    arena = KvArena(shape, far + 1)  # its memory is taken as it is written
    pages = DevicePages(shape=shape, pages_count=far + 1, layers=arena.layers)
    store = TritonKvStore(pages, context_tokens=CONTEXT, interpreted=True)
    for first, end in ((0, 17), (17, 18)):
        batch = KvBatch(
            page_table=torch.tensor([[far, far - 1]], dtype=torch.int32),
            sequence_index=torch.zeros(end - first, dtype=torch.int32),
            positions=torch.arange(first, end, dtype=torch.int32),
        )
        q, k, v = (one[0][first:end] for one in (contexts.q, contexts.k, contexts.v))
        got = store.view(batch).attend(LAYER, q, k, v, SCALE)
        assert units_off(got, contexts.exact(0, first, end)) < 0.51


def main(seed: int) -> None:
    patch_once()
    multiply_in_order()
    np.seterr(invalid="ignore")  # of queries that are not there
    chunks_and_company_change_no_bit(seed)
    padding_is_only_computed(seed)
    pages_beyond_32_bits(seed)
    print(json.dumps(list(errors(seed))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
