"""A small filled region in memory, with every kind of tensor that a program reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from freetokend.ftw.layout import ROW_MAJOR, ROWS16, BankSpec, RegionPlan, TensorSpec, plan_region
from freetokend.ftw.packing import f32_to_bf16, pack_rows16
from freetokend.native.program import KvPages
from freetokend.tensor.pool_weights import PoolWeights

_SPECS = [
    TensorSpec(name="embed.weight", dtype="bf16", shape=(21, 10), layout=ROW_MAJOR),
    TensorSpec(name="tied.weight", dtype="bf16", shape=(21, 10), layout=ROWS16),
    TensorSpec(name="up.weight", dtype="bf16", shape=(19, 10), layout=ROWS16),
    TensorSpec(name="up.bias", dtype="f32", shape=(19,), layout=ROW_MAJOR),
    TensorSpec(name="norm.weight", dtype="f32", shape=(10,), layout=ROW_MAJOR),
    TensorSpec(name="last.weight", dtype="f32", shape=(10,), layout=ROW_MAJOR),
    TensorSpec(name="gate.weight", dtype="f32", shape=(5, 10), layout=ROW_MAJOR),
]
_BANK = BankSpec(
    format="bf16",
    record_bytes=4096,
    experts_per_layer_count=5,
    hidden_size=10,
    intermediate_size=16,
    moe_layer_indices=(0,),
    activation="silu",
)


class Region:
    """A filled region in page-aligned memory, its plan and the values in it as fp32."""

    def __init__(self) -> None:
        self.plan: RegionPlan = plan_region(_SPECS, _BANK, max_shard_bytes=1 << 26)
        raw = np.zeros(self.plan.region_bytes + 4096, dtype=np.uint8)
        start = -raw.ctypes.data % 4096
        self._bytes = raw[start : start + self.plan.region_bytes]
        self.address = self._bytes.ctypes.data
        self.values: dict[str, torch.Tensor] = {}
        draw = np.random.default_rng(0)
        for spec in _SPECS:
            values = draw.standard_normal(spec.shape, dtype=np.float32)
            packed: np.ndarray[Any, Any] = values
            if spec.dtype == "bf16":
                bits = f32_to_bf16(values)
                values = (bits.astype(np.uint32) << 16).view(np.float32)
                packed = pack_rows16(bits) if spec.layout == ROWS16 else bits
            entry = self.plan.tensors[spec.name]
            self._bytes[entry.offset_bytes : entry.end_bytes] = packed.reshape(-1).view(np.uint8)
            self.values[spec.name] = torch.from_numpy(values)

    def weights(self) -> PoolWeights:
        index: Any = SimpleNamespace(tensors=self.plan.tensors)
        return PoolWeights(self.address, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleView:
    """A PagedKvView for programs that do not attend."""

    tokens_count: int

    @property
    def pages(self) -> KvPages:
        return KvPages([], pages_count=1, kv_heads_count=1, page_tokens=16, head_size=2)

    @property
    def page_table(self) -> torch.Tensor:
        return torch.zeros(1, 1, dtype=torch.int32)

    @property
    def sequence_index(self) -> torch.Tensor:
        return torch.zeros(self.tokens_count, dtype=torch.int32)

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.tokens_count, dtype=torch.int32)

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        raise AssertionError("the program attends natively")
