"""gpt-oss and DeepSeek-V4: what is not converted, and that none of it is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.model_config import model_facts
from freetokend.ctl.main import main
from freetokend.daemon.preflight import check_model
from freetokend.ftw.convert import convert
from freetokend.ftw.index import read_index
from freetokend.ftw.reader import FtwDirectory
from freetokend.ftw.schema import index_from_json
from tests.ftw.published import Published, changed, deepseek_v4, gpt_oss, write_with
from tests.ftw.test_published import CASES, wanted
from tests.support.safetensors_files import Stored

Change = dict[str, Stored | None]
_EXPERTS = "model.layers.1.mlp.experts."


def _cut_bias(made: Published) -> Change:
    name = _EXPERTS + "down_proj_bias"
    return {name: changed(made.tensors[name], (4, 32))}


def _wrong_blocks(made: Published) -> Change:
    name = _EXPERTS + "down_proj_blocks"
    return {name: changed(made.tensors[name], (4, 64, 2, 16))}


def _untransposed(made: Published) -> Change:
    name = _EXPERTS + "gate_up_proj"
    return {name: changed(made.tensors[name], (4, 192, 64))}


def _without(*names: str) -> Callable[[Published], Change]:
    return lambda made: dict.fromkeys(names)


def _ids(value: int, dtype: str = "I64") -> Callable[[Published], Change]:
    data = np.full((96, 2), value, np.int64 if dtype == "I64" else np.float64).tobytes()
    return lambda made: {"layers.0.ffn.gate.tid2eid": Stored(dtype, (96, 2), data)}


def _not_finite(made: Published) -> Change:
    bits = np.full((4, 192), 0x7FC0, np.uint16)
    return {_EXPERTS + "gate_up_proj_bias": Stored("BF16", bits.shape, bits.tobytes())}


REFUSED: dict[str, tuple[Callable[[], Published], Callable[[Published], Change], str]] = {
    "no bias": (
        gpt_oss,
        _without(_EXPERTS + "gate_up_proj_bias"),
        r"lacks the tensor model\.layers\.1\.mlp\.experts\.gate_up_proj_bias",
    ),
    "no bias, bf16": (
        CASES["gpt-oss, bf16"],
        _without(_EXPERTS + "down_proj_bias"),
        r"lacks the tensor model\.layers\.1\.mlp\.experts\.down_proj_bias",
    ),
    "a bias of another shape": (
        gpt_oss, _cut_bias, r"down_proj_bias has the shape \[4, 32\]; .* \[4, 64\]",
    ),
    "blocks of another shape": (
        gpt_oss,
        _wrong_blocks,
        r"down_proj_blocks has the shape \[4, 64, 2, 16\]; .* \[4, 64, 3, 16\]",
    ),
    "experts the other way round": (
        CASES["gpt-oss, bf16"],
        _untransposed,
        r"gate_up_proj has the shape \[4, 192, 64\]; config.json says \[4, 64, 192\]",
    ),
    "a bias that is not finite": (gpt_oss, _not_finite, "gate_up_proj_bias holds a bias that is"),
    "a bias that is not finite, bf16": (
        CASES["gpt-oss, bf16"], _not_finite, "gate_up_proj_bias holds a bias that is",
    ),
    "no sinks": (
        gpt_oss, _without("model.layers.0.self_attn.sinks"), r"lacks .*\.0\.self_attn\.sinks",
    ),
    "no router bias": (
        gpt_oss, _without("model.layers.0.mlp.router.bias"), r"lacks .*mlp\.router\.bias",
    ),
    "no table": (
        deepseek_v4, _without("layers.0.ffn.gate.tid2eid"), r"lacks the tensor .*\.gate\.tid2eid",
    ),
    "an expert that is none": (deepseek_v4, _ids(4), r"tid2eid holds the expert 4; there are 4"),
    "an expert below zero": (deepseek_v4, _ids(-1), "tid2eid holds the expert -1; there are 4"),
    "a table of reals": (
        deepseek_v4, _ids(1, "F64"), "tid2eid is F64; as plain numbers only I32, I64 can be",
    ),
    "no scale": (
        deepseek_v4,
        _without("layers.1.ffn.experts.2.w3.scale"),
        r"lacks the tensor layers\.1\.ffn\.experts\.2\.w3\.",
    ),
    "a tensor too many": (
        deepseek_v4,
        lambda made: {"layers.0.attn.indexer.wq_b.weight": made.tensors["embed.weight"]},
        r"has no use for: layers\.0\.attn\.indexer\.wq_b\.weight",
    ),
    "a compressor of another layer": (
        deepseek_v4,
        lambda made: {"layers.1.attn.compressor.ape": made.tensors["layers.2.attn.compressor.ape"]},
        r"compressor\.ape has the shape \[128, 32\]; config.json says \[4, 64\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_refused_by_tensor_name(name: str, tmp_path: Path) -> None:
    make, change, message = REFUSED[name]
    made = make()
    source = write_with(made, tmp_path / "source", change(made))
    with pytest.raises(ModelDataError, match=message):
        convert(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("make", "formats", "message"),
    [
        (lambda: gpt_oss(inner=80, experts=2), (), r"experts\.down_proj: 80 columns are not a mul"),
        (lambda: gpt_oss(inner=48, experts=2, plain=True), ("mxfp4",),
         r"experts\.down_proj: its width 48 is not a multiple of 32, the block of mxfp4"),
        (lambda: gpt_oss(hidden=576, experts=2), ("q4_K",),
         r"gate_up_proj: its width 576 is not a multiple of 256, the block of q4_K"),
        (deepseek_v4, (None, "int8_g128_f16"), r"head\.weight: its width 64 is not a multiple"),
        (lambda: deepseek_v4(hidden=80), (), r"experts\.0\.w1\.weight: 80 columns are not a"),
    ],
)  # fmt: skip
def test_widths_that_do_not_fit_are_refused_by_tensor_name(
    make: Callable[[], Published],
    formats: tuple[str | None, ...],
    message: str,
    tmp_path: Path,
) -> None:
    source = make().write(tmp_path / "source")
    with pytest.raises(ModelDataError, match=message) as refusal:
        convert(source, tmp_path / "model", wanted=wanted(*formats))
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (deepseek_v4, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        (deepseek_v4, {"norm_topk_prob": False}, "norm_topk_prob"),
        (deepseek_v4, {"n_shared_experts": 2}, "n_shared_experts 2"),
        (deepseek_v4, {"compress_ratios": [0, 8, 128]}, "compress_ratios holds 8"),
        (deepseek_v4, {"mlp_layer_types": ["moe", "mlp", "moe"]}, "mlp_layer_types holds 'mlp'"),
        (deepseek_v4, {"layer_types": ["full_attention"] * 3}, "layer_types full_attention"),
        (gpt_oss, {"layer_types": ["linear_attention"] * 2}, "layer_types linear_attention"),
        (gpt_oss, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (gpt_oss, {"architectures": ["GptOssForVision"]}, "'GptOssForVision' is not implemented"),
    ],
)
def test_options_that_are_not_known_are_refused_by_name(
    make: Callable[[], Published], change: dict[str, object], message: str, tmp_path: Path
) -> None:
    source = make().write(tmp_path / "source", **change)
    with pytest.raises(ModelDataError, match=message) as refusal:
        convert(source, tmp_path / "model")
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED


@pytest.mark.parametrize(
    "change",
    [
        {"compress_ratios": [0]},
        {"compress_ratios": None},
        {"o_groups": 3},
        {"swiglu_limit": 0},
        {"q_lora_rank": None},
    ],
)
def test_configs_that_make_no_sense(change: dict[str, object], tmp_path: Path) -> None:
    source = deepseek_v4().write(tmp_path / "source", **change)
    with pytest.raises(ModelDataError, match=next(iter(change))) as refusal:
        convert(source, tmp_path / "model")
    assert refusal.value.reason is Reason.MODEL_INVALID


@pytest.mark.parametrize("make", [gpt_oss, deepseek_v4])
def test_converted_and_refused_when_it_is_to_be_served(
    make: Callable[[], Published], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = make().write(tmp_path / "source"), tmp_path / "model"
    name = read_index_name(make)
    options = ["--quantize", "nvfp4", "--quantize-dense", "q8_0", "-o", "json"]
    for _ in range(2):
        assert main(["ftw", "convert", str(source), str(model), *options]) == 0
        answer = capsys.readouterr()
        assert f"{name} is converted but not served yet: this version serves Mix" in answer.err
    document = json.loads(answer.out)
    assert document["is_served"] is False
    errors = document["quantisation"]["dense_errors"]
    assert [error["layer_index"] for error in errors][:3] == [None, 0, 1]
    assert all(0.001 < error["error"] <= error["worst_error"] < 0.02 for error in errors)
    assert main(["ftw", "verify", str(model)]) == 0
    assert main(["ftw", "info", str(model)]) == 0
    assert "layer_index None error 0.00" in capsys.readouterr().out
    for refused in (
        lambda: check_model(model),
        lambda: model_facts(FtwDirectory(model).model_config()),
    ):
        with pytest.raises(
            ModelDataError, match=f"is a {name}, .* not serve yet; it serves Mi"
        ) as e:
            refused()
        assert e.value.reason is Reason.MODEL_UNSUPPORTED


def read_index_name(make: Callable[[], Published]) -> str:
    (name,) = make().config["architectures"]
    return str(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": -1.0}, "error is -1.0, outside"),
        ({"layer_index": -1}, "layer_index is -1"),
        ({"worst_tensor": 5}, "worst_tensor must be a string"),
        ({"more": 5}, "unknown key 'more'"),
        (None, "dense_errors is empty"),
    ],
)
def test_damaged_dense_errors_are_refused(
    change: dict[str, object] | None, message: str, tmp_path: Path
) -> None:
    convert(gpt_oss().write(tmp_path / "source"), tmp_path / "model", wanted=wanted(None, "q8_0"))
    path = tmp_path / "model" / "freetoken_weight.json"
    document = json.loads(path.read_text())
    errors = document["quantisation"]["dense_errors"]
    document["quantisation"]["dense_errors"] = [] if change is None else [errors[0] | change]
    with pytest.raises(ModelDataError, match=message):
        index_from_json(json.dumps(document).encode(), "index")
    assert read_index(tmp_path / "model").quantisation.dense_errors
