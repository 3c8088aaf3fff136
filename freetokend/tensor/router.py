"""Routing: which experts a token goes to and with what weights.

One table from scoring rule to function; families differ only in the values of `RouterConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from freetokend.core.model_config import RouterConfig, RouterScoring


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


_SCORING: Final[Mapping[RouterScoring, Callable[[torch.Tensor], torch.Tensor]]] = MappingProxyType(
    {RouterScoring.SOFTMAX: _softmax}
)


def route(logits: torch.Tensor, router: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts.

    logits: fp32 (or fp64) [T, E]. Returns expert ids int32 [T, k], best first, equal scores by
    lower index, and their weights [T, k] in the logits' dtype. Scores, selection and weights are
    never rounded below that dtype.
    """
    scores = _SCORING[router.scoring](logits)
    # Stable sorting settles ties; torch.topk promises no order among equals.
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    weights = ordered[:, : router.top_k].contiguous()
    if router.renormalise:
        # A running sum takes the columns one by one; how a plain sum is cut into parts could
        # depend on the number of tokens.
        weights = weights / weights.cumsum(dim=-1)[:, -1:]
    return order[:, : router.top_k].to(torch.int32), weights
