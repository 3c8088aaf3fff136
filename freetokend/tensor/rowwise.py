"""Elementwise operations whose results do not depend on the number of rows.

torch computes exp in vectors and finishes what is left of a flattened tensor with another exp, so
an element's last bit depends on where it lies. Sums, products and conversions are exact IEEE
operations and need no such care.
"""

from __future__ import annotations

import torch


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up: [T, N] -> silu(gate) * up, each row computed by itself."""
    activated = torch.empty_like(gate)
    for row in range(gate.shape[0]):
        torch.sigmoid(gate[row], out=activated[row])
    return activated.mul_(gate).mul_(up)
