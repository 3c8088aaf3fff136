"""An expert cache over a bank of random records, run through one-op programs, beside the oracle."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from freetokend.core.cache_stats import CacheCounters
from freetokend.device.host_arena import HostArena
from freetokend.experts.bank import MappedBank
from freetokend.experts.cache import CacheSpec, ExpertCache
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.ftw.layout import ExpertBank, bf16_record_bytes
from freetokend.native.executor import Executor
from freetokend.native.program import BufferSpec, KvPages, NativeDispatch, Program, StepInputs
from freetokend.tensor.memory import tensor_at
from tests.experts.records import packed, random_expert

HIDDEN, INNER = 72, 40
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBank:
    """Records that mean something; `memory` is what `mapped` points to."""

    mapped: MappedBank
    memory: mmap.mmap = field(repr=False)


def record_bank(*, layers: int = 3, experts: int = 6) -> RecordBank:
    """A bf16 bank of `layers` * `experts` random experts."""
    record_bytes = bf16_record_bytes(HIDDEN, INNER)
    bank = ExpertBank(
        format="bf16",
        offset_bytes=4096,
        record_bytes=record_bytes,
        moe_layers_count=layers,
        experts_per_layer_count=experts,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_layer_indices=tuple(range(layers)),
        activation="silu",
    )
    memory = mmap.mmap(-1, bank.offset_bytes + bank.length_bytes)
    for expert_id in range(bank.experts_count):
        start = bank.record_offset_bytes(expert_id)
        values = random_expert(HIDDEN, INNER, seed=expert_id)
        memory[start : start + record_bytes] = packed(values, record_bytes)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    return RecordBank(mapped=MappedBank(bank=bank, region_address=address), memory=memory)


def routed(
    tokens: int, top_k: int, seed: int, *, among: Sequence[int], absent_percent: int = 0
) -> Routed:
    """Random x, distinct experts of `among` per token (some -1), and weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    choices = torch.tensor(list(among), dtype=torch.int32)
    ids = torch.stack(
        [choices[torch.randperm(len(among), generator=generator)[:top_k]] for _ in range(tokens)]
    ).contiguous()
    absent = torch.randint(100, ids.shape, generator=generator) < absent_percent
    ids[absent] = -1
    return x, ids, torch.rand(tokens, ids.shape[1], generator=generator) + 0.1


class Runner:
    """A dispatch of routed experts, called through a program of one op per call."""

    def __init__(self, executor: Executor, experts: NativeDispatch) -> None:
        self._executor = executor
        self._experts = experts

    def run(self, layer: int, step: Routed) -> torch.Tensor:
        """fp32 [T, H], as `ExpertDispatch.dispatch` gives it."""
        x, ids, weights = step
        tokens, top_k = ids.shape
        row_bytes = (2 * HIDDEN, 4 * top_k, 4 * top_k, 4 * HIDDEN)
        program = Program(
            [BufferSpec(row_bytes=size, per_output=False) for size in row_bytes], self._experts
        )
        with program.adding() as native:
            native.add_experts(
                moe_layer_index=layer,
                x=0,
                ids=1,
                weights=2,
                top_k=top_k,
                hidden_size=HIDDEN,
                out=3,
            )
        token_ids = torch.zeros(tokens, dtype=torch.int64)
        numbers = torch.zeros(tokens, dtype=torch.int32)
        inputs = StepInputs(
            token_ids=token_ids.data_ptr(),
            tokens_count=tokens,
            outputs=0,
            outputs_count=0,
            page_table=numbers.data_ptr(),
            sequence_index=numbers.data_ptr(),
            positions=numbers.data_ptr(),
            sequences_count=1,
            max_pages=1,
            rotations=(),
        )
        pages = KvPages([], pages_count=1, kv_heads_count=1, page_tokens=16, head_size=2)
        prepared = program.prepare(inputs, pages)
        for number, values in enumerate((x, ids, weights)):
            tensor_at(program.buffer(number), tuple(values.shape), values.dtype).copy_(values)
        program.run(self._executor, prepared)
        return tensor_at(program.buffer(3), (tokens, HIDDEN), torch.float32).clone()


class Rig:
    """A cache, its two ways, and the executor over the whole pool as the oracle."""

    def __init__(
        self,
        bank: RecordBank,
        executor: Executor,
        *,
        slots_count: int = 0,
        fill_misses: bool = False,
        rate_bytes_per_s: float | None = None,
    ) -> None:
        self.bank = bank
        self.cache = ExpertCache(
            bank.mapped,
            HostArena(bank.mapped.bank.length_bytes),
            CacheSpec(
                slots_capacity=bank.mapped.bank.experts_count,
                fill_misses=fill_misses,
                rate_bytes_per_s=rate_bytes_per_s,
            ),
        )
        self.decoder = Runner(executor, self.cache.decode)
        self.sweeper = Runner(executor, self.cache.sweep)
        self._oracle = CpuExpertDispatch(executor, bank.mapped)
        self.cache.resize(slots_count)

    @property
    def experts(self) -> range:
        return range(self.bank.mapped.bank.experts_per_layer_count)

    def decode(self, layer: int, step: Routed) -> None:
        """One layer of a decode step: the oracle's bits."""
        assert torch.equal(self.decoder.run(layer, step), self._oracle.dispatch(layer, *step))

    def sweep(self, layer: int, step: Routed) -> None:
        """One layer of a sweep: the oracle's bits."""
        assert torch.equal(self.sweeper.run(layer, step), self._oracle.dispatch(layer, *step))

    def counters(self) -> CacheCounters:
        """The counters, which agree with each other."""
        counters = self.cache.counters()
        for layer in counters.layers:
            assert layer.misses_count == layer.fills_count + layer.cpu_count
            assert layer.evictions_count <= layer.fills_count + counters.streamed_count
        decode_fills_count = sum(layer.fills_count for layer in counters.layers)
        assert 0 <= counters.resident_count <= counters.slots_count
        assert counters.slots_count * counters.slot_bytes <= counters.committed_bytes
        assert counters.fill_bytes == counters.fills_count * counters.slot_bytes
        assert counters.fills_count <= decode_fills_count + counters.streamed_count
        return counters

    def check(self) -> None:
        """Whole: invariants, bytes, counters."""
        self.cache.check_integrity()
        report = self.cache.verify()
        assert report.differences == ()
        assert report.compared_count == self.counters().resident_count
