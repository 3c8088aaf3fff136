"""Conversions that are refused, by `freetokenctl` as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_checkpoints import write_tiny_mixtral

EX_DATAERR = 65


def refused(source: Path, target: Path, *options: str) -> str:
    """What a conversion says that fails and leaves nothing behind; one line."""
    done = subprocess.run(
        [sys.executable, "-m", "freetokend.ctl", "ftw", "convert", source, target, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (EX_DATAERR, ""), done.stderr
    assert list(target.parent.iterdir()) == []
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_K", "q6_K"])
def test_a_width_that_the_block_does_not_divide(name: str, demo_dir: Path, tmp_path: Path) -> None:
    said = refused(demo_dir, tmp_path / "model", "--quantize", name)
    assert "tensor model.layers.0.block_sparse_moe.experts.0.w1.weight" in said
    assert f"its width 576 is not a multiple of 256, the block of {name}" in said
    assert "Choose another format for --quantize" in said


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "aqlm"),
        ({"quant_method": "fp8"}, "weight_block_size"),
    ],
)
def test_a_scheme_that_is_not_supported(
    quantization: dict[str, object], name: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    write_tiny_mixtral(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (tmp_path / "out").mkdir()
    for options in ((), ("--quantize", "q4_0")):
        said = refused(source, tmp_path / "out" / "model", *options)
        assert name in said
        assert "quantization_config" in said
