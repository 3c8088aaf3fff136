"""Row operations give a row the same bits in any batch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from freetokend.tensor.rowwise import silu_product


@given(rows=st.integers(1, 9), size=st.integers(1, 300), seed=st.integers(0, 100))
def test_silu_product_of_a_row_does_not_depend_on_the_others(
    rows: int, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(rows, size, generator=generator) * 4
    up = torch.randn(rows, size, generator=generator)
    whole = silu_product(gate, up)
    for row in range(rows):
        alone = silu_product(gate[row : row + 1].clone(), up[row : row + 1].clone())
        assert torch.equal(alone[0], whole[row])
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert ((whole - exact).abs() <= 1e-6 * exact.abs()).all()
