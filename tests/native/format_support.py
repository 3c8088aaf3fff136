"""Banks and matrices of every weight format, and what they mean in float64.

The bytes come from the converter's own packing (`freetokend.ftw`), the meaning from its
`dequantise`; the executor reads the bytes by itself. So both sides' idea of a layout is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import erf

import numpy as np

from freetokend.ftw.formats import WeightFormat, parse_format
from freetokend.ftw.matrix import QuantMatrix, dequantise
from freetokend.ftw.packing_blocks import pack_matrix
from freetokend.ftw.packing_record import ExpertMatrices, pack_record
from freetokend.ftw.quantise import nvfp4_global, quantise
from freetokend.native.executor import Executor, Numerics
from tests.native.exec_support import (
    Bf16,
    Doubles,
    Floats,
    Ints,
    aligned_bytes,
    from_bf16,
    to_bf16,
)

# One of each kind, with every group size, type of scale and zero points somewhere.
FORMATS = (
    "bf16",
    "fp8_block",
    "mxfp4",
    "nvfp4",
    "int4_g32_f16",
    "int4_g64_bf16_zp",
    "int4_g128_f16",
    "int8_g32_f16_zp",
    "int8_g64_bf16",
    "int8_g128_f16",
    "q4_K",
    "q6_K",
)
ALL_FORMATS = (
    *(name for name in FORMATS if not name.startswith("int")),
    *(
        f"int{bits}_g{group}_{scale}{zero_points}"
        for bits in (4, 8)
        for group in (32, 64, 128)
        for scale in ("f16", "bf16")
        for zero_points in ("", "_zp")
    ),
)
# Those that numerics "fast" changes.
FAST_KINDS = ("mxfp4", "nvfp4", "int4", "int8", "q4_K", "q6_K")


def is_fast(name: str, isa: str) -> bool:
    """Whether numerics "fast" differs from "exact"."""
    return isa != "portable" and name.startswith(FAST_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Glu:
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 1.702

    def of(self, gate: Doubles, up: Doubles) -> Doubles:
        if self.limit > 0:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        # Beyond 700 exp overflows, where the sigmoid is 0 for float64 too.
        held = np.maximum(gate, -400.0)
        match self.activation:
            case "silu":
                return np.asarray(gate / (1 + np.exp(-held)) * up)
            case "swiglu_oai":
                return np.asarray((up + 1) * gate / (1 + np.exp(-self.alpha * held)))
            case "gelu":
                inner = np.vectorize(erf)(gate / np.sqrt(2))
            case _:
                inner = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
        return np.asarray(0.5 * gate * (1 + inner) * up)


def random_matrix(
    rng: np.random.Generator,
    weight_format: WeightFormat,
    rows: int,
    columns: int,
    spread: float,
) -> QuantMatrix:
    """Normal numbers of standard deviation `spread`, quantised."""
    values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(spread)
    largest = float(np.abs(values).max())
    factor = nvfp4_global(largest) if weight_format.has_global else 1.0
    return quantise(values, weight_format, global_scale=factor)


def activations(rng: np.random.Generator, tokens: int, features: int, spread: float = 1.0) -> Bf16:
    """Normal numbers, none of which lies between two int8 codes of numerics "fast"."""
    words = to_bf16(rng.normal(size=(tokens, features)) * spread)
    for first in range(0, features, 32):
        group = words[:, first : first + 32]
        magnitudes = np.abs(from_bf16(group))
        # Half of the largest is 63.5 steps; nothing else in bf16 is half a step off.
        group[magnitudes == magnitudes.max(axis=1, keepdims=True) / 2] += 1
    return words


def routing(
    rng: np.random.Generator, tokens: int, top_k: int, experts_count: int
) -> tuple[Ints, Floats]:
    ids = np.stack([rng.permutation(experts_count)[:top_k] for _ in range(tokens)])
    return ids.astype(np.int32), rng.uniform(0.05, 1, size=ids.shape).astype(np.float32)


def rounded_to_int8(x: Doubles) -> Doubles:
    """What numerics "fast" makes of activations [T, K]: int8 per 32 columns, largest / 127."""
    tokens, columns = x.shape
    padded = np.pad(x, ((0, 0), (0, -columns % 32))).reshape(tokens, -1, 32).astype(np.float32)
    largest = np.abs(padded).max(axis=2, keepdims=True)
    inverse = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    codes = np.rint(padded.astype(np.float64) * inverse)
    values = codes * (largest / np.float32(127)).astype(np.float64)
    return np.asarray(values.reshape(tokens, -1)[:, :columns])


def random_expert(
    rng: np.random.Generator, name: str, hidden: int, inner: int, spread: float, has_bias: bool
) -> ExpertMatrices:
    # Each with a spread, so a factor, of its own: who mixes them up shows.
    gate, up, down = (
        random_matrix(rng, parse_format(name), rows, columns, spread * factor)
        for rows, columns, factor in (
            (inner, hidden, 1.0),
            (inner, hidden, 0.5),
            (hidden, inner, 2.0),
        )
    )
    biases = None
    if has_bias:
        of_gate, of_up, of_down = (
            rng.standard_normal(size, dtype=np.float32) for size in (inner, inner, hidden)
        )
        biases = (of_gate, of_up, of_down)
    return ExpertMatrices(gate=gate, up=up, down=down, biases=biases)


class FormatBank:
    """Experts of one format, random ones if not given, as records in memory."""

    def __init__(
        self,
        rng: np.random.Generator,
        name: str,
        *,
        experts_count: int,
        hidden_size: int,
        intermediate_size: int,
        spread: float = 0.02,
        has_bias: bool = False,
    ) -> None:
        sizes = hidden_size, intermediate_size
        self._hold(
            name,
            [random_expert(rng, name, *sizes, spread, has_bias) for _ in range(experts_count)],
        )

    @classmethod
    def of(cls, name: str, experts: list[ExpertMatrices]) -> FormatBank:
        """A bank of experts that exist already."""
        bank = cls.__new__(cls)
        bank._hold(name, experts)
        return bank

    def _hold(self, name: str, experts: list[ExpertMatrices]) -> None:
        self.name = name
        self.experts = experts
        self.experts_count = len(experts)
        self.hidden_size = experts[0].down.rows_count
        self.intermediate_size = experts[0].gate.rows_count
        self.has_bias = experts[0].biases is not None
        self.records, self.record_bytes = in_memory(experts)

    @cached_property
    def meaning(self) -> list[tuple[Doubles, Doubles, Doubles]]:
        return [(dequantise(e.gate), dequantise(e.up), dequantise(e.down)) for e in self.experts]

    def middle(self, x: Bf16, expert: int, glu: Glu, *, fast: bool = False) -> Doubles:
        """act(gate x) * up x, [T, I], not rounded."""
        values = rounded_to_int8(from_bf16(x)) if fast else from_bf16(x)
        of_gate, of_up, _ = self.meaning[expert]
        gate, up = values @ of_gate.T, values @ of_up.T
        biases = self.experts[expert].biases
        if biases is not None:
            gate, up = gate + biases[0], up + biases[1]
        return glu.of(gate, up)

    def down(self, middle: Doubles, expert: int) -> Doubles:
        y: Doubles = middle @ self.meaning[expert][2].T
        biases = self.experts[expert].biases
        return y if biases is None else y + biases[2]

    def reference(
        self, x: Bf16, ids: Ints, weights: Floats, glu: Glu, *, rounded: bool, fast: bool = False
    ) -> Doubles:
        """[T, k, H]. rounded: the product of gate and up is rounded to bf16, as the contract says;
        fast: activations are rounded to int8 as well, as numerics "fast" does."""
        y = np.zeros((*ids.shape, self.hidden_size))
        for expert in range(self.experts_count):
            tokens, slots = np.nonzero(ids == expert)
            if not tokens.size:
                continue
            middle = self.middle(x[tokens], expert, glu, fast=fast)
            if rounded:
                middle = from_bf16(to_bf16(middle))
            if fast:
                middle = rounded_to_int8(middle)
            y[tokens, slots] = weights[tokens, slots, None] * self.down(middle, expert)
        return y

    def run(
        self,
        executor: Executor,
        x: Bf16,
        ids: Ints,
        weights: Floats,
        glu: Glu | None = None,
        numerics: Numerics = "exact",
    ) -> Floats:
        glu = glu or Glu()
        x, ids = np.ascontiguousarray(x), np.ascontiguousarray(ids)
        weights = np.ascontiguousarray(weights)
        y = np.full((*ids.shape, self.hidden_size), np.nan, np.float32)
        executor.experts(
            x.ctypes.data,
            ids.ctypes.data,
            weights.ctypes.data,
            y.ctypes.data,
            tokens=len(ids),
            top_k=ids.shape[1],
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            bank=self.records.ctypes.data,
            record_bytes=self.record_bytes,
            experts_count=self.experts_count,
            weight_format=self.name,
            has_bias=self.has_bias,
            activation=glu.activation,
            activation_limit=glu.limit,
            activation_alpha=glu.alpha,
            numerics=numerics,
        )
        return y


def in_memory(experts: list[ExpertMatrices]) -> tuple[np.ndarray, int]:
    """Their records one after the other, and the bytes of each."""
    packed = np.concatenate([pack_record(expert) for expert in experts])
    records = aligned_bytes(packed.size)
    records[:] = packed
    return records, packed.size // len(experts)


class FormatMatrix:
    """A random linear layer of one format."""

    def __init__(
        self, rng: np.random.Generator, name: str, rows: int, columns: int, spread: float = 0.02
    ) -> None:
        self.name = name
        matrix = random_matrix(rng, parse_format(name), rows, columns, spread)
        self.meaning: Doubles = dequantise(matrix)
        packed = pack_matrix(matrix)
        self._memory = aligned_bytes(packed.size)
        self._memory[:] = packed

    def run(
        self,
        executor: Executor,
        x: Bf16,
        numerics: Numerics = "exact",
        bias: Floats | None = None,
    ) -> Floats:
        x = np.ascontiguousarray(x)
        rows, columns = self.meaning.shape
        y = np.full((len(x), rows), np.nan, np.float32)
        executor.linear(
            x.ctypes.data,
            self._memory.ctypes.data,
            y.ctypes.data,
            tokens=len(x),
            in_features=columns,
            out_features=rows,
            bias=0 if bias is None else bias.ctypes.data,
            weight_format=self.name,
            numerics=numerics,
        )
        return y


def worst_row(ours: Floats, reference: Doubles) -> float:
    """The largest ||ours - reference|| / ||reference|| of any row (last axis)."""
    difference = np.linalg.norm(ours.astype(np.float64) - reference, axis=-1)
    return float((difference / np.linalg.norm(reference, axis=-1)).max())
