"""The path that serves: its bf16 errors, and that they do not depend on how tokens are fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from freetokend.native.executor import available_isas
from tests.models.checkpoints import SHAPES, Shape, make_checkpoint, prompt
from tests.models.comparison import chunked, one_by_one, whole
from tests.models.measure import Comparison
from tests.models.serving_path import serving_runner

# A conversion needs at least one layer of experts.
_SHAPES = [shape for shape in SHAPES if shape.config().get("num_experts") != 0]
_LENGTHS = (70, 33, 1, 17, 50)


@pytest.mark.parametrize("shape", _SHAPES, ids=lambda shape: shape.name)
def test_bf16_errors_are_no_larger_than_those_of_transformers(
    shape: Shape, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    checkpoint = make_checkpoint(shape, tmp_path / "checkpoint")
    comparison = Comparison(checkpoint)
    with serving_runner(checkpoint) as runner:
        errors = comparison.measure(runner)
        choices = comparison.follow(runner)
    record_property("errors", asdict(errors))
    record_property("choices", asdict(choices))
    assert errors.logits_deviation >= 1
    assert errors.median_ratio <= 1.25
    assert errors.p99_ratio <= 1.25
    assert errors.ours.flipped_count <= errors.theirs.flipped_count
    assert choices.wrong_count == 0
    assert choices.decided_count >= choices.choices_count / 2


@pytest.mark.parametrize("shape", _SHAPES, ids=lambda shape: shape.name)
def test_logits_are_bit_equal_however_tokens_are_fed(shape: Shape, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(shape, tmp_path / "checkpoint", seed=2)
    vocab_size = int(str(checkpoint.config["vocab_size"]))
    prompts = [prompt(length, vocab_size, seed) for seed, length in enumerate(_LENGTHS)]
    with serving_runner(checkpoint, cpus=(0, 1)) as runner:
        expected = [runner.run([one], whole([len(one)]))[0] for one in prompts]
        ways = {
            "batch 5": runner.run(prompts, whole(_LENGTHS)),
            "chunks of 16 mixed with decode": runner.run(prompts, chunked(_LENGTHS, 16)),
            "chunks of 7 mixed with decode": runner.run(prompts, chunked(_LENGTHS, 7)),
            "step by step": runner.run(prompts, one_by_one(_LENGTHS)),
            "step by step, alone": [
                runner.run([one], one_by_one([len(one)]))[0] for one in prompts
            ],
        }
    with serving_runner(checkpoint, cpus=(0,)) as runner:
        ways["one thread"] = runner.run(prompts, whole(_LENGTHS))
    for way, found in ways.items():
        for mine, alone in zip(found, expected, strict=True):
            assert torch.equal(mine, alone), way


@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set_serves_within_the_same_bound(isa: str, tmp_path: Path) -> None:
    shape = next(shape for shape in SHAPES if shape.name == "qwen3-dense-layers-bias")
    checkpoint = make_checkpoint(shape, tmp_path / "checkpoint")
    comparison = Comparison(checkpoint, prompts_count=24)
    with serving_runner(checkpoint, isa=isa) as runner:
        errors = comparison.measure(runner)
        assert comparison.follow(runner).wrong_count == 0
    assert errors.median_ratio <= 1.25
