"""Checks of single kernels: fills beside the link's ceiling, merges and attention beside what they
must give."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable
from typing import Final

import torch

from freetokend.experts.plan.contract import CPU, NONE
from freetokend.kvcache.batch import KvStore
from freetokend.kvcache.gpu.flashinfer_store import FlashInferKvStore
from freetokend.kvcache.gpu.triton_store import TritonKvStore
from tests.gpu.bench import Bench
from tests.gpu.rows import GPU, Row, not_run
from tests.kvcache.gpu.contexts import Contexts, Heads, relative_error

# bf16 results of sums in fp32; FlashInfer also rounds queries and weights.
ATTENTION_ERROR: Final = 2e-3
FLASHINFER_ERROR: Final = 8e-3
# Heads as of models of this size, and as odd as a model may have them.
HEADS: Final = (Heads(queries=16, keys=2, size=128), Heads(queries=6, keys=2, size=80))
LENGTHS: Final = (700, 333, 64)


def fill_rate(bench: Bench) -> list[Row]:
    """Fills of all slots beside one plain copy of as many bytes."""
    gate = 0.85 if bench.kind.driver is not None else 0.3
    count = min(bench.facts.experts_count, bench.shape.experts)
    bench.pool.resize(count)
    numbers = torch.arange(count, dtype=torch.int32)
    fills = torch.full((bench.shape.experts, 2), -1, dtype=torch.int32)
    fills[:count] = torch.stack((numbers, numbers), dim=1)
    fills = fills.to(bench.kind.device)
    fills_count = torch.full((1,), count, dtype=torch.int32, device=bench.kind.device)
    length_bytes = count * bench.facts.record_bytes
    source = torch.zeros(length_bytes, dtype=torch.uint8, pin_memory=bench.kind.driver is not None)
    target = torch.zeros(length_bytes, dtype=torch.uint8, device=bench.kind.device)
    ours_s = _best_s(bench, lambda: bench.fill(fills, fills_count))
    ceiling_s = _best_s(bench, lambda: _plain_copy(target, source))
    ours, ceiling = length_bytes / ours_s, length_bytes / ceiling_s
    bench.pool.resize(0)
    return [
        Row(
            check="rate of fills beside that of one copy",
            measured=f"{ours / 1e9:.2f} of {ceiling / 1e9:.2f} GB/s",
            gate=f">= {gate}",
            passed=ours >= gate * ceiling,
        )
    ]


def _plain_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.is_cuda:
        target.copy_(source, non_blocking=True)
    else:  # torch would wake threads for it
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _best_s(bench: Bench, run: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(10):
        bench.kind.synchronize()
        began_s = time.perf_counter()
        run()
        bench.kind.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def merged(bench: Bench) -> list[Row]:
    """Bit for bit what one addition after the other gives, whatever the other branch has left."""
    device = bench.kind.device
    random = torch.Generator().manual_seed(1)
    places = torch.tensor([0, 3, CPU, CPU, NONE], dtype=torch.int32)
    worst = 0
    for tokens, top_k, hidden in ((1, 8, 2048), (17, 6, 257)):
        y_gpu, y_cpu = torch.randn(2, tokens, top_k, hidden, generator=random).unbind(0)
        physical = places[torch.randint(len(places), (tokens, top_k), generator=random)]
        wanted = torch.zeros(tokens, hidden)
        for token, row in enumerate(physical.tolist()):
            for k, place in enumerate(row):
                if place >= 0 or place == CPU:
                    wanted[token] += (y_gpu if place >= 0 else y_cpu)[token, k]
        left = torch.full_like(y_gpu, float("nan"))
        given = (
            torch.where((physical >= 0).unsqueeze(-1), y_gpu, left),
            torch.where((physical == CPU).unsqueeze(-1), y_cpu, left),
            physical,
        )
        got = bench.merge(*(one.to(device) for one in given)).cpu()
        worst += int((got != wanted).sum())
    return [
        Row(
            check="numbers of a merge that are not the sum in routed order",
            measured=str(worst),
            gate="0",
            passed=worst == 0,
        )
    ]


def attention(bench: Bench) -> list[Row]:
    """Prompts and single tokens beside float64; and on a GPU bit for bit the same in other steps:
    the host device's stand-in for it does not promise that."""
    rows = []
    for heads in HEADS:
        contexts = Contexts(heads, LENGTHS, 1)
        worst = _attention_error(bench, contexts, bench.attention(contexts))
        rows.append(
            Row(
                check=f"attention of {heads.queries} over {heads.keys} heads of {heads.size}",
                measured=f"{worst:.1e}",
                gate=f"<= {ATTENTION_ERROR:.0e}",
                passed=worst <= ATTENTION_ERROR,
            )
        )
        if bench.kind.driver is not None:
            changed = _changed_by_steps(bench, contexts)
            rows.append(
                Row(
                    check=f"its numbers that chunks and company change ({heads.size})",
                    measured=str(changed),
                    gate="0",
                    passed=changed == 0,
                )
            )
    return rows


def _attention_error(bench: Bench, contexts: Contexts, store: KvStore) -> float:
    """The worst row of a prompt, of steps in which it goes on, and of single tokens."""
    at, worst = [0, 0, 0], 0.0
    steps: tuple[dict[int, int], ...] = ({0: 600}, {0: 1, 1: 300}, {0: 99, 1: 32, 2: 63})
    for step in (*steps, {1: 1, 2: 1}):
        spans = [(one, at[one], at[one] + count) for one, count in step.items()]
        got = contexts.feed(store, spans, bench.kind.device).cpu()
        exact = torch.cat([contexts.exact(*span) for span in spans])
        worst = max(worst, relative_error(got, exact))
        for one, _, end in spans:
            at[one] = end
    return worst


def _changed_by_steps(bench: Bench, contexts: Contexts) -> int:
    """Numbers of one sequence that differ between a whole prompt and other steps."""
    device, length = bench.kind.device, LENGTHS[0]
    whole = contexts.feed(bench.attention(contexts), [(0, 0, length)], device)
    store, at, changed = bench.attention(contexts), 0, 0
    for count in (1, 31, 256, 1, 1, 300, length - 590):
        company = [(1, at, min(at + 3, LENGTHS[1]))] if at < LENGTHS[1] else []
        got = contexts.feed(store, [(0, at, at + count), *company], device)
        changed += int((got[:count] != whole[at : at + count]).sum())
        at += count
    return changed


def flashinfer(bench: Bench) -> list[Row]:
    """FlashInfer's attention, where there are it and a GPU."""
    check = "attention by FlashInfer"
    if bench.kind.driver is None:
        return [not_run(check, GPU, "it has kernels for GPUs alone")]
    if importlib.util.find_spec("flashinfer") is None:
        return [not_run(check, "flashinfer", "the package is not installed")]
    contexts = Contexts(HEADS[0], LENGTHS, 1)
    triton = bench.attention(contexts)
    assert isinstance(triton, TritonKvStore)
    store = FlashInferKvStore(triton, q_heads_count=HEADS[0].queries)
    worst = _attention_error(bench, contexts, store)
    return [
        Row(
            check=check,
            measured=f"{worst:.1e}",
            gate=f"<= {FLASHINFER_ERROR:.0e}",
            passed=worst <= FLASHINFER_ERROR,
        )
    ]
