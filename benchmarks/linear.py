"""Matrix products of the dense part: one token against the read ceiling, prompts against torch.

usage: python -m benchmarks.linear [--quick] [--json FILE] [--formats bf16,int8_g32_f16] ...

Weights are cold: every call takes another of several matrices. torch's own product is the rival
with many tokens, in bf16 or fp32, whichever is faster on this machine; without torch there are no
such rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.memory import CEILING_BYTES, CeilingSide, HugeMemory
from benchmarks.random_weights import random_matrix
from benchmarks.result import Row, write
from benchmarks.rounds import CallSide, Outcome, Plan, Side, foreground, play
from freetokend.ftw.formats import WeightFormat, parse_format, rows16_bytes
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing import bf16_to_f32, f32_to_bf16
from freetokend.ftw.packing_blocks import pack_matrix
from freetokend.native.affinity import pinned_thread
from freetokend.native.executor import Executor

# [inputs, outputs]: attention of the layer that expert_layer times, two lm_heads.
SHAPES: Final = ((2048, 4096), (2048, 8192), (576, 49152))
PREFILL_SHAPE: Final = (2048, 2048)
# Of torch's product.
PREFILL_GOAL: Final = 0.9
DECODE_GOAL: Final = {"bf16": 0.88}
LARGEST_ERROR: Final = 1e-4
OURS: Final = "ours"


@dataclass(kw_only=True)
class Bench:
    """What all cases share, and their rows."""

    executor: Executor
    plan: Plan
    first: bool
    ceiling: HugeMemory
    matrices: HugeMemory
    rows: list[Row] = field(default_factory=list)

    def decode(self, weight_format: WeightFormat, inputs: int, outputs: int) -> None:
        """One token."""
        size = rows16_bytes(weight_format, outputs, inputs)
        side = CallSide(
            OURS,
            self._call(weight_format, 1, inputs, outputs),
            float(size),
            self.executor.threads_count,
        )
        ceiling = CeilingSide(self.executor, self.ceiling)
        with foreground(self.first):
            outcome = play([side], ceiling, self.plan)
        goal = DECODE_GOAL.get(str(weight_format), 0.0)
        case = f"linear {outputs}x{inputs} {weight_format} 1 token"
        self._add(case, outcome, ceiling.name, "GB/s", goal)

    def prefill(self, weight_format: WeightFormat, tokens: int) -> None:
        """A prompt, against torch."""
        inputs, outputs = PREFILL_SHAPE
        operations = 2.0 * tokens * inputs * outputs
        threads_count = self.executor.threads_count
        call = self._call(weight_format, tokens, inputs, outputs)
        ours = CallSide(OURS, call, operations, threads_count)
        rival = faster_torch_product(tokens, threads_count)
        ceiling = CeilingSide(self.executor, self.ceiling)
        with foreground(self.first):
            outcome = play([ours, rival], ceiling, self.plan)
        case = f"linear {outputs}x{inputs} {weight_format} {tokens} tokens"
        self._add(case, outcome, rival.name, "GFLOP/s", PREFILL_GOAL)

    def _add(self, case: str, outcome: Outcome, rival: str, unit: str, goal: float) -> None:
        pages = self.matrices.page_bytes
        row = outcome.row(case, OURS, rival, unit, goal, scale=1e-9, page_bytes=pages)
        self.rows.append(row)
        print(f"  {row.text()}", flush=True)

    def _call(
        self, weight_format: WeightFormat, tokens: int, inputs: int, outputs: int
    ) -> Callable[[int], None]:
        """Checked calls over matrices that fill the memory."""
        rng = np.random.default_rng(1)
        matrix = random_matrix(weight_format, outputs, inputs, rng)
        packed = pack_matrix(matrix)
        count = self.matrices.length_bytes // packed.size
        for index in range(count):
            self.matrices.array[index * packed.size : (index + 1) * packed.size] = packed
        x = f32_to_bf16(rng.standard_normal((tokens, inputs), dtype=np.float32))
        y = np.empty((tokens, outputs), np.float32)

        def call(index: int) -> None:
            self.executor.linear(
                x.ctypes.data,
                self.matrices.address + index % count * packed.size,
                y.ctypes.data,
                tokens=tokens,
                in_features=inputs,
                out_features=outputs,
                weight_format=str(weight_format),
            )

        call(0)
        wanted = dequantise(matrix, np.float32) @ bf16_to_f32(x[0])
        error = float(np.linalg.norm(y[0] - wanted) / np.linalg.norm(wanted))
        if not error <= LARGEST_ERROR:
            raise ValueError(f"linear {weight_format} is wrong: relative error {error:.2g}")
        return call


def faster_torch_product(tokens: int, threads_count: int) -> Side:
    """torch's product of the same size in the faster of bf16 and fp32."""
    import torch  # noqa: PLC0415 - optional here; the executor does without

    torch.set_num_threads(threads_count)
    inputs, outputs = PREFILL_SHAPE
    candidates: list[tuple[float, CallSide]] = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones((tokens, inputs), dtype=dtype)
        w = torch.ones((outputs, inputs), dtype=dtype)

        def call(_index: int, x: torch.Tensor = x, w: torch.Tensor = w) -> None:
            torch.nn.functional.linear(x, w)

        name = f"torch {str(dtype).removeprefix('torch.')}"
        call(0)
        start_s = time.perf_counter()
        call(1)
        elapsed_s = time.perf_counter() - start_s
        side = CallSide(name, call, 2.0 * tokens * inputs * outputs, threads_count)
        candidates.append((elapsed_s, side))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short bursts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--formats", default="bf16")
    parser.add_argument("--cpus", default="", help="such as 0,1; default: all allowed ones")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--first", action="store_true", help="before other sessions; needs root")
    options = parser.parse_args()
    chosen = [int(cpu) for cpu in options.cpus.split(",") if cpu]
    cpus = chosen or sorted(os.sched_getaffinity(0))
    with pinned_thread(cpus[0]), Executor(cpus, isa=options.isa) as executor:
        bench = Bench(
            executor=executor,
            plan=Plan.quick() if options.quick else Plan(),
            first=options.first,
            ceiling=HugeMemory(CEILING_BYTES),
            matrices=HugeMemory(512 << 20),
        )
        for name in options.formats.split(","):
            weight_format = parse_format(name)
            for inputs, outputs in SHAPES:
                if inputs % weight_format.column_multiple == 0:
                    bench.decode(weight_format, inputs, outputs)
            if importlib.util.find_spec("torch") is not None:
                bench.prefill(weight_format, 64 if options.quick else 512)
        print(f"{executor.threads_count} threads, {executor.isa}")
    write(bench.rows, options.json)


if __name__ == "__main__":
    main()
