"""Weights in place in the region: layouts, refusals, and the router's exact products."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from freetokend.core.errors import InternalError, ModelDataError
from freetokend.ftw.layout import ROW_MAJOR, ROWS16, BankSpec, RegionPlan, TensorSpec, plan_region
from freetokend.ftw.packing import f32_to_bf16, pack_rows16
from freetokend.native.executor import Executor
from freetokend.tensor.memory import address_of, tensor_at
from freetokend.tensor.pool_weights import PoolWeights

_SPECS = [
    TensorSpec(name="embed.weight", dtype="bf16", shape=(21, 10), layout=ROW_MAJOR),
    TensorSpec(name="tied.weight", dtype="bf16", shape=(21, 10), layout=ROWS16),
    TensorSpec(name="up.weight", dtype="bf16", shape=(19, 10), layout=ROWS16),
    TensorSpec(name="up.bias", dtype="f32", shape=(19,), layout=ROW_MAJOR),
    TensorSpec(name="norm.weight", dtype="f32", shape=(10,), layout=ROW_MAJOR),
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


class _Region:
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

    def weights(self, executor: Executor) -> PoolWeights:
        index: Any = SimpleNamespace(tensors=self.plan.tensors)
        return PoolWeights(self.address, index, executor)


@pytest.fixture
def region() -> _Region:
    return _Region()


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor([0]) as one:
        yield one


def test_products_and_look_ups_use_the_region(region: _Region, executor: Executor) -> None:
    weights = region.weights(executor)
    x = torch.randn(7, 10, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    ids = torch.tensor([20, 0, 7, 7])
    values = region.values
    y = weights.linear("up", in_features=10, out_features=19, bias=True)(x)
    exact = torch.addmm(values["up.bias"].double(), x.double(), values["up.weight"].double().T)
    assert torch.linalg.vector_norm(y - exact) <= 1e-6 * torch.linalg.vector_norm(exact)
    plain = weights.embedding("embed", rows=21, features=10)(ids)
    assert torch.equal(plain, values["embed.weight"][ids])
    packed = weights.embedding("tied", rows=21, features=10)(ids)
    assert torch.equal(packed, values["tied.weight"][ids])
    logits = weights.tied_linear("tied", in_features=10, out_features=21)(x)
    exact = x.double() @ values["tied.weight"].double().T
    assert torch.linalg.vector_norm(logits - exact) <= 1e-6 * torch.linalg.vector_norm(exact)
    wide = torch.randn(3, 10, generator=torch.Generator().manual_seed(4))
    normed = weights.norm("norm", size=10, eps=1e-6)(wide)
    exact = torch.nn.functional.rms_norm(
        wide.double(), (10,), values["norm.weight"].double(), eps=1e-6
    )
    assert ((normed - exact).abs() <= 2**-8 * exact.abs()).all()
    weights.router("gate", in_features=10, experts_count=5)
    weights.check_consumed()


def test_nothing_of_the_region_but_the_router_is_copied(
    region: _Region, executor: Executor
) -> None:
    up = region.weights(executor).linear("up", in_features=10, out_features=19)
    x = torch.ones(1, 10, dtype=torch.bfloat16)
    before = up(x)
    entry = region.plan.tensors["up.weight"]
    ctypes.memset(region.address + entry.offset_bytes, 0, entry.length_bytes)
    assert before.any()
    assert not up(x).any()


@pytest.mark.parametrize("bits_kept", [7, 10, 23])
def test_router_products_have_fp32_weights(
    region: _Region, executor: Executor, bits_kept: int
) -> None:
    """Weights of bf16, fp16 and fp32 precision: one, two and three bf16 parts, all exact."""
    entry = region.plan.tensors["gate.weight"]
    gate = tensor_at(region.address + entry.offset_bytes, (5, 10), torch.float32)
    mask = -1 << (23 - bits_kept)
    gate.copy_((gate.view(torch.int32) & mask).view(torch.float32))
    router = region.weights(executor).router("gate", in_features=10, experts_count=5)
    assert torch.equal(router(torch.eye(10, dtype=torch.bfloat16)), gate.T)
    x = torch.randn(33, 10, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    logits = router(x)
    exact = x.double() @ gate.double().T
    scale = x.double().abs() @ gate.double().abs().T
    assert ((logits - exact).abs() <= 1e-6 * scale).all()
    for row in range(33):
        assert torch.equal(router(x[row : row + 1])[0], logits[row])


def test_a_layout_that_the_kernels_do_not_read_is_refused(
    region: _Region, executor: Executor
) -> None:
    with pytest.raises(ModelDataError, match="row_major"):
        region.weights(executor).linear("embed", in_features=10, out_features=21)
    with pytest.raises(ModelDataError, match=r"asks for \[19, 12\]"):
        region.weights(executor).linear("up", in_features=12, out_features=19)


def test_expert_records_are_not_left_over(region: _Region, executor: Executor) -> None:
    weights = region.weights(executor)
    with pytest.raises(ModelDataError) as leftovers:
        weights.check_consumed()
    assert "experts" not in leftovers.value.message
    assert region.plan.bank.experts_count == 5


@pytest.mark.parametrize("name", ["embed", "tied"])
@pytest.mark.parametrize("token_id", [-1, 21])
def test_ids_outside_the_vocabulary_never_reach_memory(
    region: _Region, executor: Executor, name: str, token_id: int
) -> None:
    embedding = region.weights(executor).embedding(name, rows=21, features=10)
    with pytest.raises(InternalError, match="vocabulary of 21"):
        embedding(torch.tensor([3, token_id]))


def test_native_calls_get_what_they_were_made_for(region: _Region, executor: Executor) -> None:
    up = region.weights(executor).linear("up", in_features=10, out_features=19)
    with pytest.raises(InternalError, match="rows of 12"):
        up(torch.ones(1, 12, dtype=torch.bfloat16))
    with pytest.raises(InternalError, match="bfloat16"):
        up(torch.ones(1, 10))
    with pytest.raises(InternalError, match="contiguous"):
        address_of(torch.ones(4, 4).T, torch.float32)
