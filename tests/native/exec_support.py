"""Arrays at aligned addresses, bf16 conversion and float64 references for the executor's tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetokend.native import executor as native

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bf16 = NDArray[np.uint16]
Ints = NDArray[np.int32]

ALIGNMENT = 64


def to_bf16(values: Doubles | Floats) -> Bf16:
    """Round to nearest even, as 16-bit words."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(words: Bf16) -> Doubles:
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def aligned_bytes(length_bytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(length_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + length_bytes]


def pack(matrix: Bf16) -> NDArray[np.uint8]:
    rows, columns = matrix.shape
    packed = aligned_bytes(native.rows16_bytes(rows, columns))
    matrix = np.ascontiguousarray(matrix)
    native.pack_rows16(matrix.ctypes.data, rows, columns, packed.ctypes.data)
    return packed


def relative_error(ours: NDArray[np.generic], reference: Doubles) -> float:
    """||ours - reference|| / ||reference||."""
    difference = ours.astype(np.float64) - reference
    return float(np.linalg.norm(difference) / np.linalg.norm(reference))


def linear(executor: native.Executor, x: Bf16, w: Bf16, bias: Floats | None = None) -> Floats:
    packed = pack(w)
    x = np.ascontiguousarray(x)
    y = np.full((len(x), len(w)), np.nan, np.float32)
    executor.linear(
        x.ctypes.data,
        packed.ctypes.data,
        y.ctypes.data,
        tokens=len(x),
        in_features=w.shape[1],
        out_features=w.shape[0],
        bias=0 if bias is None else bias.ctypes.data,
    )
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Bank:
    """Experts as matrices and as packed records."""

    gate: Bf16  # [E, I, H]
    up: Bf16
    down: Bf16  # [E, H, I]
    records: NDArray[np.uint8]
    record_bytes: int

    @property
    def experts_count(self) -> int:
        return int(self.gate.shape[0])

    @property
    def intermediate_size(self) -> int:
        return int(self.gate.shape[1])

    @property
    def hidden_size(self) -> int:
        return int(self.gate.shape[2])


def padded_rows(matrix: Bf16) -> Bf16:
    rows = -len(matrix) % 16
    return np.concatenate([matrix, np.zeros((rows, matrix.shape[1]), np.uint16)])


def pack_expert(gate: Bf16, up: Bf16, down: Bf16) -> NDArray[np.uint8]:
    """Gate and up blocks alternate; the down matrix has its columns padded to 16."""
    gate, up = padded_rows(gate), padded_rows(up)
    mixed = np.concatenate(
        [half[row : row + 16] for row in range(0, len(gate), 16) for half in (gate, up)]
    )
    down = np.pad(down, ((0, 0), (0, -down.shape[1] % 16)))
    return np.concatenate([pack(mixed), pack(down)])


def make_bank(
    rng: np.random.Generator, experts_count: int, hidden_size: int, intermediate_size: int
) -> Bank:
    def weights(rows: int, columns: int) -> Bf16:
        return to_bf16(rng.normal(size=(experts_count, rows, columns)) / np.sqrt(columns))

    gate = weights(intermediate_size, hidden_size)
    up = weights(intermediate_size, hidden_size)
    down = weights(hidden_size, intermediate_size)
    length_bytes = native.expert_bytes("bf16", hidden_size, intermediate_size)
    record_bytes = -(-length_bytes // 4096) * 4096
    records = aligned_bytes(experts_count * record_bytes)
    for expert in range(experts_count):
        packed = pack_expert(gate[expert], up[expert], down[expert])
        assert len(packed) == length_bytes
        start = expert * record_bytes
        records[start : start + length_bytes] = packed
    return Bank(gate=gate, up=up, down=down, records=records, record_bytes=record_bytes)


def run_experts(
    executor: native.Executor, bank: Bank, x: Bf16, expert_ids: Ints, weights: Floats
) -> Floats:
    x = np.ascontiguousarray(x)
    expert_ids = np.ascontiguousarray(expert_ids, np.int32)
    weights = np.ascontiguousarray(weights, np.float32)
    tokens, top_k = expert_ids.shape
    y = np.full((tokens, top_k, bank.hidden_size), np.nan, np.float32)
    executor.experts(
        x.ctypes.data,
        expert_ids.ctypes.data,
        weights.ctypes.data,
        y.ctypes.data,
        tokens=tokens,
        top_k=top_k,
        hidden_size=bank.hidden_size,
        intermediate_size=bank.intermediate_size,
        bank=bank.records.ctypes.data,
        record_bytes=bank.record_bytes,
        experts_count=bank.experts_count,
    )
    return y


def experts_reference(bank: Bank, x: Bf16, expert_ids: Ints, weights: Floats) -> Doubles:
    """In float64, but with the product of gate and up rounded to bf16 as the contract has it."""
    tokens, top_k = expert_ids.shape
    y = np.zeros((tokens, top_k, bank.hidden_size))
    for token in range(tokens):
        row = from_bf16(x[token])
        for slot in range(top_k):
            expert = expert_ids[token, slot]
            if expert < 0:
                continue
            gate = from_bf16(bank.gate[expert]) @ row
            up = from_bf16(bank.up[expert]) @ row
            middle = from_bf16(to_bf16(gate / (1 + np.exp(-gate)) * up))
            y[token, slot] = weights[token, slot] * (from_bf16(bank.down[expert]) @ middle)
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    q_heads: int
    kv_heads: int
    head_size: int
    page_tokens: int


class KvPages:
    """Pages of keys and values for some sequences, with page numbers in random order."""

    def __init__(
        self, rng: np.random.Generator, shape: KvShape, lengths: list[int], scale: float = 1.0
    ) -> None:
        self.shape = shape
        pages = [-(-length // shape.page_tokens) for length in lengths]
        self.max_pages = max(pages)
        self.pages_count = sum(pages) + 3
        numbers = rng.permutation(self.pages_count)
        self.table = np.full((len(lengths), self.max_pages), -1, np.int32)
        used = 0
        for sequence, count in enumerate(pages):
            self.table[sequence, :count] = numbers[used : used + count]
            used += count
        self.pages_shape = (self.pages_count, shape.kv_heads, shape.page_tokens, shape.head_size)
        # What no one has written is NaN: reading it shows.
        self.k_pages = np.full(self.pages_shape, 0x7FC0, np.uint16)
        self.v_pages = np.full(self.pages_shape, 0x7FC0, np.uint16)
        size = (shape.kv_heads, shape.head_size)
        self.k = [rng.normal(size=(n, *size), scale=scale).astype(np.float32) for n in lengths]
        self.v = [rng.normal(size=(n, *size)).astype(np.float32) for n in lengths]

    def store(self, executor: native.Executor, tokens: list[tuple[int, int]]) -> None:
        """Writes the keys and values of (sequence, position) pairs."""
        k = np.stack([self.k[sequence][position] for sequence, position in tokens])
        v = np.stack([self.v[sequence][position] for sequence, position in tokens])
        sequence_index, positions = token_arrays(tokens)
        executor.store_kv(
            k.ctypes.data,
            v.ctypes.data,
            self.k_pages.ctypes.data,
            self.v_pages.ctypes.data,
            self.table.ctypes.data,
            sequence_index.ctypes.data,
            positions.ctypes.data,
            tokens=len(tokens),
            kv_heads=self.shape.kv_heads,
            head_size=self.shape.head_size,
            page_tokens=self.shape.page_tokens,
            max_pages=self.max_pages,
            sequences_count=len(self.table),
            pages_count=self.pages_count,
        )

    def store_all(self, executor: native.Executor) -> None:
        self.store(executor, [(s, p) for s in range(len(self.k)) for p in range(len(self.k[s]))])

    def attend(
        self, executor: native.Executor, q: Floats, tokens: list[tuple[int, int]], scale: float
    ) -> Bf16:
        """q: fp32 [T, Nq, D]; returns bf16 [T, Nq * D]."""
        q = np.ascontiguousarray(q)
        out = np.full((len(tokens), self.shape.q_heads * self.shape.head_size), 0x7FC0, np.uint16)
        sequence_index, positions = token_arrays(tokens)
        executor.paged_attention(
            q.ctypes.data,
            self.k_pages.ctypes.data,
            self.v_pages.ctypes.data,
            self.table.ctypes.data,
            sequence_index.ctypes.data,
            positions.ctypes.data,
            out.ctypes.data,
            tokens=len(tokens),
            q_heads=self.shape.q_heads,
            kv_heads=self.shape.kv_heads,
            head_size=self.shape.head_size,
            page_tokens=self.shape.page_tokens,
            max_pages=self.max_pages,
            scale=scale,
            sequences_count=len(self.table),
            pages_count=self.pages_count,
        )
        return out

    def reference(self, q: Floats, tokens: list[tuple[int, int]], scale: float) -> Doubles:
        """Float64 softmax over the bf16 keys and values."""
        group = self.shape.q_heads // self.shape.kv_heads
        out = np.zeros((len(tokens), self.shape.q_heads, self.shape.head_size))
        for index, (sequence, position) in enumerate(tokens):
            k = from_bf16(to_bf16(self.k[sequence][: position + 1]))
            v = from_bf16(to_bf16(self.v[sequence][: position + 1]))
            for head in range(self.shape.q_heads):
                scores = k[:, head // group] @ q[index, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[index, head] = weights @ v[:, head // group] / weights.sum()
        return out.reshape(len(tokens), -1)


def token_arrays(tokens: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    return (
        np.array([sequence for sequence, _ in tokens], np.int32),
        np.array([position for _, position in tokens], np.int32),
    )
