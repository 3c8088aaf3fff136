"""gpt-oss's routed experts: interleaved gate and up, biases, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.schemes.gpt_oss import GptOssScheme
from freetokend.ftw.schemes.registry import open_scheme
from tests.ftw.schemes.checkpoints import change_tensors, to_bf16
from tests.support.safetensors_files import Stored

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXPERTS, HIDDEN, INNER = 3, 64, 96
PREFIX = "model.layers.0.mlp.experts."
SHAPE = {"experts": EXPERTS, "hidden": HIDDEN, "inner": INNER}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model that transformers made, its experts replaced by random mxfp4 blocks."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        layer_types=["full_attention"],
    )
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path / "source")
    random = np.random.default_rng(1)

    def change(tensors: dict[str, Stored]) -> None:
        for name, rows, columns in (
            ("gate_up_proj", 2 * INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            del tensors[PREFIX + name]
            shape = (EXPERTS, rows, columns // 32)
            blocks = random.integers(0, 256, (*shape, 16), np.uint8)
            scales = random.integers(120, 128, shape, np.uint8)
            bias, _ = to_bf16(random.standard_normal((EXPERTS, rows)).astype(np.float32))
            tensors[PREFIX + name + "_blocks"] = Stored("U8", blocks.shape, blocks.tobytes())
            tensors[PREFIX + name + "_scales"] = Stored("U8", shape, scales.tobytes())
            tensors[PREFIX + name + "_bias"] = Stored("BF16", bias.shape, bias.tobytes())

    change_tensors(tmp_path / "source", change)
    path = tmp_path / "source" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    return tmp_path / "source"


def test_experts_are_what_transformers_loads(source: Path) -> None:
    model = transformers.GptOssForCausalLM.from_pretrained(
        source,
        dtype=torch.bfloat16,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    theirs = model.model.layers[0].mlp.experts
    with Checkpoint(source) as checkpoint:
        scheme = open_scheme(checkpoint)
        assert isinstance(scheme, GptOssScheme)
        for number in range(EXPERTS):
            expert = scheme.expert(PREFIX, number, **SHAPE)
            # Theirs are [K, N], gate in the even columns and up in the odd ones.
            both = theirs.gate_up_proj[number].detach().float().numpy().T
            down = theirs.down_proj[number].detach().float().numpy().T
            for matrix, wanted in (
                (expert.gate, both[0::2]),
                (expert.up, both[1::2]),
                (expert.down, down),
            ):
                assert (matrix.rows_count, matrix.columns_count) == wanted.shape
                parts = [matrix.read_rows(0, 32), matrix.read_rows(32, matrix.rows_count - 32)]
                found = np.concatenate([dequantise(part, np.float32) for part in parts])
                assert np.array_equal(found, wanted)
                assert wanted.std() > 0.01
            bias = theirs.gate_up_proj_bias[number].detach().float().numpy()
            assert np.array_equal(expert.gate_bias.read(), bias[0::2])
            assert np.array_equal(expert.up_bias.read(), bias[1::2])
            down_bias = theirs.down_proj_bias[number].detach().float().numpy()
            assert np.array_equal(expert.down_bias.read(), down_bias)
        assert scheme.consumed == {
            PREFIX + name + part
            for name in ("gate_up_proj", "down_proj")
            for part in ("_blocks", "_scales", "_bias")
        }


DAMAGE = {
    "no scales": ("down_proj_scales", None, "lacks the tensor .*down_proj_scales"),
    "no bias": ("gate_up_proj_bias", None, "lacks the tensor .*gate_up_proj_bias"),
    "blocks of another shape": (
        "down_proj_blocks",
        Stored("U8", (EXPERTS, HIDDEN, 3, 8), bytes(EXPERTS * HIDDEN * 24)),
        r"down_proj_blocks has the shape \[3, 64, 3, 8\]; .*\[3, 64, 3, 16\]",
    ),
    "bias of bytes": (
        "down_proj_bias",
        Stored("U8", (EXPERTS, HIDDEN), bytes(EXPERTS * HIDDEN)),
        "down_proj_bias is U8",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, source: Path) -> None:
    part, stored, message = DAMAGE[name]

    def change(tensors: dict[str, Stored]) -> None:
        del tensors[PREFIX + part]
        if stored is not None:
            tensors[PREFIX + part] = stored

    change_tensors(source, change)
    with Checkpoint(source) as checkpoint, pytest.raises(ModelDataError, match=message):
        GptOssScheme(checkpoint).expert(PREFIX, 0, **SHAPE)


def test_a_bias_that_is_not_finite_is_refused(tmp_path: Path, source: Path) -> None:
    bits = np.zeros((EXPERTS, HIDDEN), np.uint16)
    bits[1, 5] = 0x7FC0
    stored = Stored("BF16", bits.shape, bits.tobytes())
    change_tensors(source, lambda all: all.update({PREFIX + "down_proj_bias": stored}))
    with Checkpoint(source) as checkpoint:
        scheme = GptOssScheme(checkpoint)
        assert not scheme.expert(PREFIX, 0, **SHAPE).down_bias.read().any()
        with pytest.raises(ModelDataError, match="down_proj_bias holds a bias"):
            scheme.expert(PREFIX, 1, **SHAPE).down_bias.read()
