"""Weights as plain tensors: shapes are checked, every tensor is used once, sums are wide."""

from __future__ import annotations

import pytest
import torch

from freetokend.core.errors import InternalError, ModelDataError
from freetokend.tensor.state_dict_weights import StateDictWeights


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(10, 8, generator=generator),
        "up.weight": torch.randn(6, 8, generator=generator),
        "up.bias": torch.randn(6, generator=generator),
        "norm.weight": torch.randn(8, generator=generator),
        "gate.weight": torch.randn(4, 8, generator=generator),
    }


def test_everything_taken_once_leaves_nothing() -> None:
    weights = StateDictWeights(_tensors(), torch.float32)
    weights.embedding("embed", rows=10, features=8)
    weights.tied_linear("embed", in_features=8, out_features=10)
    up = weights.linear("up", in_features=8, out_features=6, bias=True)
    weights.norm("norm", size=8, eps=1e-6)
    with pytest.raises(ModelDataError, match=r"gate\.weight"):
        weights.check_consumed()
    weights.router("gate", in_features=8, experts_count=4)
    weights.check_consumed()
    assert (up.in_features, up.out_features) == (8, 6)


def test_a_bias_that_the_model_does_not_ask_for_is_left_over() -> None:
    weights = StateDictWeights(_tensors(), torch.float32)
    weights.linear("up", in_features=8, out_features=6)
    with pytest.raises(ModelDataError, match=r"up\.bias"):
        weights.check_consumed()


def test_missing_and_misshapen_tensors_are_named() -> None:
    weights = StateDictWeights(_tensors(), torch.float32)
    with pytest.raises(ModelDataError, match=r"'down\.weight' is missing"):
        weights.linear("down", in_features=8, out_features=6)
    with pytest.raises(ModelDataError, match=r"shape \[6, 8\]; config\.json asks for \[7, 8\]"):
        weights.linear("up", in_features=8, out_features=7)


def test_a_second_use_is_a_fault_of_the_model() -> None:
    weights = StateDictWeights(_tensors(), torch.float32)
    weights.norm("norm", size=8, eps=1e-6)
    with pytest.raises(InternalError, match="twice"):
        weights.norm("norm", size=8, eps=1e-6)
    with pytest.raises(InternalError, match="before its first use"):
        weights.tied_linear("embed", in_features=8, out_features=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_are_in_the_accumulator_dtype(dtype: torch.dtype) -> None:
    tensors = _tensors()
    weights = StateDictWeights(tensors, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert weights.accumulator_dtype is wide
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = weights.linear("up", in_features=8, out_features=6, bias=True)(x)
    assert y.dtype is wide
    exact = torch.addmm(
        tensors["up.bias"].to(dtype).double(),
        x.double(),
        tensors["up.weight"].to(dtype).double().T,
    )
    assert torch.allclose(y.double(), exact, rtol=1e-5)
    assert weights.norm("norm", size=8, eps=1e-6)(y.new_ones(2, 8)).dtype is dtype
    assert weights.embedding("embed", rows=10, features=8)(torch.tensor([1, 2])).dtype is wide


def test_router_weights_are_not_rounded_to_bf16() -> None:
    tensors = _tensors()
    weights = StateDictWeights(tensors, torch.bfloat16)
    x = torch.eye(8, dtype=torch.bfloat16)
    logits = weights.router("gate", in_features=8, experts_count=4)(x)
    assert torch.equal(logits, tensors["gate.weight"].T)


def test_integer_weights_are_refused() -> None:
    with pytest.raises(InternalError, match="int8"):
        StateDictWeights(_tensors(), torch.int8)
