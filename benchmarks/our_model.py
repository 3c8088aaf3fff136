"""Our side of the model benchmark: the engine in this process, without link and HTTP."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.rounds import Burst, waited_s
from benchmarks.synthetic_model import SyntheticModel
from freetokend.core.host_facts import HostMemory
from freetokend.engine.work import SamplingParams, SequenceWork, StepWork
from freetokend.enginehost.attach import attach_pool
from freetokend.enginehost.build import PAGE_TOKENS, build_engine
from freetokend.enginehost.built import BuiltEngine
from freetokend.ftw.contents import INDEX_FILE
from freetokend.ftw.convert import convert
from freetokend.ftw.formats import parse_format
from freetokend.ftw.model import Wanted
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import EngineSettings
from freetokend.native.lifeline import ReceivedPool
from freetokend.native.pool import create_pool_file

PROMPT_TOKENS: Final = 16
GREEDY: Final = SamplingParams(temperature=0.0)
MOST_SEQUENCES: Final = 32
STEP_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OurEngine:
    """page_bytes: of the pages under its pool."""

    built: BuiltEngine
    page_bytes: int


def converted(model: SyntheticModel) -> FtwDirectory:
    """The FTW directory beside the model's GGUF file, with the codes of that file.

    Of the file itself, but where our reader does not know a type of it: then of the checkpoint,
    quantised, which gives the same codes. One that is there is used as it is, so that a checkpoint
    which only it needed can be deleted.
    """
    source = model.gguf_path.parent
    target = source.with_suffix(".ftw")
    if (target / INDEX_FILE).exists():
        return FtwDirectory(target)
    if model.experts == "nvfp4":
        formats = Wanted(experts=parse_format(model.experts), dense=parse_format(model.dense))
        convert(model.checkpoint, target, wanted=formats)
    else:
        convert(source, target)
    return FtwDirectory(target)


@contextmanager
def our_engine(
    directory: FtwDirectory, cpus: Sequence[int], numerics: str = "exact"
) -> Iterator[OurEngine]:
    """An engine over a pool of its own; nothing of it may be used afterwards."""
    index = directory.index
    memory = HostMemory(mem_available_bytes=_available_bytes())
    pool = create_pool_file("freetoken-bench", index.region_bytes, index.identity)
    try:
        received = ReceivedPool(name=pool.name, length_bytes=pool.length_bytes, fd=pool.fd)
        attached = attach_pool(
            received,
            directory,
            memory,
            progress=lambda _done, _total: None,
            cancel=threading.Event(),
        )
        settings = EngineSettings(
            model="synthetic",
            max_running_count=MOST_SEQUENCES,
            step_tokens=STEP_TOKENS,
            max_context_tokens=2048,
            kv_bytes=1 << 30,
            numerics=numerics,
        )
        with attached.mapping as mapping:
            built = build_engine(directory, mapping.region_address, settings, tuple(cpus), memory)
            yield OurEngine(built=built, page_bytes=mapping.pages().page_bytes)
    finally:
        os.close(pool.fd)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise ValueError("/proc/meminfo has no MemAvailable")


class OurSide:
    """Decode of `tokens` steps in `sequences` sequences, or a prompt when `sequences` is 0."""

    name = "ours"

    def __init__(self, built: BuiltEngine, sequences: int, tokens: int) -> None:
        self._built = built
        self._sequences = sequences
        self._tokens = tokens

    def burst(self, seconds: float) -> Burst:
        del seconds  # the work is fixed, as the rival's is
        context = (PROMPT_TOKENS if self._sequences else 0) + self._tokens
        pages_count = -(-context // PAGE_TOKENS)
        taken = [self._built.allocator.take(pages_count) for _ in range(max(self._sequences, 1))]
        pages = [array("i", part) for part in taken if part is not None]
        try:
            return self._prompt(pages[0]) if self._sequences == 0 else self._decode(pages)
        finally:
            for part in pages:
                self._built.allocator.release(part)

    def _prompt(self, pages: array[int]) -> Burst:
        ids = [3 + 7 * index % 200 for index in range(self._tokens)]
        before_s, start_s = waited_s(), time.perf_counter()
        self._built.engine.run(StepWork(sequences=(_work(0, ids, 0, pages, 0),)))
        return self._result(self._tokens, before_s, start_s)

    def _decode(self, pages: list[array[int]]) -> Burst:
        ids = [
            [3 + (11 * key + index) % 200 for index in range(PROMPT_TOKENS)]
            for key in range(len(pages))
        ]
        last = self._step([_work(key, ids[key], 0, part, 0) for key, part in enumerate(pages)])
        before_s, start_s = waited_s(), time.perf_counter()
        for step in range(self._tokens):
            last = self._step(
                [
                    _work(key, [last[key]], PROMPT_TOKENS + step, part, step + 1)
                    for key, part in enumerate(pages)
                ]
            )
        return self._result(self._tokens * len(pages), before_s, start_s)

    def _step(self, works: list[SequenceWork]) -> list[int]:
        """The tokens sampled, by key."""
        outcome = self._built.engine.run(StepWork(sequences=tuple(works)))
        tokens = [one.token_id for one in outcome.outcomes]
        if None in tokens:
            raise ValueError(f"the model gives no numbers: {outcome.outcomes[0].error}")
        return [token for token in tokens if token is not None]

    def _result(self, tokens: int, before_s: float, start_s: float) -> Burst:
        elapsed_s = time.perf_counter() - start_s
        lost_s = waited_s() - before_s
        share = max(0.0, 1.0 - lost_s / (self._built.threads_count * elapsed_s))
        return Burst(rate=tokens / elapsed_s, cpu_share=share)


def _work(
    key: int, token_ids: list[int], first_position: int, pages: array[int], draw_index: int
) -> SequenceWork:
    return SequenceWork(
        key=key,
        token_ids=token_ids,
        first_position=first_position,
        pages=pages,
        sampling=GREEDY,
        draw_index=draw_index,
    )
