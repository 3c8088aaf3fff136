"""Linear layers in place in the region, in every weight format they may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from freetokend.core.errors import ModelDataError
from freetokend.ftw.formats import parse_format
from freetokend.ftw.layout import ROW_MAJOR, ROWS16, BankSpec, TensorSpec, plan_region
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing import bf16_to_f32, f32_to_bf16
from freetokend.ftw.packing_blocks import pack_blocks
from freetokend.ftw.quantise import quantise
from freetokend.native.executor import Executor
from freetokend.tensor.pool_weights import PoolWeights

ROWS, COLUMNS = 37, 256
FORMATS = (
    "fp8_block",
    "mxfp4",
    "int4_g32_f16",
    "int4_g128_bf16_zp",
    "int8_g64_bf16",
    "q4_K",
    "q6_K",
)
BANK = BankSpec(
    format="bf16",
    record_bytes=4096,
    experts_per_layer_count=1,
    hidden_size=10,
    intermediate_size=16,
    moe_layer_indices=(0,),
    activation="silu",
)


def spec(name: str, dtype: str, layout: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(ROWS, COLUMNS), layout=layout)


class Region:
    """A tied embedding in bf16, its projection `head` and a layer `up`, both in `name`."""

    def __init__(self, name: str, executor: Executor) -> None:
        specs = [
            spec("embed.weight", "bf16", ROW_MAJOR),
            spec("lm_head.weight", name, ROWS16),
            spec("up.weight", name, ROWS16),
            TensorSpec(name="up.bias", dtype="f32", shape=(ROWS,), layout=ROW_MAJOR),
        ]
        plan = plan_region(specs, BANK, max_shard_bytes=1 << 26)
        raw = np.zeros(plan.region_bytes + 4096, dtype=np.uint8)
        start = -raw.ctypes.data % 4096
        self._bytes = raw[start : start + plan.region_bytes]
        self.values: dict[str, torch.Tensor] = {}
        random = np.random.default_rng(2)
        for tensor in specs:
            values = random.standard_normal(tensor.shape, dtype=np.float32)
            packed: np.ndarray[Any, Any] = values
            if tensor.layout == ROWS16:
                matrix = quantise(values, parse_format(name))
                packed, values = pack_blocks(matrix), dequantise(matrix)
            elif tensor.dtype == "bf16":
                packed = f32_to_bf16(values)
                values = bf16_to_f32(packed)
            entry = plan.tensors[tensor.name]
            self._bytes[entry.offset_bytes : entry.end_bytes] = packed.reshape(-1).view(np.uint8)
            self.values[tensor.name] = torch.from_numpy(values).double()
        index: Any = SimpleNamespace(tensors=plan.tensors)
        self.weights = PoolWeights(self._bytes.ctypes.data, index, executor)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_layers_compute_with_what_the_format_means(name: str) -> None:
    with Executor([0]) as executor:
        region = Region(name, executor)
        x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
        up = region.weights.linear("up", in_features=COLUMNS, out_features=ROWS, bias=True)
        values = region.values
        exact = torch.addmm(values["up.bias"], x.double(), values["up.weight"].T)
        assert (up(x) - exact).norm() <= 2e-6 * exact.norm()
        ids = torch.tensor([36, 0, 7])
        embedding = region.weights.embedding("embed", rows=ROWS, features=COLUMNS)
        assert torch.equal(embedding(ids).double(), values["embed.weight"][ids])
        head = region.weights.tied_linear("embed", in_features=COLUMNS, out_features=ROWS)
        exact = x.double() @ values["lm_head.weight"].T
        assert (head(x) - exact).norm() <= 2e-6 * exact.norm()
        region.weights.check_consumed()


def test_a_projection_that_nobody_asked_for_is_left_over() -> None:
    with Executor([0]) as executor:
        region = Region("mxfp4", executor)
        region.weights.linear("up", in_features=COLUMNS, out_features=ROWS, bias=True)
        region.weights.embedding("embed", rows=ROWS, features=COLUMNS)
        with pytest.raises(ModelDataError, match=r"lm_head\.weight"):
            region.weights.check_consumed()
