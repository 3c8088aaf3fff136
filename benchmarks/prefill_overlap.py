"""Prefill that streams whole layers over a throttled link while it computes: time, and what stays.

usage: python -m benchmarks.prefill_overlap [--quick] [--only replays|times] [--first]
                                            [--json FILE]

The expert cache of the host device, a bank of random experts, and a link that keeps to a rate. One
token here stands for 16 of the published system, whose chunks have 8,192 tokens at most, and a
layer has 16 experts instead of 256: an expert gets as many tokens as there. The rate of the link
follows from the computation as timed in the same round, so that transfer and computation have the
ratio that a case asks for, whatever this machine is doing. See docs/benchmarks.md.
Exit code 1 when a gate fails:

- a chunk takes at most 1.08 times the longer one of transfer and computation;
- with a share r of the experts resident at most 1.1 (1 - r) times the transfer of the whole pool;
- the first 32 decode steps after a prefill miss less than from an empty cache;
- in the 32 steps during and after a prefill another stream's hit ratio is at most 5 points below
  what it is undisturbed. During it the two layers that are streamed through take slots: where that
  alone costs more (the row says how much), at most 5 points below what it is with as few slots as
  they leave.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.cached_bank import LayerRunner, RandomBank
from benchmarks.prefill_residents import resident_rows
from benchmarks.result import Row, write
from benchmarks.rounds import EXTRA_ROUNDS, LEAST_CPU_SHARE, foreground, verdict, waited_s
from freetokend.experts.cache import ExpertCache
from freetokend.native.executor import Executor
from freetokend.traces.synthetic import Locality, Workload, synthetic_trace
from freetokend.traces.trace import TraceShape

SHAPE: Final = TraceShape(layers_count=40, experts_per_layer=16, experts_per_token=8)
HIDDEN_SIZE: Final = 256
INTERMEDIATE_SIZE: Final = 64
WEIGHT_FORMAT: Final = "int4_g32_f16"
TOKENS_PER_TOKEN: Final = 16
CHUNK_TOKENS: Final = 8192 // TOKENS_PER_TOKEN
# Throughput lost without the second buffer, as published.
PUBLISHED_LOSSES: Final = ((4096, 0.19), (8192, 0.25), (16384, 0.26))
# Computation by transfer in the published system's chunks of 8,192 tokens: what it lost there is
# 1 - 1 / (1 + 1/3). The other two prompts are not fitted: the rate is the same for all.
PUBLISHED_RATIO: Final = 1 / 3
RATIOS: Final = (1 / 3, 1.0, 2.0)
RESIDENT_SHARES: Final = (0.25, 0.5)
CHUNK_LIMIT: Final = 1.08
RESIDENT_LIMIT: Final = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round: what it took and what that is compared with; the share of cpu time it got."""

    took_s: float
    against_s: float
    cpu_share: float


class Bench:
    """A bank and timed calls on it; caches are made for each case."""

    def __init__(self, bank: RandomBank, executor: Executor) -> None:
        self.bank = bank
        self.pool_bytes = bank.bank.record_bytes * SHAPE.experts_count
        self._executor = executor
        trace = synthetic_trace(
            SHAPE,
            Locality(conversation_share=0.1, drift_share=0.5, drift_tokens=32.0),
            Workload(
                conversations_count=1, turns_count=1, prompt_tokens=CHUNK_TOKENS, decode_tokens=1
            ),
            seed=1,
        )
        self._ids = trace.steps[0].ids
        self._pool = LayerRunner(bank, executor, bank.pool_only(), CHUNK_TOKENS)

    def compute_s(self) -> float:
        """Of a chunk of the most tokens, every expert executed where it lies in the pool."""
        start_s = time.perf_counter()
        self._pool.run_layers(list(self._ids))
        return time.perf_counter() - start_s

    def sweeper(self, cache: ExpertCache, tokens_count: int) -> Callable[[], float]:
        """Times a chunk of so many tokens, streamed through the cache."""
        runner = LayerRunner(self.bank, self._executor, cache.sweep, tokens_count)
        ids = list(self._ids[:, :tokens_count])

        def sweep() -> float:
            start_s = time.perf_counter()
            cache.prefetch(0)
            runner.run_layers(ids)
            return time.perf_counter() - start_s

        return sweep

    def make_resident(self, cache: ExpertCache, share: float, seed: int) -> None:
        """Have decode steps ask for this share of each layer's experts, so that they are filled."""
        shape = self.bank.routing
        decode = LayerRunner(self.bank, self._executor, cache.decode, 1)
        rng = np.random.default_rng(seed)
        count = round(share * shape.experts_per_layer)
        for layer in range(shape.layers_count):
            wanted = rng.permutation(shape.experts_per_layer)[:count]
            for start in range(0, count, shape.experts_per_token):
                picked = wanted[start : start + shape.experts_per_token]
                decode.run(layer, np.resize(picked, (1, shape.experts_per_token)))

    def rounds(self, sample: Callable[[], tuple[float, float]], count: int) -> list[Sample]:
        """So many undisturbed rounds of (took, against), or all when there are too few."""
        played: list[Sample] = []
        while sum(_undisturbed(one) for one in played) < count:
            if len(played) >= count + EXTRA_ROUNDS:
                return played
            waited_before_s, start_s = waited_s(_fill_threads()), time.perf_counter()
            took_s, against_s = sample()
            lost_s = waited_s(_fill_threads()) - waited_before_s
            threads_s = self._executor.threads_count * (time.perf_counter() - start_s)
            share = max(0.0, 1.0 - lost_s / threads_s)
            played.append(Sample(took_s=took_s, against_s=against_s, cpu_share=share))
        return [one for one in played if _undisturbed(one)]


def _undisturbed(sample: Sample) -> bool:
    return sample.cpu_share >= LEAST_CPU_SHARE


def _fill_threads() -> list[int]:
    """Threads that wait for a core because the executor has it; a real link needs none."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "ftk-fill":
                found.append(int(task.name))
        except OSError:
            continue
    return found


def row(case: str, rival: str, samples: Sequence[Sample], goal: float, wanted_count: int) -> Row:
    """The ratio is what is compared with by what it took; limits are goals below 1."""
    ratios = [one.against_s / one.took_s for one in samples]
    busy = sum(_undisturbed(one) for one in samples) < wanted_count
    return Row(
        case=case,
        ours=statistics.median(one.took_s for one in samples),
        rival=rival,
        rival_value=statistics.median(one.against_s for one in samples),
        unit="s",
        ratio=statistics.median(ratios),
        goal=goal,
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        rounds_count=len(ratios),
        verdict=verdict(ratios, goal, busy=busy),
    )


def overlap_row(bench: Bench, ratio: float, count: int) -> Row:
    """A chunk against the longer one of transfer and computation."""
    cache = bench.bank.cache(2 * SHAPE.experts_per_layer, fill_misses=True)
    sweep = bench.sweeper(cache, CHUNK_TOKENS)

    def sample() -> tuple[float, float]:
        before_s = bench.compute_s()
        cache.set_rate_bytes_per_s(bench.pool_bytes * ratio / before_s)
        took_s = sweep()
        compute_s = (before_s + bench.compute_s()) / 2
        return took_s, max(before_s / ratio, compute_s)

    try:
        samples = bench.rounds(sample, count)
    finally:
        cache.close()
    case = f"chunk, computation {ratio:.2g} of transfer"
    return row(case, "the longer one", samples, 1 / CHUNK_LIMIT, count)


def loss_rows(bench: Bench, count: int) -> list[Row]:
    """Throughput with one buffer by that with two, next to what was published."""
    slots_count = 2 * SHAPE.experts_per_layer
    two = bench.bank.cache(slots_count, fill_misses=True)
    one = bench.bank.cache(slots_count, fill_misses=True, layers_ahead_count=0)
    rows = []
    try:
        for tokens_count, published in PUBLISHED_LOSSES:
            chunks_count = -(-tokens_count // 8192)
            chunk = min(tokens_count // TOKENS_PER_TOKEN, CHUNK_TOKENS)
            sweeps = bench.sweeper(two, chunk), bench.sweeper(one, chunk)

            def sample(
                sweeps: tuple[Callable[[], float], ...] = sweeps, chunks_count: int = chunks_count
            ) -> tuple[float, float]:
                rate = bench.pool_bytes * PUBLISHED_RATIO / bench.compute_s()
                two.set_rate_bytes_per_s(rate)
                one.set_rate_bytes_per_s(rate)
                two_s, one_s = (sum(sweep() for _ in range(chunks_count)) for sweep in sweeps)
                return two_s, one_s

            samples = bench.rounds(sample, count)
            lost = statistics.median(1 - each.took_s / each.against_s for each in samples)
            case = (
                f"prompt of {tokens_count} tokens: {100 * lost:.0f} % lost without the second "
                f"buffer, published {100 * published:.0f} %"
            )
            rows.append(row(case, "one buffer", samples, 0.0, count))
    finally:
        two.close()
        one.close()
    return rows


def resident_row(bench: Bench, share: float, count: int) -> Row:
    """A chunk with a part of the experts resident, by the transfer of the others."""
    slots_count = round(share * SHAPE.experts_count)
    streamed: list[int] = []

    def sample() -> tuple[float, float]:
        cache = bench.bank.cache(slots_count, fill_misses=True)
        try:
            bench.make_resident(cache, share, seed=len(streamed))
            sweep = bench.sweeper(cache, CHUNK_TOKENS)
            transfer_s = bench.compute_s() / PUBLISHED_RATIO
            cache.set_rate_bytes_per_s(bench.pool_bytes / transfer_s)
            took_s = sweep()
            streamed.append(cache.counters().streamed_count)
        finally:
            cache.close()
        return took_s, (1 - share) * transfer_s

    samples = bench.rounds(sample, count)
    case = (
        f"chunk, {100 * share:.0f} % resident, {statistics.median(streamed):.0f} of "
        f"{SHAPE.experts_count} experts streamed"
    )
    return row(case, "transfer of the others", samples, 1 / RESIDENT_LIMIT, count)


def timed_rows(*, quick: bool) -> list[Row]:
    """All that depends on time."""
    count = 3 if quick else 7
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    rows = []
    with (
        Executor(cpus) as executor,
        RandomBank(
            SHAPE,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=INTERMEDIATE_SIZE,
            weight_format=WEIGHT_FORMAT,
        ) as bank,
    ):
        bench = Bench(bank, executor)
        bench.compute_s()
        rows += [overlap_row(bench, ratio, count) for ratio in RATIOS]
        rows += [resident_row(bench, share, count) for share in RESIDENT_SHARES]
        rows += loss_rows(bench, count)
    return rows


def main() -> int:
    """Time, count, print; 1 when a gate fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer traces")
    parser.add_argument(
        "--only",
        choices=("replays", "times"),
        help="replays: what stays in the cache, the same on every machine; times: the rest",
    )
    parser.add_argument("--first", action="store_true", help="before all others, while it is timed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    rows: list[Row] = []
    if options.only != "replays":
        with foreground(options.first):
            rows += timed_rows(quick=options.quick)
    if options.only != "times":
        rows += resident_rows(quick=options.quick)
    timed = (
        f"timed with {SHAPE.layers_count} x {SHAPE.experts_per_layer} experts of {HIDDEN_SIZE} x "
        f"{INTERMEDIATE_SIZE} in {WEIGHT_FORMAT}, {SHAPE.experts_per_token} per token, "
        f"{CHUNK_TOKENS} tokens for a chunk of 8192; link throttled in software"
    )
    notes = (timed if options.only != "replays" else "nothing was timed",)
    write(rows, options.json, notes)
    failed = [one.case for one in rows if one.verdict == "miss"]
    print("\n" + ("\n".join(f"gate failed: {case}" for case in failed) or "no gate failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
