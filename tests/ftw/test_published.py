"""gpt-oss and DeepSeek-V4 through the whole converter: FTW holds what the checkpoint means."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freetokend.ftw.contents import FtwIndex
from freetokend.ftw.convert import ConvertProgress, convert
from freetokend.ftw.formats import parse_format
from freetokend.ftw.layout import ROWS16
from freetokend.ftw.model import Wanted
from freetokend.ftw.reader import FtwDirectory
from freetokend.ftw.verify import verify
from tests.ftw import naive_formats
from tests.ftw.published import Published, deepseek_v4, gpt_oss, write_with
from tests.support.safetensors_files import Stored

CASES: dict[str, Callable[[], Published]] = {
    "gpt-oss": gpt_oss,
    "gpt-oss, tied": lambda: gpt_oss(tied=True),
    "gpt-oss, bf16": lambda: gpt_oss(plain=True),
    "deepseek-v4": deepseek_v4,
}


def wanted(experts: str | None = None, dense: str | None = None) -> Wanted:
    return Wanted(
        experts=None if experts is None else parse_format(experts),
        dense=None if dense is None else parse_format(dense),
    )


def read_expert(
    model: Path, index: FtwIndex, layer: int, number: int
) -> tuple[list[naive_formats.Floats], list[naive_formats.Floats]]:
    """Matrices and biases of a record, byte by byte."""
    bank = index.expert_bank
    start = bank.record_offset_bytes(bank.expert_id(layer, number))
    record = FtwDirectory(model).read_region(start, bank.record_bytes).tobytes()
    return naive_formats.read_expert(
        record, bank.format, bank.hidden_size, bank.intermediate_size, has_bias=bank.has_bias
    )


def relative(found: naive_formats.Floats, exact: naive_formats.Floats) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("case", CASES)
def test_as_published(case: str, tmp_path: Path) -> None:
    made, model = CASES[case](), tmp_path / "model"
    index = convert(made.write(tmp_path / "source"), model)
    assert verify(model) == []
    directory, bank = FtwDirectory(model), index.expert_bank
    assert bank.format == ("bf16" if case == "gpt-oss, bf16" else "mxfp4")
    assert set(index.sources) == made.tensors.keys() - made.ignored
    assert index.tensors.keys() == made.values.keys() | {"experts"}
    for name, values in made.values.items():
        assert np.array_equal(directory.tensor(name), values.astype(np.float32)), name
    assert len(made.experts) == bank.experts_count
    for (layer, number), expert in made.experts.items():
        if number not in (0, bank.experts_per_layer_count - 1):
            continue
        found, biases = read_expert(model, index, layer, number)
        for ours, theirs in zip(found, (expert.gate, expert.up, expert.down), strict=True):
            assert np.array_equal(ours, theirs)
            assert theirs.std() > 0.05
        for bias, exact in zip(biases, expert.biases or (), strict=True):
            assert np.array_equal(bias, exact)
            assert exact.std() > 0.5


def test_what_gpt_oss_computes_is_in_the_index(tmp_path: Path) -> None:
    index = convert(gpt_oss().write(tmp_path / "source"), tmp_path / "model")
    bank = index.expert_bank
    assert (bank.activation, bank.activation_limit, bank.activation_alpha, bank.has_bias) == (
        "swiglu_oai",
        7.0,
        1.702,
        True,
    )
    assert (index.router.scoring, index.router.selection) == ("softmax", "top_k")
    assert (index.router.top_k_count, index.router.normalise) == (2, True)
    assert index.quantisation.scheme == "mxfp4"
    assert index.tensors["model.layers.1.self_attn.sinks"].dtype == "f32"
    other = convert(
        gpt_oss().write(tmp_path / "other", swiglu_limit=5.5, swiglu_alpha=1.5), tmp_path / "new"
    ).expert_bank
    assert (other.activation_limit, other.activation_alpha) == (5.5, 1.5)


def test_what_deepseek_v4_computes_is_in_the_index(tmp_path: Path) -> None:
    made = deepseek_v4()
    seen: list[ConvertProgress] = []
    index = convert(made.write(tmp_path / "source"), tmp_path / "model", progress=seen.append)
    bank = index.expert_bank
    assert (bank.activation, bank.activation_limit, bank.has_bias) == ("silu", 10.0, False)
    assert bank.moe_layer_indices == (0, 1, 2)
    router = index.router
    assert (router.scoring, router.selection, router.weight_scale) == (
        "sqrtsoftplus",
        "biased_top_k",
        1.5,
    )
    dtypes = {name: entry.dtype for name, entry in index.tensors.items()}
    assert dtypes["layers.0.ffn.gate.tid2eid"] == "i32"
    assert dtypes["layers.1.attn.indexer.wq_b.weight"] == "fp8_block"
    assert dtypes["layers.1.attn.compressor.wkv.weight"] == "bf16"
    assert dtypes["layers.2.hc_ffn_fn"] == dtypes["layers.1.ffn.gate.bias"] == "f32"
    notes = [step.note for step in seen if step.note]
    count = len(made.ignored)
    assert notes[0].startswith(f"{count} tensors that nothing computes with are left out: mtp.0.")
    assert notes[0].endswith(f" and {count - 5} more.")


def test_a_bias_beside_a_table_is_left_out(tmp_path: Path) -> None:
    made = deepseek_v4()
    extra = {"layers.0.ffn.gate.bias": Stored("F32", (4,), bytes(16))}
    index = convert(write_with(made, tmp_path / "source", extra), tmp_path / "model")
    assert "layers.0.ffn.gate.bias" not in index.tensors


@pytest.mark.parametrize(
    ("case", "experts", "dense"),
    [
        ("gpt-oss", "nvfp4", "int8_g32_f16"),
        ("gpt-oss, bf16", "mxfp4", None),
        ("gpt-oss, tied", "bf16", "fp8_block"),
        ("deepseek-v4", "int4_g32_f16", "bf16"),
    ],
)
def test_into_other_formats(case: str, experts: str, dense: str | None, tmp_path: Path) -> None:
    made, model = CASES[case](), tmp_path / "model"
    notes: list[str] = []
    index = convert(
        made.write(tmp_path / "source"),
        model,
        wanted=wanted(experts, dense),
        progress=lambda step: notes.append(step.note),
    )
    assert verify(model) == []
    assert index.expert_bank.format == experts
    layers = index.expert_bank.moe_layers_count
    told = index.quantisation.layer_errors
    assert [error.layer_index for error in told] == list(range(layers))
    for layer in range(layers):
        sums = np.zeros((2, 3))
        for number in range(index.expert_bank.experts_per_layer_count):
            expert = made.experts[layer, number]
            found, biases = read_expert(model, index, layer, number)
            for part, exact in enumerate((expert.gate, expert.up, expert.down)):
                sums[:, part] += np.sum((found[part] - exact) ** 2), np.sum(exact**2)
            for bias, exact in zip(biases, expert.biases or (), strict=True):
                assert np.array_equal(bias, exact)
        error = told[layer]
        ratios = np.sqrt(sums[0] / sums[1])
        assert [error.gate, error.up, error.down] == pytest.approx(ratios, rel=1e-4, abs=1e-12)
        assert ratios.max() < 0.2
        assert any(note.startswith(f"layer {layer}: experts in {experts} ") for note in notes)
    directory = FtwDirectory(model)
    check_dense_errors(directory, made, dense, notes)


def check_dense_errors(
    directory: FtwDirectory, made: Published, dense: str | None, notes: list[str]
) -> None:
    """What the index tells of other linear layers, worked out again from what it holds."""
    index = directory.index
    by_layer: dict[int | None, dict[str, tuple[float, float]]] = {}
    for name, entry in index.tensors.items():
        was_fp8 = name.removesuffix("weight") + "scale" in made.tensors
        if entry.layout != ROWS16 or entry.dtype == ("fp8_block" if was_fp8 else "bf16"):
            continue
        assert entry.dtype == dense
        tied_to = "model.embed_tokens.weight"
        exact = made.values[name if name in made.values else tied_to]
        found = re.search(r"layers\.(\d+)\.", name)
        layer = None if found is None else int(found[1])
        off = directory.tensor(name) - exact
        by_layer.setdefault(layer, {})[name] = float(np.sum(off**2)), float(np.sum(exact**2))
    told = {error.layer_index: error for error in index.quantisation.dense_errors}
    assert told.keys() == by_layer.keys()
    for layer, sums in by_layer.items():
        error, total = (sum(part) for part in zip(*sums.values(), strict=True))
        assert told[layer].error == pytest.approx(np.sqrt(error / total), rel=1e-4, abs=1e-9)
        worst = max(error / total for error, total in sums.values())
        assert told[layer].worst_error == pytest.approx(np.sqrt(worst), rel=1e-4, abs=1e-9)
        assert told[layer].worst_tensor in sums
        what = "outside the layers" if layer is None else f"layer {layer}"
        assert any(note.startswith(f"{what}: linear layers in {dense} ") for note in notes)


def test_both_spellings_of_the_config_say_the_same(tmp_path: Path) -> None:
    made = deepseek_v4()
    old = convert(made.write(tmp_path / "old"), tmp_path / "old.ftw")
    newer = {
        "compress_ratios": None,
        "num_hash_layers": None,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
        },
    }
    new = convert(made.write(tmp_path / "new", **newer), tmp_path / "new.ftw")
    assert (new.tensors, new.expert_bank) == (old.tensors, old.expert_bank)


def test_errors_of_dense_layers_survive_an_interruption(tmp_path: Path) -> None:
    class InterruptionError(Exception):
        pass

    def stop(step: ConvertProgress) -> None:
        if step.done_bytes:
            raise InterruptionError

    source, formats = gpt_oss().write(tmp_path / "source"), wanted("int8_g32_f16", "mxfp4")
    whole = convert(source, tmp_path / "whole", wanted=formats)
    with pytest.raises(InterruptionError):
        convert(source, tmp_path / "parts", progress=stop, wanted=formats)
    assert convert(source, tmp_path / "parts", wanted=formats) == whole
    assert len(whole.quantisation.dense_errors) == 3


def test_a_deepseek_v4_that_transformers_wrote(tmp_path: Path) -> None:
    """Names and shapes of every tensor are those that transformers' own model has."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    keys = ("hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
            "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads",
            "index_head_dim", "n_routed_experts", "num_experts_per_tok", "vocab_size",
            "compress_ratios", "num_hash_layers", "qk_rope_head_dim")  # fmt: skip
    made = deepseek_v4()
    config = transformers.DeepseekV4Config(**{key: made.config[key] for key in keys})
    model = transformers.DeepseekV4ForCausalLM(config).float()
    model.save_pretrained(tmp_path / "source")
    index = convert(tmp_path / "source", tmp_path / "model")
    assert verify(tmp_path / "model") == []
    assert index.tensors.keys() == made.values.keys() | {"experts"}
    assert {name: entry.shape for name, entry in index.tensors.items() if name != "experts"} == {
        name: values.shape for name, values in made.values.items()
    }
    directory, theirs = FtwDirectory(tmp_path / "model"), model.state_dict()
    for ours, name in (
        ("layers.1.attn.kv_norm.weight", "model.layers.1.self_attn.kv_norm.weight"),
        ("layers.1.attn.compressor.norm.weight",
         "model.layers.1.self_attn.compressor.kv_norm.weight"),
        ("layers.2.hc_ffn_fn", "model.layers.2.ffn_hc.fn"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
    ):  # fmt: skip
        assert np.array_equal(directory.tensor(ours), theirs[name].numpy()), ours
    gate, up, down = directory.expert(2, 3)
    both = theirs["model.layers.2.mlp.experts.gate_up_proj"][3].bfloat16().float().numpy()
    assert np.array_equal(np.concatenate((gate, up)), both)
    last = theirs["model.layers.2.mlp.experts.down_proj"][3].bfloat16().float().numpy()
    assert np.array_equal(down, last)


def test_a_gpt_oss_that_transformers_wrote(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = gpt_oss(plain=True)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok",
            "vocab_size")  # fmt: skip
    config = transformers.GptOssConfig(**{key: made.config[key] for key in keys})
    model = transformers.GptOssForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "source")
    index = convert(tmp_path / "source", tmp_path / "model")
    assert verify(tmp_path / "model") == []
    theirs = {name: value.float().numpy() for name, value in model.state_dict().items()}
    directory = FtwDirectory(tmp_path / "model")
    assert index.tensors.keys() == made.values.keys() | {"experts"}
    for name in index.tensors.keys() - {"experts"}:
        assert np.array_equal(directory.tensor(name), theirs[name]), name
    start = "model.layers.1.mlp.experts."
    found, biases = read_expert(tmp_path / "model", index, 1, 2)
    both, down = theirs[start + "gate_up_proj"][2].T, theirs[start + "down_proj"][2].T
    bias = theirs[start + "gate_up_proj_bias"][2]
    for ours, exact in zip(found, (both[0::2], both[1::2], down), strict=True):
        assert np.array_equal(ours, exact)
    for ours, exact in zip(
        biases, (bias[0::2], bias[1::2], theirs[start + "down_proj_bias"][2]), strict=True
    ):
        assert np.array_equal(ours, exact)
