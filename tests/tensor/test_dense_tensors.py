"""Weights brought to a device: what the pool's forms mean, as bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freetokend.core.errors import ModelDataError
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.dense_tensors import dense_bytes, dense_tensors
from freetokend.tensor.state_dict_weights import StateDictWeights
from tests.support.device_model import DenseExperts, SmallShape
from tests.tensor.test_quantised_weights import COLUMNS, FORMATS, ROWS, Region, program

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["bf16", *FORMATS])
def test_every_form_is_the_bf16_next_to_what_it_means(name: str) -> None:
    region = Region(name)
    found = dense_tensors(region.address, region.index, program(), CPU)
    # The embedding serves for the projection too.
    assert set(found) == set(region.values) - {"lm_head.weight"}
    for one, tensor in found.items():
        wide = region.values[one]
        wanted = wide.float().bfloat16() if tensor.dim() == 2 else wide.float()
        assert torch.equal(tensor, wanted), one
    taken_bytes = sum(tensor.nbytes for tensor in found.values())
    assert taken_bytes + 2 * ROWS * COLUMNS == dense_bytes(region.index)


def test_what_was_brought_is_the_devices_own_and_fits_the_program() -> None:
    region = Region("bf16")
    found = dense_tensors(region.address, region.index, program(), CPU)
    kept = {name: tensor.clone() for name, tensor in found.items()}
    region._bytes[:] = 0
    assert all(torch.equal(found[name], kept[name]) for name in found)
    # The program finds each of them, and none is left over.
    CudaProgram(
        program(),
        StateDictWeights(found, torch.bfloat16),
        DenseExperts(SmallShape()),
        positions_count=1,
        device=CPU,
    )


def test_a_form_that_is_not_known_is_refused_by_name() -> None:
    region = Region("bf16")
    entries = region.index.tensors
    for changes in ({"dtype": "int3_g9"}, {"layout": "columns"}):
        region.index.tensors = entries | {"up.weight": replace(entries["up.weight"], **changes)}
        with pytest.raises(ModelDataError, match=r"up\.weight"):
            dense_tensors(region.address, region.index, program(), CPU)
