"""Weights in place in the region: addresses, formats, and what is refused."""

from __future__ import annotations

import pytest
import torch

from freetokend.core.errors import ModelDataError
from freetokend.tensor.memory import tensor_at
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.program import Matrix, Vector
from tests.tensor.region import Region


@pytest.fixture
def region() -> Region:
    return Region()


@pytest.fixture
def weights(region: Region) -> PoolWeights:
    return region.weights()


def _matrix(name: str, out_features: int, in_features: int = 10, *, shared: bool = False) -> Matrix:
    return Matrix(
        name=f"{name}.weight", out_features=out_features, in_features=in_features, shared=shared
    )


def test_everything_has_its_address_and_format(region: Region, weights: PoolWeights) -> None:
    def address(name: str) -> int:
        return region.address + region.plan.tensors[name].offset_bytes

    plain = weights.embedding(_matrix("embed", 21))
    assert (plain.address, plain.rows16) == (address("embed.weight"), False)
    packed = weights.embedding(_matrix("tied", 21))
    assert (packed.address, packed.rows16) == (address("tied.weight"), True)
    again = weights.matrix(_matrix("tied", 21, shared=True))
    assert again.address == packed.address
    up = weights.matrix(_matrix("up", 19))
    assert (up.address, up.weight_format) == (address("up.weight"), "bf16")
    bias = weights.vector(Vector(name="up.bias", size=19))
    assert torch.equal(tensor_at(bias, (19,), torch.float32), region.values["up.bias"])
    weights.vector(Vector(name="norm.weight", size=10))
    weights.vector(Vector(name="last.weight", size=10))
    assert weights.exact_matrix(_matrix("gate", 5)) == address("gate.weight")
    weights.check_consumed()


def test_a_layout_that_the_kernels_do_not_read_is_refused(weights: PoolWeights) -> None:
    with pytest.raises(ModelDataError, match=r"bf16 in row_major .* a weight format in rows16"):
        weights.matrix(_matrix("embed", 21))
    with pytest.raises(ModelDataError, match=r"asks for \[19, 12\]"):
        weights.matrix(_matrix("up", 19, 12))
    with pytest.raises(ModelDataError, match=r"f32 in row_major .* need bf16"):
        weights.embedding(_matrix("gate", 5))
    with pytest.raises(ModelDataError, match=r"bf16 in rows16 .* need f32 in row_major"):
        weights.exact_matrix(_matrix("tied", 21))


def test_a_matrix_in_a_weight_format_is_taken_by_its_name(region: Region) -> None:
    entry = region.plan.tensors["up.weight"]
    object.__setattr__(entry, "dtype", "int8_g32_f16")
    assert region.weights().matrix(_matrix("up", 19)).weight_format == "int8_g32_f16"
    object.__setattr__(entry, "dtype", "int3_g9")
    with pytest.raises(ModelDataError, match="is int3_g9 in rows16"):
        region.weights().matrix(_matrix("up", 19))


def test_expert_records_are_not_left_over(region: Region, weights: PoolWeights) -> None:
    with pytest.raises(ModelDataError) as leftovers:
        weights.check_consumed()
    assert "experts" not in leftovers.value.message
    assert region.plan.bank.experts_count == 5
