"""Quantised checkpoints through the whole converter: what FTW holds is what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.convert import convert
from freetokend.ftw.reader import FtwDirectory
from tests.ftw.schemes import test_compressed_tensors as compressed
from tests.ftw.schemes import test_fp8, test_gptq, test_modelopt
from tests.ftw.schemes.checkpoints import (
    Quantise,
    Values,
    change_tensors,
    is_quantised,
    write_quantised,
)
from tests.support.safetensors_files import Stored

gguf = pytest.importorskip("gguf")
from tests.ftw.schemes.gguf_checkpoints import Type, write_gguf  # noqa: E402

EXPERT = "model.layers.0.mlp.experts.2.up_proj"
Q = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class Case:
    """A scheme: of the experts and of attention."""

    format: str
    quantise: Quantise
    config: dict[str, Any]
    mixtral: bool = False


def _fp4(form: str, group: int, strategy: str) -> dict[str, Any]:
    return compressed.config(
        f"{form}-pack-quantized", type="float", group_size=group, strategy=strategy
    )


CASES = {
    "fp8": Case("fp8_block", test_fp8.fp8("weight_scale_inv", "BF16"), test_fp8.CONFIG),
    "pack-quantized": Case(
        "int4_g32_bf16",
        compressed.integers(4, 32, "BF16", symmetric=True),
        compressed.config("pack-quantized", group_size=32),
        mixtral=True,
    ),
    "pack-quantized, 8 bits, zero points": Case(
        "int8_g128_f16_zp",
        compressed.integers(8, 128, "F16", symmetric=False),
        compressed.config("pack-quantized", num_bits=8, group_size=128, symmetric=False),
    ),
    "compressed nvfp4": Case("nvfp4", compressed.fp4(16), _fp4("nvfp4", 16, "tensor_group")),
    "compressed mxfp4": Case("mxfp4", compressed.fp4(32), _fp4("mxfp4", 32, "group")),
    "modelopt": Case("nvfp4", test_modelopt.nvfp4, test_modelopt.CONFIG),
    "gptq": Case(
        "int4_g64_f16_zp",
        test_gptq.transposed(4, 64, zero_offset=1),
        test_gptq.gptq_config(4, 64, sym=False),
    ),
    "awq": Case(
        "int4_g128_f16_zp",
        test_gptq.transposed(4, 128, zero_offset=0, awq=True),
        test_gptq.awq_config(128),
        mixtral=True,
    ),
}


def check_contents(model: Path, values: dict[str, Values], weight_format: str) -> None:
    """Everything in `values` is in the model, to the last bit of fp32 where it is quantised."""
    directory = FtwDirectory(model)
    bank = directory.index.expert_bank
    assert bank.format == weight_format
    seen = set()
    for expert in range(bank.experts_per_layer_count):
        gate, up, down = directory.expert(0, expert)
        for matrix, last_names in (
            (gate, ("gate_proj", "w1")),
            (up, ("up_proj", "w3")),
            (down, ("down_proj", "w2")),
        ):
            names = [name for name in values if f".experts.{expert}.{last_names[0]}." in name]
            names += [name for name in values if f".experts.{expert}.{last_names[1]}." in name]
            (name,) = names
            assert np.array_equal(matrix, values[name].astype(np.float32)), name
            seen.add(name)
    for name in values.keys() - seen:
        found = directory.tensor(name)
        wanted = values[name].astype(np.float32)
        if directory.index.tensors[name].dtype == "bf16":
            assert np.allclose(found, wanted, rtol=2.0**-8, atol=0.0), name
        else:
            assert np.array_equal(found, wanted), name


@pytest.mark.parametrize("name", CASES)
def test_safetensors(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = tmp_path / "source"
    values = write_quantised(
        source,
        case.quantise,
        case.config,
        mixtral=case.mixtral,
        chosen=is_quantised,
        hidden=256,
        inter=128,
        experts=2,
    )
    index = convert(source, tmp_path / "model")
    with Checkpoint(source) as checkpoint:
        assert set(index.sources) == checkpoint.tensors.keys()
    for dense in values:
        if ".experts." not in dense:
            assert index.tensors[dense].dtype == case.format
    assert index.quantisation.scheme == case.config["quant_method"]
    check_contents(tmp_path / "model", values, case.format)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4", "Q4_K", "Q6_K", "BF16"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    formats = {"Q4_0": "int4_g32_f16", "Q8_0": "int8_g32_f16", "MXFP4": "mxfp4", "BF16": "bf16"}
    formats |= {"Q4_K": "q4_K", "Q6_K": "q6_K"}
    mixtral = kind in ("Q8_0", "Q6_K", "BF16")
    values = write_gguf(tmp_path / "source", Type[kind], mixtral=mixtral, experts=2)
    index = convert(tmp_path / "source", tmp_path / "model")
    check_contents(tmp_path / "model", values, formats[kind])
    with Checkpoint(tmp_path / "source") as checkpoint:
        assert set(index.sources) == checkpoint.tensors.keys() - {"rope_freqs.weight"}
    assert index.tensors["lm_head.weight"].dtype == formats[kind]


def test_tied_embedding_of_a_gguf_model(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "source", Type.Q8_0, tied=True, experts=2)
    convert(tmp_path / "source", tmp_path / "model")
    check_contents(tmp_path / "model", values, "int8_g32_f16")
    head = FtwDirectory(tmp_path / "model").tensor("lm_head.weight")
    assert np.array_equal(head, values["model.embed_tokens.weight"])


def test_experts_of_several_types_are_refused(tmp_path: Path) -> None:
    """As in files of the kind Q4_K_M."""
    mixed = {"blk.0.ffn_down_exps.weight": Type.Q6_K}
    write_gguf(tmp_path / "source", Type.Q4_K, kinds=mixed, experts=2)
    with pytest.raises(ModelDataError, match=r"ffn_down_exps\.weight is q6_K and .* is q4_K") as e:
        convert(tmp_path / "source", tmp_path / "model")
    assert e.value.reason is Reason.MODEL_UNSUPPORTED


def poke(name: str, offset_bytes: int, data: bytes) -> Callable[[dict[str, Stored]], None]:
    """Other bytes in a tensor."""

    def change(tensors: dict[str, Stored]) -> None:
        stored = tensors[name]
        end = offset_bytes + len(data)
        changed = stored.data[:offset_bytes] + data + stored.data[end:]
        tensors[name] = stored._replace(data=changed)

    return change


BAD_NUMBERS = {
    "fp8 code": ("fp8", EXPERT + ".weight", 300, b"\x7f"),
    "negative fp8 code": ("fp8", Q + ".weight", 0, b"\xff"),
    "fp8 scale": ("fp8", EXPERT + ".weight_scale_inv", 2, b"\xc0\x7f"),
    "e8m0 scale": ("compressed mxfp4", EXPERT + ".weight_scale", 77, b"\xff"),
    "e4m3 scale": ("compressed nvfp4", EXPERT + ".weight_scale", 5, b"\x7f"),
    "negative e4m3 scale": ("modelopt", EXPERT + ".weight_scale", 5, b"\x90"),
    "f16 scale": ("gptq", EXPERT + ".scales", 10, b"\x00\x7c"),
    "f16 scale of attention": (
        "pack-quantized, 8 bits, zero points",
        Q + ".weight_scale",
        6,
        b"\x01\x7e",
    ),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_what_is_no_number_is_refused(name: str, tmp_path: Path) -> None:
    case_name, tensor, offset_bytes, data = BAD_NUMBERS[name]
    case = CASES[case_name]
    source = tmp_path / "source"
    write_quantised(source, case.quantise, case.config, chosen=is_quantised, experts=3, inter=128)
    change_tensors(source, poke(tensor, offset_bytes, data))
    matrix = tensor.rsplit(".", 1)[0] + r"\.weight"
    with pytest.raises(ModelDataError, match=matrix):
        convert(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_leftovers_are_an_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    case = CASES["gptq"]
    write_quantised(source, case.quantise, case.config, experts=2)
    extra = Q + ".pre_quant_scale"
    change_tensors(source, lambda all: all.update({extra: Stored("F16", (4,), bytes(8))}))
    with pytest.raises(ModelDataError, match=rf"no use for: {extra}"):
        convert(source, tmp_path / "model")


def test_gguf_tensors_without_a_use_or_missing_are_an_error(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    write_gguf(tmp_path / "more", Type.Q8_0, experts=2, extra=extra)
    with pytest.raises(ModelDataError, match=r"no use for: blk\.0\.attn_sinks\.weight"):
        convert(tmp_path / "more", tmp_path / "model")
    write_gguf(tmp_path / "less", Type.Q8_0, experts=2, leave_out=("output.weight",))
    with pytest.raises(ModelDataError, match=r"lacks the tensor lm_head\.weight"):
        convert(tmp_path / "less", tmp_path / "model")


def test_a_quantised_router_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    case = CASES["gptq"]
    write_quantised(
        source,
        case.quantise,
        case.config,
        chosen=lambda name: is_quantised(name) or name.endswith("mlp.gate.weight"),
        experts=8,
    )
    with pytest.raises(ModelDataError, match=r"tensor .*mlp\.gate\.weight is quantised; routers"):
        convert(source, tmp_path / "model")
