"""The process of kt-kernel's side: one layer by one of its classes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.layer_shape import QWEN3, routes
from benchmarks.peers import kt_weights
from benchmarks.peers.child import serve
from benchmarks.peers.kt_weights import NATIVE, Matrix
from benchmarks.rounds import Burst, run_burst

DISTINCT_EXPERTS: Final = 4
MAX_TOKENS: Final = 512


class Layer:
    """One loaded class of kt-kernel."""

    def __init__(self, extension: Any, pool: Any, candidate: str) -> None:
        self.candidate = candidate
        self._pool = pool
        self._extension = extension
        path, _, kind = candidate.partition(":")
        rng = np.random.default_rng(3)
        shape = QWEN3
        self._mask = np.zeros(shape.experts_count, np.uint8)  # no expert is on a GPU
        self.config = extension.moe.MOEConfig(
            shape.experts_count,
            shape.top_k,
            shape.hidden_size,
            shape.intermediate_size,
            self._mask.ctypes.data,
        )
        self.config.pool = pool.backend_
        self.config.max_len = MAX_TOKENS
        sizes = 2 * [(shape.intermediate_size, shape.hidden_size)]
        sizes.append((shape.hidden_size, shape.intermediate_size))
        if path == "native":
            self._load_native(kind, [[_native(rng, kind, s) for s in sizes] for _ in range(4)])
        else:
            self._load_blocks(kind, [[_blocks(rng, kind, s) for s in sizes] for _ in range(4)])

    def _load_native(self, kind: str, experts: list[list[Matrix]]) -> None:
        form = NATIVE[kind]
        classes = [getattr(self._extension.moe, name, None) for name in form.classes]
        chosen = next((one for one in classes if one is not None), None)
        if chosen is None:
            raise ValueError(f"this build of kt-kernel has none of {', '.join(form.classes)}")
        self.candidate = chosen.__name__
        if form.bits:
            self.config.quant_config.bits = form.bits
            self.config.quant_config.group_size = form.group_size
            self.config.quant_config.zero_point = False
        order = [index % DISTINCT_EXPERTS for index in range(QWEN3.experts_count)]
        for at, name in enumerate(("gate", "up", "down")):
            codes = [experts[index][at].codes.ctypes.data for index in order]
            scales = [_address(experts[index][at].scales) for index in order]
            setattr(self.config, f"{name}_projs", [codes])
            setattr(self.config, f"{name}_scales", [scales])
        self._finish(chosen, experts)

    def _load_blocks(self, kind: str, experts: list[list[Matrix]]) -> None:
        self.config.m_block = 32
        self.config.group_min_len = 10
        self.config.group_max_len = MAX_TOKENS
        self.config.hidden_type = kt_weights.GGML_TYPE["bf16"]
        kept = []
        for at, name in enumerate(("gate", "up", "down")):
            one_of_each = np.stack([expert[at].codes for expert in experts])
            times = QWEN3.experts_count // DISTINCT_EXPERTS
            kept.append(np.concatenate(times * [one_of_each]))
            setattr(self.config, f"{name}_proj", kept[-1].ctypes.data)
            setattr(self.config, f"{name}_type", kt_weights.GGML_TYPE[kind])
        self._finish(self._extension.moe.MOE, experts)

    def _finish(self, chosen: Any, experts: list[list[Matrix]]) -> None:
        self._moe = chosen(self.config)
        order = np.arange(QWEN3.experts_count, dtype=np.int64)
        self._pool.submit(self._moe.load_weights_task(order.ctypes.data))
        self._pool.sync()
        self.values = [[matrix.values for matrix in expert] for expert in experts]

    def prepare(self, tokens: int) -> None:
        """The buffers of a batch."""
        rng = np.random.default_rng(4)
        values = rng.normal(0, 0.3, (tokens, QWEN3.hidden_size)).astype(np.float32)
        self.x = (values.view(np.uint32) >> 16).astype(np.uint16)
        self.routes = routes(QWEN3, tokens).astype(np.int64)
        self._weights = np.full((tokens, QWEN3.top_k), 1 / QWEN3.top_k, np.float32)
        self.y = np.zeros((tokens, QWEN3.hidden_size), np.uint16)
        self._tokens = np.array([tokens], np.int32)

    def call(self, index: int) -> None:
        """One layer."""
        self._pool.submit(
            self._moe.forward_task(
                self._tokens.ctypes.data,
                QWEN3.top_k,
                self.routes[index % len(self.routes)].ctypes.data,
                self._weights.ctypes.data,
                self.x.ctypes.data,
                self.y.ctypes.data,
                False,
            )
        )
        self._pool.sync()

    def error_ratio(self) -> float:
        """||y - reference|| / ||reference|| of the first token of batch 0."""
        self.call(0)
        x = _wide(self.x[0]).astype(np.float64)
        wanted = np.zeros(QWEN3.hidden_size)
        for expert in self.routes[0, 0]:
            gate, up, down = self.values[int(expert) % DISTINCT_EXPERTS]
            product = gate @ x
            wanted += down @ (product / (1 + np.exp(-product)) * (up @ x)) / QWEN3.top_k
        found = _wide(self.y[0])
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _wide(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _address(array: NDArray[np.generic] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def _native(rng: np.random.Generator, kind: str, size: tuple[int, int]) -> Matrix:
    return NATIVE[kind].make(rng, *size)


def _blocks(rng: np.random.Generator, kind: str, size: tuple[int, int]) -> Matrix:
    return kt_weights.ggml_blocks(kind, rng, *size)


def _callers() -> list[int]:
    """Threads that hand work to the workers and spin until it is done."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if not _is_worker(task)]


def _is_worker(task: Path) -> bool:
    return (task / "comm").read_text().startswith("numa_")


class KtLayer:
    """One candidate: what it cannot do ends its process."""

    def __init__(self) -> None:
        self._layer: Layer | None = None
        self._threads_count = 1
        self._next = 0

    def open(self, directory: str, candidate: str, threads_count: int) -> dict[str, object]:
        """Load a layer: "native:FORM" or "llamafile:TYPE", see `kt_weights`."""
        sys.path.insert(0, directory)
        import kt_kernel  # type: ignore[import-not-found]  # noqa: PLC0415 - a path of its own

        extension = kt_kernel.kt_kernel_ext
        workers = extension.WorkerPoolConfig()
        workers.subpool_count = 1
        workers.subpool_numa_map = [0]
        workers.subpool_thread_count = [threads_count]
        pool = extension.CPUInfer(workers)
        for thread_id in _callers():  # see kt_yield.c
            os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
        self._threads_count = threads_count
        self._layer = Layer(extension, pool, candidate)
        return {"class": self._layer.candidate, "variant": kt_kernel.__cpu_variant__}

    def batch(self, tokens: int) -> dict[str, object]:
        """The batch that bursts run; returns the error of one call."""
        assert self._layer is not None
        self._layer.prepare(tokens)
        self._next = 0
        return {"error_ratio": self._layer.error_ratio()}

    def burst(self, seconds: float) -> Burst:
        assert self._layer is not None
        burst, self._next = run_burst(
            self._layer.call,
            1.0,
            seconds,
            self._threads_count,
            first=self._next,
            ignored_ids=_callers(),
        )
        return burst


def main() -> None:
    layer = KtLayer()
    serve(layer, {"open": layer.open, "batch": layer.batch})


if __name__ == "__main__":
    main()
