"""How fast the bf16 executor is: decode against the memory's read ceiling, prefill against torch.

usage: python -m benchmarks.executor_bf16 [--quick] [--json FILE] [--cpus 0,1] [--isa NAME]

Ours and the rival alternate within each round; a row holds medians over the rounds. The ceiling is
the same threads streaming the same memory. Weights are cold: every call takes other experts, or
another of several matrices, over more memory than the caches hold. The prefill rival is torch's
own matrix product, in bf16 or fp32, whichever is faster on this machine; without torch there are
no prefill rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.result import Row, write
from freetokend.native.executor import Executor, expert_bytes, rows16_bytes

HUGE_PAGE_BYTES: Final = 2 << 20
# Of the read ceiling, at batch 1: the goal for bf16 weights.
DECODE_GOAL_RATIO: Final = 0.88
# Of torch's product of plain matrices of the same size: experts also gather and activate.
PREFILL_GOAL_RATIO: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One MoE layer."""

    name: str
    hidden_size: int
    intermediate_size: int
    experts_count: int
    top_k: int

    @property
    def record_bytes(self) -> int:
        return -(-expert_bytes("bf16", self.hidden_size, self.intermediate_size) // 4096) * 4096


SHAPES: Final = (
    Shape(name="qwen3", hidden_size=2048, intermediate_size=768, experts_count=128, top_k=8),
    Shape(name="demo", hidden_size=576, intermediate_size=1536, experts_count=128, top_k=2),
)


class Memory:
    """Anonymous memory on huge pages where the kernel gives them, filled with small bf16 values."""

    def __init__(self, length_bytes: int) -> None:
        size = -(-length_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._map = mmap.mmap(
            -1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(self._map, np.uint8)
        start = -memory.ctypes.data % HUGE_PAGE_BYTES
        self.array: NDArray[np.uint16] = memory[start : start + size].view(np.uint16)
        pattern = np.random.default_rng(0).integers(0, 2**16, size=1 << 20, dtype=np.uint16)
        pattern = (pattern & np.uint16(0x807F)) | np.uint16(0x3C00)  # +-(0.0078 .. 0.0156)
        for first in range(0, len(self.array), len(pattern)):
            part = self.array[first : first + len(pattern)]
            part[:] = pattern[: len(part)]
        self.address = int(self.array.ctypes.data)
        self.length_bytes = size


def seconds_per_call(call: Callable[[int], None], burst_s: float) -> float:
    """Mean over a burst of calls numbered from 0, after a short warm-up."""
    for index in range(3):
        call(index)
    count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < burst_s:
        call(count)
        count += 1
    return elapsed / count


class Bench:
    """One executor and the memory that all cases read."""

    def __init__(self, executor: Executor, *, rounds: int, burst_s: float) -> None:
        self._executor = executor
        self._rounds = rounds
        self._burst_s = burst_s
        self._memory = Memory(max(s.record_bytes * s.experts_count for s in SHAPES))
        self.rows: list[Row] = []

    def _compare(
        self,
        case: str,
        ours: tuple[float, Callable[[int], None]],
        rival: tuple[str, float, Callable[[int], None]],
        unit: str,
        goal: float,
    ) -> None:
        """Both sides: the amount of work of one call (bytes or operations) and the call."""
        amount, call = ours
        rival_name, rival_amount, rival_call = rival
        rates, rival_rates, ratios = [], [], []
        for _ in range(self._rounds):
            rates.append(amount / seconds_per_call(call, self._burst_s) / 1e9)
            rival_rates.append(rival_amount / seconds_per_call(rival_call, self._burst_s) / 1e9)
            ratios.append(rates[-1] / rival_rates[-1])
        self.rows.append(
            Row(
                case=case,
                ours=statistics.median(rates),
                rival=rival_name,
                rival_value=statistics.median(rival_rates),
                unit=unit,
                ratio=statistics.median(ratios),
                goal=goal,
            )
        )

    def _read_call(self) -> tuple[str, float, Callable[[int], None]]:
        piece_bytes = min(self._memory.length_bytes, 64 << 20)
        pieces = self._memory.length_bytes // piece_bytes

        def read(index: int) -> None:
            address = self._memory.address + index % pieces * piece_bytes
            self._executor.stream_read(address, piece_bytes)

        return "read ceiling", piece_bytes, read

    def _experts_call(self, shape: Shape, tokens: int) -> Callable[[int], None]:
        rng = np.random.default_rng(1)
        experts = [
            np.concatenate([rng.permutation(shape.experts_count) for _ in range(shape.top_k)])
            for _ in range(4)
        ]
        order = np.concatenate(experts).astype(np.int32)
        x = np.full((tokens, shape.hidden_size), 0x3F80, np.uint16)
        weights = np.full((tokens, shape.top_k), 0.1, np.float32)
        y = np.empty((tokens, shape.top_k, shape.hidden_size), np.float32)
        batches = len(order) // (tokens * shape.top_k)

        def call(index: int) -> None:
            first = index % batches * tokens * shape.top_k
            self._executor.experts(
                x.ctypes.data,
                order.ctypes.data + 4 * first,
                weights.ctypes.data,
                y.ctypes.data,
                tokens=tokens,
                top_k=shape.top_k,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                bank=self._memory.address,
                record_bytes=shape.record_bytes,
                experts_count=shape.experts_count,
            )

        return call

    def _linear_call(self, tokens: int, inputs: int, outputs: int) -> Callable[[int], None]:
        x = np.full((tokens, inputs), 0x3F80, np.uint16)
        y = np.empty((tokens, outputs), np.float32)
        matrix_bytes = rows16_bytes(outputs, inputs)
        matrices = self._memory.length_bytes // matrix_bytes

        def call(index: int) -> None:
            self._executor.linear(
                x.ctypes.data,
                self._memory.address + index * 7 % matrices * matrix_bytes,
                y.ctypes.data,
                tokens=tokens,
                in_features=inputs,
                out_features=outputs,
            )

        return call

    def decode(self) -> None:
        for shape in SHAPES:
            record_bytes = expert_bytes("bf16", shape.hidden_size, shape.intermediate_size)
            self._compare(
                f"experts {shape.name} 1 token",
                (record_bytes * shape.top_k, self._experts_call(shape, 1)),
                self._read_call(),
                "GB/s",
                DECODE_GOAL_RATIO,
            )
        for inputs, outputs in ((2048, 8192), (576, 49152)):
            self._compare(
                f"linear {outputs}x{inputs} 1 token",
                (rows16_bytes(outputs, inputs), self._linear_call(1, inputs, outputs)),
                self._read_call(),
                "GB/s",
                DECODE_GOAL_RATIO,
            )

    def prefill(self, tokens: int) -> None:
        shape = SHAPES[0]
        rival = faster_torch_product(tokens, self._executor.threads_count)
        self._compare(
            f"linear 2048x2048 {tokens} tokens",
            (2 * tokens * 2048 * 2048, self._linear_call(tokens, 2048, 2048)),
            rival,
            "GFLOP/s",
            PREFILL_GOAL_RATIO,
        )
        operations = 6 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size
        self._compare(
            f"experts {shape.name} {tokens} tokens",
            (operations, self._experts_call(shape, tokens)),
            rival,
            "GFLOP/s",
            PREFILL_GOAL_RATIO,
        )


def faster_torch_product(
    tokens: int, threads_count: int
) -> tuple[str, float, Callable[[int], None]]:
    """torch's [tokens, 2048] x [2048, 2048]: name, operations, call."""
    import torch  # noqa: PLC0415 - optional here; the executor does without

    torch.set_num_threads(threads_count)
    candidates = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones((tokens, 2048), dtype=dtype)
        w = torch.ones((2048, 2048), dtype=dtype)

        def call(_index: int, x: torch.Tensor = x, w: torch.Tensor = w) -> None:
            torch.nn.functional.linear(x, w)

        name = str(dtype).removeprefix("torch.")
        candidates.append((seconds_per_call(call, 0.1), f"torch {name}", call))
    _, name, fastest = min(candidates, key=lambda candidate: candidate[0])
    return name, 2 * tokens * 2048 * 2048, fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter bursts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--cpus", default="", help="such as 0,1; default: all allowed ones")
    parser.add_argument("--isa", default="auto")
    options = parser.parse_args()
    chosen = [int(cpu) for cpu in options.cpus.split(",") if cpu]
    cpus = chosen or sorted(os.sched_getaffinity(0))
    with Executor(cpus, isa=options.isa) as executor:
        bench = Bench(
            executor,
            rounds=5 if options.quick else 9,
            burst_s=0.05 if options.quick else 0.4,
        )
        bench.decode()
        if importlib.util.find_spec("torch") is not None:
            bench.prefill(64 if options.quick else 512)
        print(f"{executor.threads_count} threads, {executor.isa}")
    write(bench.rows, options.json)


if __name__ == "__main__":
    main()
