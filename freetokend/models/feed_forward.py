"""The two kinds of feed-forward block: routed experts, and one dense SwiGLU."""

from __future__ import annotations

import torch

from freetokend.core.model_config import ModelConfig
from freetokend.models.router import route
from freetokend.tensor.protocols import ExpertDispatch, WeightSource
from freetokend.tensor.rowwise import silu_product


class MoeBlock:
    """Router and dispatch; where the experts' weights are is the ExpertDispatch's business."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        experts: ExpertDispatch,
        *,
        name: str,
        moe_layer_index: int,
    ) -> None:
        self._router_config = config.router
        self._router = weights.router(
            f"{name}.gate",
            in_features=config.hidden_size,
            experts_count=config.experts_per_layer_count,
        )
        self._experts = experts
        self._moe_layer_index = moe_layer_index

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: activation dtype [T, H] -> accumulator dtype [T, H]."""
        expert_ids, expert_weights = route(self._router(x), self._router_config)
        return self._experts.dispatch(self._moe_layer_index, x, expert_ids, expert_weights)


class DenseBlock:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, weights: WeightSource, *, name: str) -> None:
        hidden, inner = config.hidden_size, config.dense_size
        self._gate = weights.linear(f"{name}.gate_proj", in_features=hidden, out_features=inner)
        self._up = weights.linear(f"{name}.up_proj", in_features=hidden, out_features=inner)
        self._down = weights.linear(f"{name}.down_proj", in_features=inner, out_features=hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: activation dtype [T, H] -> accumulator dtype [T, H]."""
        return self._down(silu_product(self._gate(x), self._up(x)).to(x.dtype))
