"""One mixture-of-experts layer: ours against the read ceiling, ggml, kt-kernel and torch.

usage: python -m benchmarks.expert_layer [--quick] [--json FILE] [--formats bf16,mxfp4] ...

The layer is that of Qwen3-30B-A3B: hidden 2048, 128 experts of 768, 8 per token, random weights,
our records in an expert pool. Every side takes the same experts in the same order; with one token
no expert comes again before all others were read. Results are checked against float64 first. See
docs/benchmarks.md for the method and for what is fetched and built on the first run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import layer_goals
from benchmarks.fma_peak import FmaSide
from benchmarks.layer_rivals import ALL, Rivals, rivals_of
from benchmarks.layer_shape import QWEN3
from benchmarks.memory import CEILING_BYTES, CeilingSide, HugeMemory, PoolBank
from benchmarks.our_layer import Numerics, OurLayer
from benchmarks.peers.cache import PeerUnavailableError
from benchmarks.result import Row, write
from benchmarks.rounds import CallSide, Outcome, Plan, Side, foreground, play_rivals
from freetokend.core.errors import FreetokenError
from freetokend.ftw.formats import WeightFormat, parse_format
from freetokend.native.affinity import pinned_thread
from freetokend.native.executor import Executor

FORMATS: Final = (
    *("bf16", "fp8_block", "int8_g32_f16", "int4_g32_f16", "mxfp4", "nvfp4", "q4_K", "q6_K"),
)
BATCHES: Final = (1, 4, 32, 512)
OURS: Final = "ours"
# With fewer tokens the weights' way from memory is the longer one.
PEAK_FROM_TOKENS: Final = 32


@dataclass(kw_only=True)
class Bench:
    """What all cases share, and what they found."""

    plan: Plan
    cpus: Sequence[int]
    isa: str
    numerics: Numerics
    rivals: Sequence[str]
    batches: Sequence[int]
    first: bool
    ceiling: HugeMemory
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def goals(self, weight_format: WeightFormat, tokens: int, page_bytes: int) -> layer_goals.Case:
        """What a batch of this format is to reach, by the instruction set that was asked for."""
        return layer_goals.Case(
            kind=weight_format.kind,
            fast=self.numerics == "fast",
            held_to_avx2=self.isa == "avx2",
            tokens=tokens,
            page_bytes=page_bytes,
        )

    def format(self, weight_format: WeightFormat, threads_count: int) -> None:
        """All batches of one format with so many threads."""
        layer = OurLayer(QWEN3, weight_format, self.numerics)
        cpus = self.cpus[:threads_count]
        with (
            pinned_thread(cpus[0]),
            Executor(cpus, isa=self.isa) as executor,
            PoolBank(layer.bank_bytes) as bank,
        ):
            layer.fill(bank)
            for tokens in self.batches:
                try:
                    error = layer.check(executor, bank, min(tokens, 32))
                except FreetokenError as refusal:
                    self.notes.append(f"{weight_format} not run: {refusal}")
                    return
                print(f"{weight_format}, {tokens} tokens: relative error {error:.2g}", flush=True)
            with rivals_of(
                weight_format,
                self.cpus,
                threads_count,
                isa=self.isa,
                programs=self.rivals,
            ) as rivals:
                for tokens in self.batches:
                    self._batch(layer, executor, bank, rivals, tokens)
                self.notes += rivals.notes

    def _batch(
        self, layer: OurLayer, executor: Executor, bank: PoolBank, rivals: Rivals, tokens: int
    ) -> None:
        usable = rivals.batch(tokens)
        ours = CallSide(OURS, layer.call(executor, bank, tokens), 1.0, executor.threads_count)
        ceiling = CeilingSide(executor, self.ceiling)
        ceiling.bytes_per_unit = layer.layer_bytes(tokens)
        with foreground(self.first), self._peak(layer, executor, tokens) as peak:
            sides: list[Side] = [*(rival.child for rival in usable), *peak]
            outcome = play_rivals(ours, sides, ceiling, self.plan, rivals.notes)
        print(f"  {outcome.disturbance()}", flush=True)
        case = (
            f"layer {layer.format} {layer.numerics} {executor.isa} {executor.threads_count} threads"
            f" {tokens} tokens"
        )
        goals = self.goals(layer.format, tokens, bank.page_bytes)
        self._add(self._ceiling_row(outcome, case, goals, ceiling.bytes_per_unit))
        for rival in usable:
            if rival.child.name not in outcome.names:
                continue
            goal = goals.rival_goal(rival.program)
            self._add(
                outcome.row(
                    case, OURS, rival.child.name, "layers/s", goal, page_bytes=bank.page_bytes
                )
            )
        if FmaSide.name in outcome.names:
            scale = QWEN3.operations(tokens) / 1e9
            self._add(
                outcome.row(
                    case, OURS, FmaSide.name, "GFLOP/s", 0, scale=scale, page_bytes=bank.page_bytes
                )
            )

    @contextmanager
    def _peak(
        self, layer: OurLayer, executor: Executor, tokens: int
    ) -> Iterator[Sequence[FmaSide]]:
        """The arithmetic ceiling where it is one: many tokens, fp32 sums, AVX2."""
        if tokens < PEAK_FROM_TOKENS or layer.numerics != "exact" or executor.isa != "avx2":
            yield ()
            return
        try:
            peak = FmaSide(self.cpus[: executor.threads_count], QWEN3.operations(tokens))
        except PeerUnavailableError as error:
            self.notes.append(str(error))
            yield ()
            return
        try:
            yield (peak,)
        finally:
            peak.close()

    def _ceiling_row(
        self, outcome: Outcome, case: str, goals: layer_goals.Case, layer_bytes: float
    ) -> Row:
        return outcome.row(
            case,
            OURS,
            "read ceiling",
            "GB/s",
            goals.ceiling_goal(),
            scale=layer_bytes / 1e9,
            page_bytes=goals.page_bytes,
        )

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row.text()}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short bursts, fewer batches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--batches", default="", help="such as 1,32; tokens of a batch")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, each a case")
    parser.add_argument("--cpus", default="", help="such as 0,1; default: all allowed ones")
    parser.add_argument("--isa", default="auto", help="avx2 also holds the rivals to it")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact")
    parser.add_argument("--rivals", default=",".join(ALL), help="none: only the ceiling")
    parser.add_argument("--first", action="store_true", help="before other sessions; needs root")
    options = parser.parse_args()
    chosen = [int(cpu) for cpu in options.cpus.split(",") if cpu]
    batches = [int(tokens) for tokens in options.batches.split(",") if tokens]
    bench = Bench(
        plan=Plan.quick() if options.quick else Plan(),
        cpus=chosen or sorted(os.sched_getaffinity(0)),
        isa=options.isa,
        numerics=options.numerics,
        rivals=options.rivals.split(","),
        batches=batches or (BATCHES[:2] if options.quick else BATCHES),
        first=options.first,
        ceiling=HugeMemory(CEILING_BYTES),
    )
    for threads in options.threads.split(","):
        if int(threads) > len(bench.cpus):
            bench.notes.append(f"{threads} threads left out: there are {len(bench.cpus)} cpus")
            continue
        for name in options.formats.split(","):
            bench.format(parse_format(name), int(threads))
    write(bench.rows, options.json, tuple(dict.fromkeys(bench.notes)))


if __name__ == "__main__":
    main()
