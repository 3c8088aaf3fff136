"""Rotations: the frequencies of each kind, and independence of how the table came to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

from freetokend.core.model_config import parse_model_config
from freetokend.tensor.rope import RopeTable, inverse_frequencies, rotate
from tests.models.checkpoints import SHAPES

_BASE = next(shape for shape in SHAPES if shape.name == "mixtral-gqa-top2").config()
_PARAMETERS: list[dict[str, object]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 24,
        "beta_slow": 2,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
]


def _values(parameters: dict[str, object]) -> dict[str, object]:
    values = {**_BASE, "head_dim": 128, "max_position_embeddings": 131072}
    del values["rope_theta"]
    return {**values, "rope_parameters": parameters}


@pytest.mark.parametrize("parameters", _PARAMETERS, ids=lambda values: str(values["rope_type"]))
def test_rotations_are_those_of_transformers(parameters: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_values(parameters)))
    theirs: Any = MixtralRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    rope = parse_model_config(_values(parameters)).rope
    frequencies = inverse_frequencies(rope, 128)
    assert torch.equal(frequencies, theirs.inv_freq)
    positions = torch.tensor([0, 1, 2, 77, 1023, 1024, 5000, 100_000])
    cosines, sines = theirs(torch.zeros(1), positions[None])
    ours = RopeTable(rope, 128, torch.float32).rotations(positions)
    assert (ours[0][:, 0, 0] - cosines[0, :, :64]).abs().max() <= 3e-7
    assert (ours[1][:, 0, 1] - sines[0, :, :64]).abs().max() <= 3e-7
    assert torch.equal(ours[1][:, 0, 0], -ours[1][:, 0, 1])


def test_a_position_has_one_rotation_however_the_table_grew() -> None:
    rope = parse_model_config(_BASE).rope
    at_once = RopeTable(rope, 16, torch.float32)
    in_steps = RopeTable(rope, 16, torch.float32)
    positions = torch.tensor([0, 9, 1000, 1024, 3000, 9999])
    whole = at_once.rotations(positions)
    for row, position in enumerate(positions):
        cosines, sines = in_steps.rotations(position[None])
        assert torch.equal(cosines[0], whole[0][row])
        assert torch.equal(sines[0], whole[1][row])


def test_rotation_turns_pairs_by_the_angle() -> None:
    rope = parse_model_config(_BASE).rope
    x = torch.randn(3, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 300])
    table = RopeTable(rope, 16, torch.float64)
    turned = rotate(x, *table.rotations(positions))
    angles = positions[:, None].float() * inverse_frequencies(rope, 16)
    points = torch.view_as_complex(torch.stack((x[..., :8], x[..., 8:]), dim=-1))
    expected = points * torch.polar(torch.ones(3, 1, 8).double(), angles[:, None].double())
    assert torch.allclose(turned[..., :8], expected.real, rtol=1e-12, atol=1e-12)
    assert torch.allclose(turned[..., 8:], expected.imag, rtol=1e-12, atol=1e-12)
