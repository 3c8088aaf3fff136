"""How far bf16 logits are from float64 ones: the serving path against transformers, same weights.

usage: python -m benchmarks.logits_error [--quick] [--json FILE]

Tiny random checkpoints of the shapes that the tests use. Per position the error is
||a - b|| / ||b|| with b from transformers in float64 on the same bf16 weights.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Final

import torch

from benchmarks.result import Row, write
from tests.models.checkpoints import SHAPES, Shape, make_checkpoint
from tests.models.comparison import hf_logits, reference_runner, relative_errors, whole
from tests.models.measure import Comparison
from tests.models.serving_path import serving_runner

_QUICK: Final = ("mixtral-gqa-top2", "qwen3-top8-raw", "qwen3-dense-layers-bias")
_GOAL: Final = 0.8  # our bf16 error is at most 1.25 of theirs
_FP32_BOUND: Final = 1e-5


def _row(case: str, ours: float, rival: str, rival_value: float, goal: float) -> Row:
    return Row(
        case=case,
        ours=ours,
        rival=rival,
        rival_value=rival_value,
        unit="relative error",
        ratio=rival_value / ours,
        goal=goal,
    )


def _fp32_row(shape: Shape, directory: Path) -> Row:
    checkpoint = make_checkpoint(shape, directory / "fp32", dtype=torch.float32)
    comparison = Comparison(checkpoint, prompts_count=4)
    prompts = comparison.prompts
    expected = torch.cat(hf_logits(checkpoint, torch.float32, prompts))
    runner = reference_runner(checkpoint, torch.float32)
    found = torch.cat(runner.run(prompts, whole([len(one) for one in prompts])))
    worst = float(relative_errors(found, expected).max())
    return _row(f"{shape.name}: fp32 worst", worst, "bound", _FP32_BOUND, 1.0)


def rows_of(shape: Shape, directory: Path) -> list[Row]:
    """fp32 agreement, and for shapes with experts the bf16 errors and changed routes."""
    rows = [_fp32_row(shape, directory)]
    if shape.config().get("num_experts") == 0:
        return rows
    checkpoint = make_checkpoint(shape, directory / "bf16")
    comparison = Comparison(checkpoint)
    with serving_runner(checkpoint) as runner:
        errors = comparison.measure(runner)
        choices = comparison.follow(runner)
    for name, ours, theirs in (
        ("median", errors.ours.median, errors.theirs.median),
        ("p99", errors.ours.p99, errors.theirs.p99),
    ):
        rows.append(_row(f"{shape.name}: bf16 {name}", ours, "transformers", theirs, _GOAL))
    positions = errors.positions_count
    rows.append(
        Row(
            case=f"{shape.name}: positions with another expert, of {positions}",
            ours=errors.ours.flipped_count,
            rival="transformers",
            rival_value=errors.theirs.flipped_count,
            unit="count",
            ratio=errors.theirs.flipped_count / max(errors.ours.flipped_count, 1),
            goal=1.0,
        )
    )
    right_count = choices.decided_count - choices.wrong_count
    rows.append(
        Row(
            case=f"{shape.name}: decided choices made as in float64, of {choices.choices_count}",
            ours=right_count,
            rival="decided choices",
            rival_value=choices.decided_count,
            unit="count",
            ratio=right_count / choices.decided_count,
            goal=1.0,
        )
    )
    return rows


def main() -> None:
    """Print the table of errors; write the JSON file when one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three shapes instead of all")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    shapes = [shape for shape in SHAPES if not arguments.quick or shape.name in _QUICK]
    rows: list[Row] = []
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="logits-") as directory:
            rows += rows_of(shape, Path(directory))
    write(rows, arguments.json)


if __name__ == "__main__":
    main()
