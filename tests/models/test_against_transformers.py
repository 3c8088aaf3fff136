"""The models compute what transformers computes, however the tokens are fed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import SHAPES, Shape, make_checkpoint, prompt
from tests.models.comparison import (
    chunked,
    hf_logits,
    one_by_one,
    reference_runner,
    relative_errors,
    whole,
)

_LENGTHS = (90, 33, 1, 64)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_fp32_logits_equal_transformers(
    shape: Shape, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    checkpoint = make_checkpoint(shape, tmp_path, dtype=torch.float32)
    vocab_size = int(str(checkpoint.config["vocab_size"]))
    prompts = [prompt(length, vocab_size, seed) for seed, length in enumerate(_LENGTHS)]
    expected = hf_logits(checkpoint, torch.float32, prompts)
    assert torch.cat(expected).std() >= 1
    runner = reference_runner(checkpoint, torch.float32)
    ways = {
        "prefill, batch 1": [runner.run([one], whole([len(one)]))[0] for one in prompts],
        "prefill, batch 4": runner.run(prompts, whole(_LENGTHS)),
        "chunked prefill mixed with decode": runner.run(prompts, chunked(_LENGTHS, 16)),
        "step by step": runner.run(prompts, one_by_one(_LENGTHS)),
    }
    for way, found in ways.items():
        errors = relative_errors(torch.cat(found), torch.cat(expected))
        record_property(way, f"{errors.max():.2e}")
        assert errors.max() <= 1e-5, way


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_fp64_runs_agree_to_what_transformers_keeps_in_fp32(shape: Shape, tmp_path: Path) -> None:
    """transformers takes norms, rotations and router scores in fp32 also in a float64 model.

    Its float64 logits are therefore good to about 1e-6, far below any bf16 error measured by them;
    ours agree with them to that.
    """
    checkpoint = make_checkpoint(shape, tmp_path, seed=1)
    tokens = prompt(90, int(str(checkpoint.config["vocab_size"])), seed=5)
    expected = hf_logits(checkpoint, torch.float64, [tokens])[0]
    found = reference_runner(checkpoint, torch.float64).run([tokens], whole([90]))[0]
    assert found.dtype is torch.float64
    assert relative_errors(found, expected).max() <= 1e-5
