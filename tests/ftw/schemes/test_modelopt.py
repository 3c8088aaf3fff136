"""ModelOpt's NVFP4: the factor multiplies, gate and up have their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.schemes.registry import open_scheme
from tests.ftw.schemes.checkpoints import (
    E2M1,
    Quantised,
    change_tensors,
    check_all,
    e4m3,
    edit_config,
    table,
    write_quantised,
)
from tests.support.safetensors_files import Stored

CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"group_size": 16}}},
    "ignore": ["lm_head"],
}
OWN_FILE = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
Q = "model.layers.0.self_attn.q_proj"


def nvfp4(random: np.random.Generator, rows: int, columns: int) -> Quantised:
    packed = random.integers(0, 256, (rows, columns // 2), np.uint8)
    scales = random.integers(1, 127, (rows, columns // 16), np.uint8)
    factor = np.float32(random.uniform(0.001, 0.003))
    values = np.empty((rows, columns))
    meaning = table(e4m3)
    for column in range(columns):
        codes = packed[:, column // 2] >> (4 if column % 2 else 0) & 15
        scale = meaning[scales[:, column // 16]]
        values[:, column] = np.array(E2M1)[codes] * scale * np.float64(factor)
    made = Quantised(values)
    made.put("weight", packed)
    made.put("weight_scale", scales, "F8_E4M3")
    made.put("weight_scale_2", np.array(factor))
    made.put("input_scale", np.array(0.5, np.float32))
    return made


@pytest.mark.parametrize("in_own_file", [True, False])
def test_nvfp4(in_own_file: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    values = write_quantised(source, nvfp4, None if in_own_file else CONFIG, mixtral=in_own_file)
    if in_own_file:
        (source / "hf_quant_config.json").write_text(json.dumps(OWN_FILE))
    check_all(source, values, "nvfp4")
    with Checkpoint(source) as checkpoint:
        scheme = open_scheme(checkpoint)
        assert scheme.matrix(Q + ".weight", 256, 256) is not None
        assert scheme.consumed == {
            f"{Q}.{part}" for part in ("weight", "weight_scale", "weight_scale_2", "input_scale")
        }
        assert scheme.ignorable("model.layers.0.self_attn.k_proj.k_scale")
        assert not scheme.ignorable("model.layers.0.self_attn.k_proj.pre_quant_scale")


def test_other_algorithms_and_producers_are_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(source, nvfp4, None)
    own = source / "hf_quant_config.json"

    def refused(message: str) -> None:
        with Checkpoint(source) as checkpoint:
            with pytest.raises(ModelDataError, match=message) as caught:
                open_scheme(checkpoint)
            assert caught.value.reason is Reason.MODEL_UNSUPPORTED

    refused("says which program wrote them")
    own.write_text(json.dumps(OWN_FILE | {"producer": {"name": "other"}}))
    refused("the producer is 'other'")
    own.write_text(json.dumps(OWN_FILE | {"producer": {}}))
    refused("the producer is 'unknown'")
    own.write_text(json.dumps(OWN_FILE | {"quantization": {"quant_algo": "W4A8_AWQ"}}))
    refused("'W4A8_AWQ' is not implemented; NVFP4 is")
    own.unlink()
    edit_config(source, quantization_config={"quant_method": "modelopt"})
    refused(r"hf_quant_config\.json, which would, is missing")
    edit_config(source, quantization_config=CONFIG | {"quant_algo": "FP8"})
    refused("'FP8' is not implemented; NVFP4 is")


def test_damage_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(source, nvfp4, CONFIG)
    change_tensors(source, lambda all: all.pop(Q + ".weight_scale_2"))
    with Checkpoint(source) as checkpoint:
        scheme = open_scheme(checkpoint)
        with pytest.raises(ModelDataError, match=rf"lacks the tensor {Q}\.weight_scale_2"):
            scheme.matrix(Q + ".weight", 256, 256)
        k = "model.layers.0.self_attn.k_proj.weight"
        with pytest.raises(ModelDataError, match=f"{k}: 250 columns are not a multiple of 16"):
            scheme.matrix(k, 128, 250)
        with pytest.raises(ModelDataError, match=rf"{k} has the shape \[128, 128\]"):
            scheme.matrix(k, 128, 512)
    change_tensors(
        source,
        lambda all: all.update({Q + ".weight_scale_2": Stored("F32", (), bytes(4))}),
    )
    refused = pytest.raises(ModelDataError, match=r"weight_scale_2 is 0\.0; a scale is a positive")
    with Checkpoint(source) as checkpoint, refused:
        open_scheme(checkpoint).matrix(Q + ".weight", 256, 256)
