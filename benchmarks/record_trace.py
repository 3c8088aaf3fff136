"""Records which experts a model chooses, as a trace for `benchmarks.miss_rate`.

usage: python -m benchmarks.record_trace --model DIR --out FILE [--write-tokens N]
       [--conversations N] [--side-by-side N]

DIR is an FTW directory. Several conversations are read and continued by turns, the last ones side
by side (in steps of several tokens) where that is asked for. Tokens are drawn with fixed seeds. The
default is long writing after short prompts, as with models that think before they answer.
"""

from __future__ import annotations

import argparse
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from benchmarks.trace_texts import CONVERSATIONS
from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import ModelFacts, model_facts
from freetokend.engine.step import Engine
from freetokend.engine.work import SamplingParams, SequenceWork, StepWork
from freetokend.enginehost.attach import attach_pool
from freetokend.enginehost.build import PAGE_TOKENS
from freetokend.enginehost.routed_steps import routed_steps
from freetokend.enginehost.trace_control import STEP_CAPACITY_IDS, trace_source
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.reader import FtwDirectory
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor
from freetokend.native.lifeline import ReceivedPool
from freetokend.native.pool import create_pool_file
from freetokend.native.routing_tap import RoutingTap
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.traces.trace import TraceShape
from freetokend.traces.trace_file import TraceWriter

CONTEXT_TOKENS: Final = 2048
MEMORY: Final = HostMemory(mem_available_bytes=64 << 30)


class Talk:
    """One conversation: its tokens so far and its pages."""

    def __init__(self, key: int, paragraphs: Sequence[str], tokenizer: Tokenizer) -> None:
        self.key = key
        self._prompts = [tokenizer.encode(text).ids for text in paragraphs]
        pages_count = CONTEXT_TOKENS // PAGE_TOKENS
        self._pages = array("i", range(key * pages_count, (key + 1) * pages_count))
        self._known_tokens = 0
        self._drawn = 0
        self._last: list[int] = []

    def read(self, turn: int) -> SequenceWork:
        return self._work([*self._last, *self._prompts[turn]])

    def write(self) -> SequenceWork:
        return self._work(self._last)

    def drew(self, token: int | None) -> None:
        if token is None:
            raise ValueError("the model gives no numbers")
        self._last = [token]
        self._drawn += 1

    def _work(self, token_ids: list[int]) -> SequenceWork:
        first = self._known_tokens
        self._known_tokens += len(token_ids)
        if self._known_tokens > CONTEXT_TOKENS:
            raise ValueError(f"the conversation is longer than {CONTEXT_TOKENS} tokens")
        return SequenceWork(
            key=self.key,
            token_ids=token_ids,
            first_position=first,
            pages=self._pages,
            sampling=SamplingParams(temperature=0.7, top_p=0.95, seed=self.key),
            draw_index=self._drawn,
        )


@contextmanager
def tapped_engine(directory: FtwDirectory) -> Iterator[tuple[Engine, RoutingTap]]:
    """An engine over a pool of its own, and a tap that keeps the routing of its steps."""
    torch.set_num_threads(1)
    index, config = directory.index, directory.model_config()
    pool = create_pool_file("freetoken-record", index.region_bytes, index.identity)
    executor = Executor(tuple(sorted(os.sched_getaffinity(0))[:2]))
    try:
        received = ReceivedPool(name=pool.name, length_bytes=pool.length_bytes, fd=pool.fd)
        attached = attach_pool(
            received, directory, MEMORY, progress=lambda _done, _total: None,
            cancel=threading.Event(),
        )  # fmt: skip
        with attached.mapping as mapping:
            experts = bank_experts(index.expert_bank, mapping.region_address, numerics="exact")
            tap = RoutingTap(experts)
            tap.start(STEP_CAPACITY_IDS)
            weights = PoolWeights(mapping.region_address, index)
            program = NativeProgram(build_program(config), weights, executor, tap)
            pages_count = len(CONVERSATIONS) * CONTEXT_TOKENS // PAGE_TOKENS
            arena = KvArena(_kv_shape(model_facts(config)), pages_count)
            yield Engine(program, NativeKvStore(executor, arena)), tap
    finally:
        executor.close()
        os.close(pool.fd)


def _kv_shape(facts: ModelFacts) -> KvShape:
    return KvShape(
        layers_count=facts.layers_count,
        kv_heads_count=facts.kv_heads_count,
        head_size=facts.head_size,
        element_bytes=2,
        page_tokens=PAGE_TOKENS,
    )


def record(
    directory: FtwDirectory, out: Path, write_tokens: int, conversations: int, side_by_side: int
) -> None:
    """Run all conversations and write the trace."""
    facts = model_facts(directory.model_config())
    shape = TraceShape(
        layers_count=facts.moe_layers_count,
        experts_per_layer=facts.experts_per_layer_count,
        experts_per_token=facts.experts_per_token_count,
    )
    tokenizer = Tokenizer.from_file(str(directory.path / "tokenizer.json"))
    talks = [Talk(key, texts, tokenizer) for key, texts in enumerate(CONVERSATIONS[:conversations])]
    alone = len(talks) - side_by_side
    groups = [[talk] for talk in talks[:alone]] + ([talks[alone:]] if side_by_side else [])
    with (
        tapped_engine(directory) as (engine, tap),
        TraceWriter(out, shape, source=trace_source(directory.index)) as writer,
    ):

        def step(group: list[Talk], works: list[SequenceWork]) -> None:
            work = StepWork(sequences=tuple(works))
            outcome = engine.run(work)
            for talk, one in zip(group, outcome.outcomes, strict=True):
                talk.drew(one.token_id)
            for routed in routed_steps(work, tap.take(), shape):
                writer.add(routed.phase, routed.ids)

        for turn in range(len(CONVERSATIONS[0])):
            for group in groups:
                for talk in group:
                    step([talk], [talk.read(turn)])
                for _ in range(write_tokens):
                    step(group, [talk.write() for talk in group])


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="an FTW directory")
    parser.add_argument("--out", type=Path, required=True, help="the trace to write")
    parser.add_argument("--write-tokens", type=int, default=320, help="per turn and conversation")
    parser.add_argument("--conversations", type=int, default=4, help="at most 6")
    parser.add_argument("--side-by-side", type=int, default=0, help="so many of them")
    options = parser.parse_args()
    directory = FtwDirectory(options.model)
    record(
        directory, options.out, options.write_tokens, options.conversations, options.side_by_side
    )


if __name__ == "__main__":
    main()
