"""A whole model on the CPU: ours, llama.cpp at the same tensor types, vLLM and transformers.

usage: python -m benchmarks.cpu_model --directory DIR [--quick] [--json FILE] [--types ...]

The model is `synthetic_model`'s: full-width Qwen3-MoE layers with random weights, one set of codes
for all programs (5 GB of files per type and 4 layers, kept in DIR). Decode of 128 tokens in one
sequence, of 32 in 4, 16 and 32 sequences, and a prompt of 512. llama.cpp is timed by its own
llama-bench and llama-batched-bench; vLLM's CPU build and transformers are timed in bf16. Rates are
tokens per second.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.memory import CEILING_BYTES, CeilingSide, HugeMemory
from benchmarks.our_model import OurEngine, OurSide, converted, our_engine
from benchmarks.peers.cache import PeerUnavailableError
from benchmarks.peers.child import Child
from benchmarks.peers.llama_cpp import LlamaSide, ensure_llama_bench
from benchmarks.peers.vllm_cpu import vllm_child
from benchmarks.result import Row, write
from benchmarks.rounds import Plan, Side, foreground, play_rivals
from benchmarks.synthetic_model import (
    EXPERT_SIZE,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TOP_K,
    VOCAB,
    SyntheticModel,
    synthetic_model,
)
from freetokend.native.executor import Executor

# Types of the experts and of the dense part.
TYPES: Final = ("bf16+bf16", "q8_0+q8_0", "q4_0+q4_0", "mxfp4+q8_0", "nvfp4+q8_0")
BITS: Final = {"bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5, "mxfp4": 4.25, "nvfp4": 4.5}
DECODE_GOAL: Final = {"bf16": 1.2, "q8_0": 1.7, "q4_0": 1.7, "mxfp4": 1.7, "nvfp4": 2.7}
# Ahead of llama.cpp with many sequences and on prompts.
AHEAD: Final = 1.0
PROMPT: Final = 512
# "vllm-eager" is vLLM without the minutes in which it compiles its graph.
RIVALS: Final = ("llama.cpp", "vllm", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is timed; sequences 0 is a prompt of so many tokens."""

    sequences: int
    tokens: int

    @property
    def name(self) -> str:
        if self.sequences == 0:
            return f"prefill {self.tokens}"
        return f"decode {self.tokens} x {self.sequences}"

    def goal(self, experts: str) -> float:
        """Times llama.cpp."""
        if self.sequences == 1:
            return DECODE_GOAL[experts]
        return 0.0 if self.sequences == 4 else AHEAD


def token_bytes(model: SyntheticModel) -> float:
    """Weight bytes that one token of decode must read."""
    attention = 2 * HIDDEN * HEAD_SIZE * (HEADS + KV_HEADS)
    dense = model.layers_count * attention + VOCAB * HIDDEN
    experts = model.layers_count * TOP_K * 3 * HIDDEN * EXPERT_SIZE
    return (dense * BITS[model.dense] + experts * BITS[model.experts]) / 8


@dataclass(kw_only=True)
class Bench:
    """What all cases share, and what they found."""

    directory: Path
    plan: Plan
    first: bool
    rivals: Sequence[str]
    works: Sequence[Work]
    numerics: str
    ceiling: HugeMemory
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def model(self, experts: str, dense: str, layers_count: int, cpus: Sequence[int]) -> None:
        """All work on one model with so many threads."""
        model = synthetic_model(
            self.directory, experts=experts, dense=dense, layers_count=layers_count
        )
        directory = converted(model)
        with (
            our_engine(directory, cpus, self.numerics) as engine,
            Executor(cpus) as executor,
            ExitStack() as stack,
        ):
            children = self._children(stack, model, cpus)
            programs = self._llama_programs()
            for work in self.works:
                rivals: list[Side] = []
                if programs is not None:
                    rivals.append(
                        LlamaSide(
                            programs=programs,
                            model=model.gguf_path,
                            cpus=cpus,
                            sequences=work.sequences,
                            tokens=work.tokens,
                        )
                    )
                rivals += [child for child in children if self._takes(child, work)]
                ceiling = CeilingSide(executor, self.ceiling)
                ceiling.bytes_per_unit = token_bytes(model)
                self._play(work, model, engine, [*rivals], ceiling)

    def _play(
        self,
        work: Work,
        model: SyntheticModel,
        engine: OurEngine,
        rivals: Sequence[Side],
        ceiling: CeilingSide,
    ) -> None:
        built, page_bytes = engine.built, engine.page_bytes
        ours = OurSide(built, work.sequences, work.tokens)
        with foreground(self.first):
            outcome = play_rivals(ours, rivals, ceiling, self.plan, self.notes)
        print(f"  {outcome.disturbance()}", flush=True)
        fast = " fast" if self.numerics == "fast" else ""
        case = (
            f"{model.layers_count} layers {model.experts}+{model.dense} {work.name} "
            f"{built.threads_count} threads {built.kernel}{fast}"
        )
        for rival in rivals:
            if rival.name not in outcome.names:
                continue
            goal = work.goal(model.experts) if rival.name == "llama.cpp" else 0.0
            row = outcome.row(case, ours.name, rival.name, "tokens/s", goal, page_bytes=page_bytes)
            self._add(row)
        if work.sequences == 1:
            scale = ceiling.bytes_per_unit / 1e9
            row = outcome.row(
                case, ours.name, ceiling.name, "GB/s", 0.0, scale=scale, page_bytes=page_bytes
            )
            self._add(row)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"  {row.text()}", flush=True)

    def _takes(self, child: Child, work: Work) -> bool:
        try:
            child.ask("batch", sequences=work.sequences, tokens=work.tokens)
        except PeerUnavailableError as error:
            self.notes.append(f"left out of {work.name}: {error}")
            return False
        return True

    def _llama_programs(self) -> Path | None:
        if "llama.cpp" not in self.rivals:
            return None
        try:
            return ensure_llama_bench()
        except PeerUnavailableError as error:
            self.notes.append(f"left out: {error}")
            return None

    def _children(
        self, stack: ExitStack, model: SyntheticModel, cpus: Sequence[int]
    ) -> list[Child]:
        """The rivals that read the checkpoint, in bf16, with the model loaded."""
        opened: list[Child] = []
        if model.experts != "bf16" or model.dense != "bf16":
            return opened
        for name in self.rivals:
            about: dict[str, object] = {
                "directory": str(model.checkpoint),
                "threads_count": len(cpus),
            }
            try:
                if name == "transformers":
                    child = Child("transformers", "benchmarks.peers.hf_child", cpus)
                elif name in ("vllm", "vllm-eager"):
                    about["compiled"] = name == "vllm"
                    child = vllm_child(cpus, compiled=name == "vllm")
                else:
                    continue
                stack.enter_context(child).ask("open", **about)
                opened.append(child)
            except PeerUnavailableError as error:
                self.notes.append(f"left out: {error}")
        return opened


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where models are kept")
    parser.add_argument("--quick", action="store_true", help="shorter work, one sequence")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--types", default=",".join(TYPES), help="EXPERTS+DENSE, ...")
    parser.add_argument("--layers", default="4", help="such as 4,6")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, each a case")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact")
    parser.add_argument("--batches", default="1,4,16,32", help="sequences that decode, each a case")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--first", action="store_true", help="before other sessions; needs root")
    options = parser.parse_args()
    rivals = options.rivals.split(",")
    if unknown := set(rivals) - {*RIVALS, "vllm-eager", "none"}:
        parser.error(f"--rivals: {', '.join(sorted(unknown))}: known are {', '.join(RIVALS)}, none")
    batches = [int(count) for count in ("1" if options.quick else options.batches).split(",")]
    single = 32 if options.quick else 128
    works = [Work(sequences=count, tokens=single if count == 1 else 32) for count in batches]
    works.append(Work(sequences=0, tokens=PROMPT))
    bench = Bench(
        directory=options.directory,
        plan=Plan.quick() if options.quick else Plan(burst_s=1.0),
        first=options.first,
        rivals=rivals,
        works=works,
        numerics=options.numerics,
        ceiling=HugeMemory(CEILING_BYTES),
    )
    cpus = sorted(os.sched_getaffinity(0))
    for threads in (int(count) for count in options.threads.split(",")):
        if threads > len(cpus):
            bench.notes.append(f"{threads} threads left out: there are {len(cpus)} cpus")
            continue
        for layers_count in (int(count) for count in options.layers.split(",")):
            for types in options.types.split(","):
                experts, _, dense = types.partition("+")
                bench.model(experts, dense, layers_count, cpus[:threads])
    write(bench.rows, options.json, tuple(dict.fromkeys(bench.notes)))


if __name__ == "__main__":
    main()
