"""Our side of the layer benchmarks: expert records in a pool, and the executor's calls on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.layer_shape import LayerShape, distinct_experts, routes
from benchmarks.memory import PoolBank
from benchmarks.random_weights import random_matrix
from freetokend.ftw.formats import WeightFormat, record_layout
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing import bf16_to_f32, f32_to_bf16
from freetokend.ftw.packing_record import ExpertMatrices, pack_record
from freetokend.native.executor import Executor

# Experts that differ; the others repeat them, at addresses of their own.
DISTINCT_EXPERTS: Final = 4
# ||y - reference|| / ||reference||: rounding of the inner activations to bf16, and to int8 per 32.
EXACT_ERROR: Final = 4e-3
FAST_ERROR: Final = 2e-2
Numerics = Literal["exact", "fast"]


def random_expert(
    weight_format: WeightFormat, shape: LayerShape, rng: np.random.Generator
) -> ExpertMatrices:
    """One expert without biases."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return ExpertMatrices(
        gate=random_matrix(weight_format, inner, hidden, rng),
        up=random_matrix(weight_format, inner, hidden, rng),
        down=random_matrix(weight_format, hidden, inner, rng),
    )


class OurLayer:
    """A bank of one format and the calls on it. The bank stays the caller's."""

    def __init__(
        self, shape: LayerShape, weight_format: WeightFormat, numerics: Numerics = "exact"
    ) -> None:
        self.shape = shape
        self.format = weight_format
        self.numerics: Numerics = numerics
        layout = record_layout(weight_format, shape.hidden_size, shape.intermediate_size)
        self.record_bytes = layout.record_bytes
        self.payload_bytes = layout.payload_bytes
        self.bank_bytes = layout.record_bytes * shape.experts_count
        rng = np.random.default_rng(11)
        self._experts = [random_expert(weight_format, shape, rng) for _ in range(DISTINCT_EXPERTS)]

    def fill(self, bank: PoolBank) -> None:
        """Write the records."""
        bank.fill(np.stack([pack_record(expert) for expert in self._experts]))

    def layer_bytes(self, tokens: int) -> float:
        """Weight bytes that a batch must read."""
        return self.payload_bytes * distinct_experts(routes(self.shape, tokens))

    def call(self, executor: Executor, bank: PoolBank, tokens: int) -> Callable[[int], None]:
        """One layer: the outputs of the experts and their sum."""
        route = routes(self.shape, tokens)
        x, weights = self._inputs(tokens)
        y = np.empty((tokens, self.shape.top_k, self.shape.hidden_size), np.float32)
        out = np.empty((tokens, self.shape.hidden_size), np.float32)

        def run(index: int) -> None:
            self._run(executor, bank, (x, route[index % len(route)], weights, y))
            executor.merge(
                y.ctypes.data,
                out.ctypes.data,
                tokens=tokens,
                top_k=self.shape.top_k,
                hidden_size=self.shape.hidden_size,
            )

        return run

    def check(self, executor: Executor, bank: PoolBank, tokens: int) -> float:
        """||y - reference|| / ||reference|| of one token in a batch. Raises ValueError if wrong.

        The reference is float64 on what the codes mean.
        """
        route = routes(self.shape, tokens)[0]
        x, weights = self._inputs(tokens)
        y = np.empty((tokens, self.shape.top_k, self.shape.hidden_size), np.float32)
        self._run(executor, bank, (x, route, weights, y))
        token = tokens // 2
        wanted = sum(self._reference(int(expert), x[token]) for expert in route[token])
        found = y[token].sum(axis=0, dtype=np.float64)
        scale = float(weights[token, 0])
        error = float(np.linalg.norm(found - scale * wanted) / np.linalg.norm(scale * wanted))
        bound = EXACT_ERROR if self.numerics == "exact" else FAST_ERROR
        if not error <= bound:
            raise ValueError(
                f"{self.format} with {tokens} tokens on {executor.isa} is wrong: relative error "
                f"{error:.2g}, above {bound:g}"
            )
        return error

    def _inputs(self, tokens: int) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        rng = np.random.default_rng(5)
        values = rng.standard_normal((tokens, self.shape.hidden_size), dtype=np.float32)
        weights = np.full((tokens, self.shape.top_k), 1 / self.shape.top_k, np.float32)
        return f32_to_bf16(values * np.float32(0.3)), weights

    def _run(
        self,
        executor: Executor,
        bank: PoolBank,
        arrays: tuple[
            NDArray[np.uint16], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]
        ],
    ) -> None:
        x, ids, weights, y = arrays
        executor.experts(
            x.ctypes.data,
            ids.ctypes.data,
            weights.ctypes.data,
            y.ctypes.data,
            tokens=len(ids),
            top_k=self.shape.top_k,
            hidden_size=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            bank=bank.address,
            record_bytes=self.record_bytes,
            experts_count=self.shape.experts_count,
            weight_format=str(self.format),
            numerics=self.numerics,
        )

    def _reference(self, expert: int, x: NDArray[np.uint16]) -> NDArray[np.float64]:
        matrices = self._experts[expert % DISTINCT_EXPERTS]
        gate, up, down = (
            dequantise(one, np.float64) for one in (matrices.gate, matrices.up, matrices.down)
        )
        values = bf16_to_f32(x).astype(np.float64)
        product = gate @ values
        result: NDArray[np.float64] = down @ (product / (1 + np.exp(-product)) * (up @ values))
        return result
