"""Routing: selection, ties, weights, and independence of the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.model_config import RouterConfig, RouterScoring
from freetokend.tensor.router import route


def _router(top_k: int, *, renormalise: bool) -> RouterConfig:
    return RouterConfig(scoring=RouterScoring.SOFTMAX, top_k=top_k, renormalise=renormalise)


def _logits(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 2


def test_the_best_k_in_order() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ids, weights = route(logits, _router(3, renormalise=False))
    assert ids.dtype is torch.int32
    assert ids.tolist() == [[1, 3, 2]]
    assert torch.equal(weights[0], logits.softmax(-1)[0, [1, 3, 2]])


def test_equal_scores_go_to_the_lower_index() -> None:
    ids, weights = route(torch.zeros(3, 256), _router(8, renormalise=True))
    assert ids.tolist() == [list(range(8))] * 3
    assert torch.equal(weights, torch.full((3, 8), 0.125))
    tied = torch.tensor([[1.0, 5.0, 1.0, 5.0, 1.0]])
    assert route(tied, _router(3, renormalise=True))[0].tolist() == [[1, 3, 0]]


@pytest.mark.parametrize("offset", [-1e4, -200.0, 1e4])
@pytest.mark.parametrize("renormalise", [True, False])
def test_only_differences_of_logits_count(offset: float, renormalise: bool) -> None:
    router = _router(2, renormalise=renormalise)
    logits = torch.tensor([[0.5, -1.25, 2.0, 0.0]])
    ids, weights = route(logits + offset, router)
    expected_ids, expected = route(logits, router)
    assert torch.equal(ids, expected_ids)
    assert torch.isfinite(weights).all()
    assert torch.allclose(weights, expected, rtol=2e-3)


def test_renormalised_weights_sum_to_one() -> None:
    _, weights = route(_logits(50, 128), _router(8, renormalise=True))
    assert (weights.double().sum(-1) - 1).abs().max() < 1e-6
    _, raw = route(_logits(50, 128), _router(8, renormalise=False))
    assert (raw.sum(-1) < 1).all()


@given(
    tokens=st.integers(1, 70),
    experts=st.integers(1, 260),
    top_k=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_a_token_is_routed_alike_in_any_batch(
    tokens: int, experts: int, top_k: int, seed: int
) -> None:
    router = _router(min(top_k, experts), renormalise=True)
    logits = _logits(tokens, experts, seed)
    ids, weights = route(logits, router)
    token = seed % tokens
    alone_ids, alone = route(logits[token : token + 1].clone(), router)
    assert torch.equal(alone_ids[0], ids[token])
    assert torch.equal(alone[0], weights[token])
