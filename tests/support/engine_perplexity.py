"""Perplexity of an FTW directory on held-out text, through the engine's own parts.

The weights go into a pool as when serving; the bound program reads the text in chunks of several
sequences at once, with keys and values in pages.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from freetokend.core.model_config import model_facts
from freetokend.demo.plan.wiki_text import read_text_sets
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.reader import FtwDirectory
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.batch import KvBatch, SequenceSpan, kv_batch
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor, Numerics
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.protocols import StepInput
from tests.enginehost.local_engine import attach, new_pool

Windows = NDArray[np.int64]

_PAGE_TOKENS: Final = 32
# Two windows side by side, half of each per step: logits of 256 tokens are 50 MB.
_SEQUENCES: Final = 2
_CHUNK_TOKENS: Final = 128
# Rows of logits that are fp64 at a time.
_ROWS: Final = 32


def wiki_windows(model_dir: Path, text_wheel: Path, count: int) -> Windows:
    """Token windows [count, 256] of Wikipedia articles that no calibration saw."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    windows = read_text_sets(text_wheel, tokenizer, 0, count).held_out_wiki
    assert len(windows) == count
    return windows


def engine_perplexities(
    directory: FtwDirectory, windows: Windows, numerics: Sequence[Numerics]
) -> tuple[float, ...]:
    """exp of the mean negative log-probability of every token but each window's first.

    One figure for each of `numerics`, over weights that are loaded once.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    threads_count = torch.get_num_threads()
    torch.set_num_threads(1)  # the executor's threads do the work
    try:
        with new_pool(directory) as pool, attach(pool, directory).mapping as mapping:
            executor = Executor(cpus)
            try:
                return tuple(
                    _perplexity(directory, mapping.region_address, executor, windows, one)
                    for one in numerics
                )
            finally:
                executor.close()
    finally:
        torch.set_num_threads(threads_count)


def _perplexity(
    directory: FtwDirectory,
    region_address: int,
    executor: Executor,
    windows: Windows,
    numerics: Numerics,
) -> float:
    config, index = directory.model_config(), directory.index
    facts = model_facts(config)
    model = NativeProgram(
        build_program(config),
        PoolWeights(region_address, index),
        executor,
        bank_experts(index.expert_bank, region_address, numerics=numerics),
        numerics=numerics,
    )
    shape = KvShape(
        layers_count=facts.layers_count,
        kv_heads_count=facts.kv_heads_count,
        head_size=facts.head_size,
        element_bytes=2,
        page_tokens=_PAGE_TOKENS,
    )
    pages_count = _SEQUENCES * (windows.shape[1] // _PAGE_TOKENS)
    store = NativeKvStore(executor, KvArena(shape, pages_count))
    total, count = 0.0, 0
    for first in range(0, len(windows), _SEQUENCES):
        some = windows[first : first + _SEQUENCES]
        for tokens, targets, batch in _steps(some):
            step = StepInput(
                token_ids=torch.from_numpy(tokens),
                positions=batch.positions.long(),
                logits_index=torch.arange(len(tokens)),
            )
            total += _negative_log_likelihood(model.forward(step, store.view(batch)), targets)
            count += int((targets >= 0).sum())
    return math.exp(total / count)


def _steps(windows: Windows) -> Iterator[tuple[Windows, Windows, KvBatch]]:
    """Tokens [T] of a step, what follows each [T] (-1: nothing), and where they belong.

    The pages of the windows alternate.
    """
    windows_count, length = windows.shape
    following = np.full_like(windows, -1)
    following[:, :-1] = windows[:, 1:]
    pages_count = windows_count * (length // _PAGE_TOKENS)
    for start in range(0, length, _CHUNK_TOKENS):
        here = slice(start, start + _CHUNK_TOKENS)
        spans = [
            SequenceSpan(
                pages=array("i", range(window, pages_count, windows_count)),
                first_position=start,
                tokens_count=len(windows[window, here]),
            )
            for window in range(windows_count)
        ]
        batch = kv_batch(spans, _PAGE_TOKENS)
        yield windows[:, here].reshape(-1), following[:, here].reshape(-1), batch


def _negative_log_likelihood(logits: torch.Tensor, targets: Windows) -> float:
    """Sum over the rows that have a target, in fp64."""
    wanted = torch.from_numpy(targets)
    total = 0.0
    for part, target in zip(torch.split(logits, _ROWS), torch.split(wanted, _ROWS), strict=True):
        rows = part.double()
        assert bool(torch.isfinite(rows).all())
        chosen = rows.gather(1, target.clamp(min=0)[:, None])[:, 0]
        losses = torch.logsumexp(rows, dim=1) - chosen
        total += float(losses[target >= 0].sum())
    return total
