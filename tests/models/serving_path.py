"""The path that serves: FTW conversion, weights in place, native executor, paged bf16 KV."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from freetokend.core.model_config import model_facts
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.convert import convert
from freetokend.ftw.reader import FtwDirectory
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.batch import SequenceSpan, kv_batch
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.protocols import KvView
from tests.models.checkpoints import Checkpoint
from tests.models.comparison import RouterProbe, Runner

_PAGE_TOKENS = 16
_SEQUENCES_COUNT = 64
_PAGES_PER_SEQUENCE = 16


@contextmanager
def serving_runner(
    checkpoint: Checkpoint, *, cpus: Sequence[int] = (0,), isa: str = "auto"
) -> Iterator[Runner]:
    """Our model as the engine builds it, over a converted copy of the checkpoint."""
    ftw = checkpoint.directory.with_name(checkpoint.directory.name + "-ftw")
    if not ftw.exists():
        convert(checkpoint.directory, ftw, progress=lambda _: None)
    directory = FtwDirectory(ftw)
    index = directory.index
    with _mapped(directory) as address:
        executor = Executor(cpus, isa=isa)
        try:
            probe = RouterProbe()
            model = NativeProgram(
                build_program(directory.model_config()),
                PoolWeights(address, index),
                executor,
                bank_experts(index.expert_bank, address),
                observer=probe,
            )
            shape = _kv_shape(checkpoint)
            yield Runner(
                model=model, new_cache=lambda: _PagedCache(executor, shape).view, probe=probe
            )
        finally:
            executor.close()


@contextmanager
def _mapped(directory: FtwDirectory) -> Iterator[int]:
    """The region in page-aligned memory, byte for byte."""
    length_bytes = directory.index.region_bytes
    mapping = mmap.mmap(-1, length_bytes)
    mapping[:] = directory.read_region(0, length_bytes).tobytes()
    view = np.frombuffer(mapping, dtype=np.uint8)
    yield view.ctypes.data


def _kv_shape(checkpoint: Checkpoint) -> KvShape:
    facts = model_facts(checkpoint.config)
    return KvShape(
        layers_count=facts.layers_count,
        kv_heads_count=facts.kv_heads_count,
        head_size=facts.head_size,
        element_bytes=2,
        page_tokens=_PAGE_TOKENS,
    )


class _PagedCache:
    """Pages of several sequences, scattered: sequence s has pages s, s + 64, s + 128, ..."""

    def __init__(self, executor: Executor, shape: KvShape) -> None:
        self._store = NativeKvStore(
            executor, KvArena(shape, _SEQUENCES_COUNT * _PAGES_PER_SEQUENCE)
        )
        self._lengths = [0] * _SEQUENCES_COUNT

    def view(self, sequences: Sequence[int]) -> KvView:
        spans = []
        for sequence in dict.fromkeys(sequences):
            count = sum(one == sequence for one in sequences)
            pages_count = _SEQUENCES_COUNT * _PAGES_PER_SEQUENCE
            pages = array("i", range(sequence, pages_count, _SEQUENCES_COUNT))
            first = self._lengths[sequence]
            spans.append(SequenceSpan(pages=pages, first_position=first, tokens_count=count))
            self._lengths[sequence] += count
        return self._store.view(kv_batch(spans, _PAGE_TOKENS))
