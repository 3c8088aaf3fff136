"""A bank of random experts in an expert pool, and calls of single MoE layers through the cache.

What an engine's program does between the experts (attention, norms) is left out: these benchmarks
look at the cache and at what it does beside the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.layer_shape import LayerShape
from benchmarks.memory import PoolBank
from benchmarks.our_layer import random_expert
from freetokend.device.host_arena import HostArena
from freetokend.experts.bank import MappedBank
from freetokend.experts.cache import LAYERS_AHEAD_COUNT, CacheSpec, ExpertCache
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.formats import parse_format, record_layout
from freetokend.ftw.layout import ExpertBank
from freetokend.ftw.packing_record import pack_record
from freetokend.native.executor import Executor
from freetokend.native.program import BufferSpec, KvPages, NativeDispatch, Program, StepInputs
from freetokend.tensor.memory import tensor_at
from freetokend.traces.trace import TraceShape

# Experts whose bytes differ; a bank repeats them at addresses of its own. Coprime to the usual
# numbers of experts, so that the same expert of two layers is not the same matrix.
DISTINCT_EXPERTS: Final = 13
_X, _IDS, _WEIGHTS, _OUT = range(4)


class RandomBank:
    """Records of a whole model's experts; close it after everything that uses it."""

    def __init__(
        self, routing: TraceShape, *, hidden_size: int, intermediate_size: int, weight_format: str
    ) -> None:
        self.routing = routing
        parsed = parse_format(weight_format)
        record_bytes = record_layout(parsed, hidden_size, intermediate_size).record_bytes
        shape = LayerShape(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            experts_count=routing.experts_per_layer,
            top_k=routing.experts_per_token,
        )
        rng = np.random.default_rng(3)
        records = [pack_record(random_expert(parsed, shape, rng)) for _ in range(DISTINCT_EXPERTS)]
        self._pool = PoolBank(record_bytes * routing.experts_count)
        self._pool.fill(np.stack(records))
        self.mapped = MappedBank(
            bank=ExpertBank(
                format=weight_format,
                offset_bytes=0,
                record_bytes=record_bytes,
                moe_layers_count=routing.layers_count,
                experts_per_layer_count=routing.experts_per_layer,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                moe_layer_indices=tuple(range(routing.layers_count)),
                activation="silu",
            ),
            region_address=self._pool.address,
        )

    @property
    def bank(self) -> ExpertBank:
        return self.mapped.bank

    def cache(
        self,
        slots_count: int,
        *,
        rate_bytes_per_s: float | None = None,
        fill_misses: bool = False,
        kept_share: float | None = None,
        layers_ahead_count: int = LAYERS_AHEAD_COUNT,
    ) -> ExpertCache:
        """With so many slots, all empty; the caller closes it."""
        bank = self.bank
        cache = ExpertCache(
            self.mapped,
            HostArena(bank.experts_count * bank.record_bytes),
            CacheSpec(
                slots_capacity=bank.experts_count,
                fill_misses=fill_misses,
                rate_bytes_per_s=rate_bytes_per_s,
                kept_share=kept_share,
                layers_ahead_count=layers_ahead_count,
            ),
        )
        cache.resize(slots_count)
        return cache

    def pool_only(self) -> NativeDispatch:
        """Every expert executed in the pool, without a cache."""
        return bank_experts(self.bank, self.mapped.region_address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.__exit__(kind, error, trace)


class LayerRunner:
    """Calls of one MoE layer at a time for the same number of tokens; inputs stay as set."""

    def __init__(
        self, bank: RandomBank, executor: Executor, dispatch: NativeDispatch, tokens_count: int
    ) -> None:
        shape, hidden_size = bank.routing, bank.bank.hidden_size
        top_k = shape.experts_per_token
        self._executor = executor
        rows = (2 * hidden_size, 4 * top_k, 4 * top_k, 4 * hidden_size)
        self._program = Program(
            [BufferSpec(row_bytes=size, per_output=False) for size in rows], dispatch
        )
        with self._program.adding() as native:
            for layer in range(shape.layers_count):
                native.add_experts(
                    moe_layer_index=layer,
                    x=_X,
                    ids=_IDS,
                    weights=_WEIGHTS,
                    top_k=top_k,
                    hidden_size=hidden_size,
                    out=_OUT,
                )
        self._tokens = torch.zeros(tokens_count, dtype=torch.int64)
        self._numbers = torch.zeros(tokens_count, dtype=torch.int32)
        pages = KvPages([], pages_count=1, kv_heads_count=1, page_tokens=16, head_size=2)
        self._step = self._program.prepare(self._inputs(), pages)
        self._ids = self._buffer(_IDS, top_k, torch.int32)
        self._out = self._buffer(_OUT, hidden_size, torch.float32)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(tokens_count, hidden_size, generator=generator)
        self._buffer(_X, hidden_size, torch.bfloat16).copy_(0.3 * x)
        weights = torch.rand(tokens_count, top_k, generator=generator) + 0.1
        self._buffer(_WEIGHTS, top_k, torch.float32).copy_(weights)

    def run(self, layer: int, ids: NDArray[np.integer]) -> torch.Tensor:
        """fp32 [T, H], valid until the next call. ids: [T, k], experts of the layer."""
        self._ids.copy_(torch.from_numpy(ids.astype(np.int32)))
        self._program.run(self._executor, self._step, layer, layer + 1)
        return self._out

    def run_layers(self, ids: Sequence[NDArray[np.integer]]) -> None:
        """All layers in turn, [T, k] ids of each."""
        for layer, one in enumerate(ids):
            self.run(layer, one)

    def _buffer(self, index: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return tensor_at(self._program.buffer(index), (len(self._tokens), columns), dtype)

    def _inputs(self) -> StepInputs:
        return StepInputs(
            token_ids=self._tokens.data_ptr(),
            tokens_count=len(self._tokens),
            outputs=0,
            outputs_count=0,
            page_table=self._numbers.data_ptr(),
            sequence_index=self._numbers.data_ptr(),
            positions=self._numbers.data_ptr(),
            sequences_count=1,
            max_pages=1,
            rotations=(),
        )
