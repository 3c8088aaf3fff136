"""Weights as plain tensors: shapes are checked, every tensor is used once."""

from __future__ import annotations

import pytest
import torch

from freetokend.core.errors import InternalError, ModelDataError
from freetokend.tensor.program import Matrix, Vector
from freetokend.tensor.state_dict_weights import StateDictWeights

_EMBED = Matrix(name="embed.weight", out_features=10, in_features=8)
_TIED = Matrix(name="embed.weight", out_features=10, in_features=8, shared=True)
_UP = Matrix(name="up.weight", out_features=6, in_features=8)
_UP_BIAS = Vector(name="up.bias", size=6)
_GATE = Matrix(name="gate.weight", out_features=4, in_features=8)


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(10, 8, generator=generator),
        "up.weight": torch.randn(6, 8, generator=generator),
        "up.bias": torch.randn(6, generator=generator),
        "gate.weight": torch.randn(4, 8, generator=generator),
    }


def test_everything_taken_once_leaves_nothing() -> None:
    tensors = _tensors()
    weights = StateDictWeights(tensors, torch.float32)
    assert torch.equal(weights.matrix(_EMBED), tensors["embed.weight"])
    assert torch.equal(weights.matrix(_TIED), tensors["embed.weight"])
    weights.matrix(_UP)
    weights.vector(_UP_BIAS)
    with pytest.raises(ModelDataError, match=r"gate\.weight"):
        weights.check_consumed()
    weights.exact_matrix(_GATE)
    weights.check_consumed()


def test_missing_and_misshapen_tensors_are_named() -> None:
    weights = StateDictWeights(_tensors(), torch.float32)
    with pytest.raises(ModelDataError, match=r"'down\.weight' is missing"):
        weights.matrix(Matrix(name="down.weight", out_features=6, in_features=8))
    with pytest.raises(ModelDataError, match=r"shape \[6, 8\]; config\.json asks for \[7, 8\]"):
        weights.matrix(Matrix(name="up.weight", out_features=7, in_features=8))
    with pytest.raises(ModelDataError, match=r"shape \[6\]; config\.json asks for \[8\]"):
        weights.vector(Vector(name="up.bias", size=8))


def test_a_second_use_is_a_fault_of_the_model() -> None:
    weights = StateDictWeights(_tensors(), torch.float32)
    weights.vector(_UP_BIAS)
    with pytest.raises(InternalError, match="twice"):
        weights.vector(_UP_BIAS)
    with pytest.raises(InternalError, match="before its first use"):
        weights.matrix(_TIED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_matrices_are_activations_and_vectors_are_wide(dtype: torch.dtype) -> None:
    tensors = _tensors()
    weights = StateDictWeights(tensors, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert weights.activation_dtype is dtype
    assert weights.accumulator_dtype is wide
    assert torch.equal(weights.matrix(_UP), tensors["up.weight"].to(dtype))
    bias = weights.vector(_UP_BIAS)
    assert bias.dtype is wide
    assert torch.equal(bias, tensors["up.bias"].to(dtype).to(wide))


def test_router_weights_are_not_rounded_to_bf16() -> None:
    tensors = _tensors()
    weights = StateDictWeights(tensors, torch.bfloat16)
    assert torch.equal(weights.exact_matrix(_GATE), tensors["gate.weight"])


def test_integer_weights_are_refused() -> None:
    with pytest.raises(InternalError, match="int8"):
        StateDictWeights(_tensors(), torch.int8)
