"""fp8 in blocks: DeepSeek-V3 and Qwen3 names, DeepSeek-V4's, and compressed-tensors'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.schemes.registry import open_scheme
from tests.ftw.schemes.checkpoints import (
    Quantise,
    Quantised,
    change_tensors,
    check_all,
    e4m3,
    edit_config,
    random_fp8,
    random_scales,
    table,
    to_bf16,
    write_quantised,
)
from tests.support.safetensors_files import Stored

torch = pytest.importorskip("torch")

CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
                "symmetric": True,
            },
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
}


def fp8(scale_name: str, scale_dtype: str) -> Quantise:
    values = table(e4m3)

    def quantise(random: np.random.Generator, rows: int, columns: int) -> Quantised:
        codes = random_fp8(random, rows, columns)
        grid = (-(-rows // 128), -(-columns // 128))
        scales = random_scales(random, grid, 0.01)
        exact = scales.astype(np.float64)
        stored = scales.view(np.uint32)
        if scale_dtype == "BF16":
            stored, exact = to_bf16(scales)
        elif scale_dtype == "F8_E8M0":
            stored = random.integers(110, 125, grid, np.uint8)
            exact = 2.0 ** (stored.astype(np.float64) - 127)
        meaning = np.empty((rows, columns))
        for row in range(rows):
            for block in range(grid[1]):
                part = slice(128 * block, 128 * block + 128)
                meaning[row, part] = values[codes[row, part]] * exact[row // 128, block]
        made = Quantised(meaning)
        made.put("weight", codes, "F8_E4M3")
        made.put(scale_name, stored, scale_dtype)
        return made

    return quantise


@pytest.mark.parametrize(
    ("scale_name", "scale_dtype", "config"),
    [
        ("weight_scale_inv", "F32", CONFIG),
        ("weight_scale_inv", "BF16", CONFIG),
        ("scale", "F8_E8M0", CONFIG | {"scale_fmt": "ue8m0"}),
        ("weight_scale", "F32", COMPRESSED),
    ],
)
def test_blocks(
    scale_name: str, scale_dtype: str, config: dict[str, object], tmp_path: Path
) -> None:
    values = write_quantised(tmp_path / "source", fp8(scale_name, scale_dtype), config)
    check_all(tmp_path / "source", values, "fp8_block")


def test_blocks_that_do_not_divide(tmp_path: Path) -> None:
    values = write_quantised(
        tmp_path / "source", fp8("weight_scale_inv", "F32"), CONFIG, hidden=200, inter=136
    )
    check_all(tmp_path / "source", values, "fp8_block")


def test_the_codes_are_those_of_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    ours = table(e4m3)
    is_number = codes & 0x7F != 0x7F
    assert np.array_equal(ours[is_number], theirs[is_number])
    assert np.isnan(theirs[~is_number]).all()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_quantised(tmp_path / "source", fp8("weight_scale_inv", "F32"), CONFIG)
    return tmp_path / "source"


Q = "model.layers.0.self_attn.q_proj.weight"


def open_q(source: Path, rows: int = 256, columns: int = 256) -> None:
    with Checkpoint(source) as checkpoint:
        matrix = open_scheme(checkpoint).matrix(Q, rows, columns)
        assert matrix is not None
        dequantise(matrix.read_rows(0, 16))


def test_damage_is_named(source: Path) -> None:
    open_q(source)
    with pytest.raises(ModelDataError, match=rf"{Q} has the shape \[256, 256\]; .*\[512, 256\]"):
        open_q(source, rows=512)
    scale = Q + "_scale_inv"
    change_tensors(source, lambda all: all.update({scale: all[scale]._replace(shape=(1, 4))}))
    with pytest.raises(ModelDataError, match=rf"{scale} has the shape \[1, 4\]; .*\[2, 2\]"):
        open_q(source)
    change_tensors(source, lambda all: all.update({scale: Stored("I32", (2, 2), bytes(16))}))
    with pytest.raises(ModelDataError, match=rf"{scale} is I32; .*F32 or BF16 or F16 or F8_E8M0"):
        open_q(source)
    change_tensors(source, lambda all: all.pop(scale))
    with pytest.raises(ModelDataError, match=rf"lacks the tensor {scale}, without which {Q}"):
        open_q(source)


def test_other_modules_may_be_plain(source: Path) -> None:
    with Checkpoint(source) as checkpoint:
        scheme = open_scheme(checkpoint)
        assert scheme.matrix("lm_head.weight", 320, 256) is None
        tensor = scheme.tensor("lm_head.weight")
        assert tensor is not None
        assert tensor.dtype == "BF16"
        assert not scheme.consumed


def test_scales_of_activations_are_of_no_use(source: Path) -> None:
    extra = Q.removesuffix("weight") + "activation_scale"
    change_tensors(source, lambda all: all.update({extra: Stored("F32", (), bytes(4))}))
    edit_config(source, quantization_config=CONFIG | {"activation_scheme": "static"})
    with Checkpoint(source) as checkpoint:
        scheme = open_scheme(checkpoint)
        assert scheme.matrix(Q, 256, 256) is not None
        assert extra in scheme.consumed


def test_deepseek_v4_experts_against_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random = np.random.default_rng(3)
    packed = random.integers(0, 256, (48, 32), np.uint8)
    scales = random.integers(120, 130, (48, 2), np.uint8)
    name = "layers.0.ffn.experts.7.w1"

    def change(tensors: dict[str, Stored]) -> None:
        tensors[name + ".weight"] = Stored("I8", (48, 32), packed.tobytes())
        tensors[name + ".scale"] = Stored("F8_E8M0", (48, 2), scales.tobytes())

    write_quantised(tmp_path / "source", fp8("scale", "F8_E8M0"), CONFIG)
    change_tensors(tmp_path / "source", change)
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(packed.view(np.int8)),
        torch.from_numpy(scales).view(torch.float8_e8m0fnu),
        torch.float32,
    )
    with Checkpoint(tmp_path / "source") as checkpoint:
        scheme = open_scheme(checkpoint)
        matrix = scheme.matrix(name + ".weight", 48, 64)
        assert matrix is not None
        assert str(matrix.format) == "mxfp4"
        assert np.array_equal(dequantise(matrix.read_rows(0, 48), np.float32), theirs.numpy())
        assert scheme.consumed == {name + ".weight", name + ".scale"}
