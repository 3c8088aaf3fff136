"""Checkpoints that call themselves quantised and are not: taken for what they hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from freetokend.ftw.convert import ConvertProgress, convert
from freetokend.ftw.index import FtwIndex
from tests.ftw.schemes import test_compressed_tensors as compressed
from tests.ftw.schemes import test_fp8, test_gptq, test_modelopt
from tests.ftw.schemes.checkpoints import edit_config, is_quantised, write_quantised

SAID: dict[str, dict[str, Any]] = {
    "fp8": test_fp8.CONFIG,
    "compressed-tensors": compressed.config("pack-quantized", group_size=32),
    "modelopt": test_modelopt.CONFIG,
    "mxfp4": {"quant_method": "mxfp4"},
    "gptq": test_gptq.gptq_config(4, 64),
    "awq": test_gptq.awq_config(128),
}


def converted(source: Path, target: Path) -> tuple[FtwIndex, str]:
    """The index and all that was said on the way."""
    notes: list[str] = []

    def progress(now: ConvertProgress) -> None:
        notes.append(now.note)

    return convert(source, target, progress=progress), "\n".join(notes)


def check_plain(source: Path, scheme: str) -> None:
    """Converting gives what it gives without the scheme in config.json, and says so."""
    target = source.with_name("model")
    index, notes = converted(source, target)
    honest = source.with_name("honest")
    shutil.copytree(source, honest)
    edit_config(honest, quantization_config=None)
    (honest / "hf_quant_config.json").unlink(missing_ok=True)
    expected, quiet = converted(honest, source.with_name("expected"))
    assert index.quantisation == expected.quantisation
    assert (index.quantisation.scheme, index.expert_bank.format) == ("none", "bf16")
    assert index.tensors == expected.tensors
    assert [one.block_checksums for one in index.shards] == [
        one.block_checksums for one in expected.shards
    ]
    assert f"calls itself {scheme}, but none of its matrices is quantised" in notes
    assert "calls itself" not in quiet


@pytest.mark.parametrize("scheme", SAID)
def test_plain_matrices_are_converted_as_such(scheme: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(source, test_modelopt.nvfp4, SAID[scheme], chosen=lambda _: False)
    check_plain(source, scheme)


def test_what_the_exporter_says_in_its_own_file_counts_as_little(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(source, test_modelopt.nvfp4, {}, chosen=lambda _: False)
    edit_config(source, quantization_config=None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    check_plain(source, "modelopt")


def test_the_exporters_own_file_names_the_scheme(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(source, test_modelopt.nvfp4, test_modelopt.CONFIG)
    edit_config(source, quantization_config=None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    index, notes = converted(source, tmp_path / "model")
    assert index.quantisation.scheme == "modelopt"
    assert "calls itself" not in notes


def test_one_quantised_matrix_is_enough(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(
        source,
        test_gptq.transposed(4, 64, zero_offset=1, symmetric=True),
        SAID["gptq"],
        chosen=lambda name: is_quantised(name) and name.endswith("0.self_attn.q_proj.weight"),
    )
    index, notes = converted(source, tmp_path / "model")
    assert (index.quantisation.scheme, index.expert_bank.format) == ("gptq", "bf16")
    assert "calls itself" not in notes


def test_plain_experts_of_gpt_oss(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        layer_types=["full_attention"],
    )
    source = tmp_path / "source"
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    edit_config(source, quantization_config=SAID["mxfp4"])
    check_plain(source, "mxfp4")
