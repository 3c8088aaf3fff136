"""Conversions into every weight format: what the directory means, says and refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetokend.core.errors import InvalidInputError, ModelDataError, Reason, ResourceError
from freetokend.ftw.convert import ConvertProgress, convert
from freetokend.ftw.formats import parse_format, record_layout
from freetokend.ftw.index import read_index
from freetokend.ftw.layout import ExpertBank
from freetokend.ftw.matrix import QuantMatrix, dequantise
from freetokend.ftw.model import ExpertSource, Wanted
from freetokend.ftw.pieces import expert_pieces, make_piece
from freetokend.ftw.reader import FtwDirectory
from freetokend.ftw.verify import verify
from tests.ftw import naive, naive_formats
from tests.ftw.big_checkpoints import write_big_mixtral
from tests.ftw.random_matrices import random_matrix
from tests.ftw.schemes import test_fp8
from tests.ftw.schemes.checkpoints import write_quantised
from tests.ftw.test_convert import expert_of
from tests.ftw.test_quantise import ERRORS
from tests.ftw.test_verify import flipped
from tests.support.tiny_checkpoints import write_tiny_mixtral, write_tiny_qwen3_moe

# Experts and other linear layers, and what the checkpoint looks like.
CASES: dict[tuple[str, str | None], dict[str, Any]] = {
    ("fp8_block", "fp8_block"): {"hidden": 150, "inter": 37},
    ("mxfp4", "int8_g32_f16"): {"hidden": 64, "inter": 96},
    ("mxfp4", "nvfp4"): {"hidden": 64, "inter": 96},
    ("nvfp4", None): {"hidden": 48, "inter": 80, "dtype": "f32"},
    ("int4_g32_f16", "q4_0"): {"hidden": 64, "inter": 32, "fused": True},
    ("int4_g64_bf16_zp", "mxfp4"): {"hidden": 64, "inter": 128, "dtype": "f16"},
    ("int8_g32_f16", "int8_g64_bf16_zp"): {"hidden": 64, "inter": 96},
    ("q4_K", "q6_K"): {"hidden": 256, "inter": 256, "heads": 16, "experts": 2, "layers": 1},
    ("q6_K", "q4_K"): {"hidden": 256, "inter": 256, "heads": 16, "experts": 2, "layers": 1},
}


def wanted(experts: str | None = None, dense: str | None = None) -> Wanted:
    return Wanted(
        experts=None if experts is None else parse_format(experts),
        dense=None if dense is None else parse_format(dense),
    )


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_directory_means_what_the_checkpoint_says(
    case: tuple[str, str | None], tmp_path: Path
) -> None:
    experts, dense = case
    write_tiny_mixtral(tmp_path / "source", **CASES[case])
    index = convert(tmp_path / "source", tmp_path / "model", wanted=wanted(experts, dense))
    assert read_index(tmp_path / "model") == index
    assert verify(tmp_path / "model") == []
    checkpoint = naive.read_checkpoint(tmp_path / "source")
    region = b"".join((tmp_path / "model" / s.file).read_bytes() for s in index.shards)
    bank = index.expert_bank
    assert bank.format == str(parse_format(experts))
    assert index.quantisation.experts_from == "bf16"
    check_tensors(FtwDirectory(tmp_path / "model"), region, checkpoint, dense)
    sums = np.zeros((2, 3))
    limit = 1.25 * ERRORS.get(bank.format, 0.1)
    for expert in range(bank.experts_per_layer_count):
        record = region[bank.record_offset_bytes(expert) :][: bank.record_bytes]
        sizes = (bank.hidden_size, bank.intermediate_size)
        matrices, _ = naive_formats.read_expert(record, bank.format, *sizes)
        exact = expert_of(checkpoint, 0, expert, bank.intermediate_size)
        read = FtwDirectory(tmp_path / "model").expert(0, expert)
        for part in range(3):
            assert relative(matrices[part], exact[part]) < limit
            assert np.allclose(read[part], matrices[part], rtol=1e-6, atol=1e-9)
            sums[0, part] += np.sum((matrices[part] - exact[part]) ** 2)
            sums[1, part] += np.sum(exact[part] ** 2)
    layer = index.quantisation.layer_errors[0]
    assert [layer.gate, layer.up, layer.down] == pytest.approx(np.sqrt(sums[0] / sums[1]), rel=1e-4)


def check_tensors(
    directory: FtwDirectory, region: bytes, checkpoint: dict[str, naive.Floats], dense: str | None
) -> None:
    name = "bf16" if dense is None else str(parse_format(dense))
    for tensor, entry in directory.index.tensors.items():
        if tensor == "experts":
            continue
        exact = checkpoint[tensor.replace("block_sparse_moe", "mlp")
                           if tensor not in checkpoint else tensor]  # fmt: skip
        found = directory.tensor(tensor)
        if entry.layout == "rows16":
            assert entry.dtype == name, tensor
            data = region[entry.offset_bytes :][: entry.length_bytes]
            rows, columns = entry.shape
            factor = struct.unpack("<f", data[-64:-60])[0] if name == "nvfp4" else 1.0
            first = naive_formats.read_matrix(data, name, min(rows, 20), columns, factor=factor)
            assert np.allclose(found[:20], first, rtol=1e-6)
            assert relative(found, exact) < (1.25 * ERRORS.get(name, 0.1))
        elif entry.dtype == "f32":
            assert np.array_equal(found, exact), tensor
        else:
            assert np.array_equal(found, naive.rounded(exact)), tensor
        is_kept = "norm" in tensor or tensor.endswith(("gate.weight", "embed_tokens.weight"))
        assert (entry.layout == "row_major") == is_kept


def test_bf16_says_nothing_of_errors(pristine: Path) -> None:
    index = read_index(pristine / "model")
    assert (index.quantisation.scheme, index.quantisation.layer_errors) == ("none", ())
    assert (index.expert_bank.has_bias, index.expert_bank.activation_limit) == (False, 0.0)


def test_tied_head_of_another_format_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    write_tiny_mixtral(tmp_path / "source", tied=True)
    index = convert(tmp_path / "source", tmp_path / "model", wanted=wanted(None, "fp8_block"))
    assert index.tied_embeddings
    embedding, head = (
        index.tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    assert (embedding.dtype, embedding.layout) == ("bf16", "row_major")
    assert (head.dtype, head.layout, head.shape) == ("fp8_block", "rows16", embedding.shape)
    assert "lm_head.weight" not in index.sources
    directory = FtwDirectory(tmp_path / "model")
    exact = directory.tensor("model.embed_tokens.weight")
    assert 0 < relative(directory.tensor("lm_head.weight"), exact) < ERRORS["fp8_block"]
    plain = convert(tmp_path / "source", tmp_path / "plain", wanted=wanted("fp8_block", "bf16"))
    assert "lm_head.weight" not in plain.tensors


@pytest.mark.parametrize(
    ("sizes", "formats", "message"),
    [
        ({"hidden": 576, "inter": 256}, ("q4_K", None),
         r"experts\.0\.w1\.weight: its width 576 is not a multiple of 256, the block of q4_K"),
        ({"hidden": 64, "inter": 40}, ("nvfp4", None),
         r"experts\.0\.w2\.weight: its width 40 is not a multiple of 16, the block of nvfp4"),
        ({"hidden": 64, "inter": 96}, (None, "int8_g128_f16"),
         r"lm_head\.weight: its width 64 is not a multiple of 128.*--quantize-dense"),
    ],
)  # fmt: skip
def test_formats_that_do_not_fit_are_refused_before_anything_is_written(
    sizes: dict[str, int], formats: tuple[str | None, str | None], message: str, tmp_path: Path
) -> None:
    write_tiny_mixtral(tmp_path / "source", experts=2, layers=1, vocab=32, **sizes)
    with pytest.raises(ModelDataError, match=message):
        convert(tmp_path / "source", tmp_path / "model", wanted=wanted(*formats))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_same_checkpoint_in_another_format_is_another_conversion(
    source: Path, tmp_path: Path
) -> None:
    first = convert(source, tmp_path / "model", wanted=wanted("nvfp4"))
    again = convert(source, tmp_path / "model", wanted=wanted("nvfp4"))
    assert again == first
    with pytest.raises(
        InvalidInputError, match=r"other weight formats \(experts: nvfp4\).*--force"
    ):
        convert(source, tmp_path / "model", wanted=wanted("fp8_block"))
    with pytest.raises(InvalidInputError, match="other weight formats"):
        convert(source, tmp_path / "model", wanted=wanted("nvfp4", "fp8_block"))
    index = convert(source, tmp_path / "model", wanted=wanted("nvfp4", "fp8_block"), force=True)
    assert index.tensors["lm_head.weight"].dtype == "fp8_block"


def set_first_number(source: Path, name: str, value: float) -> None:
    """Overwrite the first element of an fp32 tensor."""
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    (header_bytes,) = np.frombuffer(data[:8], np.uint64).tolist()
    header = json.loads(data[8 : 8 + header_bytes])
    start = 8 + header_bytes + header[name]["data_offsets"][0]
    data[start : start + 4] = np.float32(value).tobytes()
    path.write_bytes(data)


def test_numbers_that_a_format_does_not_have_are_named(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "model"
    write_tiny_mixtral(source, layers=1, experts=1, top_k=1, dtype="f32")
    name = "model.layers.0.block_sparse_moe.experts.0.w3.weight"
    set_first_number(source, name, 1e9)
    with pytest.raises(ModelDataError, match=rf"{name} holds a scale that is not finite in int4"):
        convert(source, target, wanted=wanted("q4_0"))
    convert(source, target, wanted=wanted("int4_g32_bf16"))
    set_first_number(source, name, float("inf"))
    with pytest.raises(ModelDataError, match=rf"{name} holds numbers that are not finite"):
        convert(source, target, wanted=wanted("mxfp4"), force=True)


def test_errors_are_told_as_layers_are_finished(source: Path, tmp_path: Path) -> None:
    seen: list[ConvertProgress] = []
    index = convert(source, tmp_path / "model", progress=seen.append, wanted=wanted("nvfp4"))
    notes = [step.note for step in seen if step.note]
    assert [note.split(":")[0] for note in notes] == ["layer 0", "layer 2"]
    layer = index.quantisation.layer_errors[1]
    assert f"{layer.gate:.4f} (gate), {layer.up:.4f} (up), {layer.down:.4f} (down)" in notes[1]


class InterruptionError(Exception):
    """Stands for whatever ends a conversion."""


def test_an_interrupted_conversion_tells_the_same(tmp_path: Path) -> None:
    def stop(step: ConvertProgress) -> None:
        if step.done_bytes > 80 << 20:
            raise InterruptionError

    write_big_mixtral(
        tmp_path / "source",
        layers=2,
        experts=4,
        hidden=1024,
        inter=2816,
        dtype="bf16",
        random=True,
        finite=True,
    )
    source, formats = tmp_path / "source", wanted("int8_g128_bf16")
    whole = convert(source, tmp_path / "whole", wanted=formats)
    with pytest.raises(InterruptionError):
        convert(source, tmp_path / "parts", progress=stop, wanted=formats)
    notes: list[str] = []
    parts = convert(
        source, tmp_path / "parts", progress=lambda step: notes.append(step.note), wanted=formats
    )
    shutil.rmtree(source)
    assert any("resuming" in note for note in notes)
    assert parts == whole
    assert [error.gate > 0.001 for error in parts.quantisation.layer_errors] == [True, True]


class WholeMatrix:
    """A MatrixSource over a matrix in memory, read in parts."""

    def __init__(self, matrix: QuantMatrix) -> None:
        self.name = "matrix"
        self.format = matrix.format
        self.rows_count = matrix.rows_count
        self.columns_count = matrix.columns_count
        self._matrix = matrix

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        rows = slice(first_row, first_row + count)
        scales = self._matrix.scales
        return replace(
            self._matrix,
            rows_count=count,
            codes=self._matrix.codes[rows],
            scales=None if scales is None else scales[rows],
        )


class Vector:
    """A VectorSource over values in memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def read(self) -> np.ndarray:
        return self.values


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "int8_g32_f16"])
def test_pieces_of_a_record_with_biases(name: str) -> None:
    hidden, inner = 96, 64
    random = np.random.default_rng(1)
    gate, up, down = (
        random_matrix(name, rows, columns, seed=part)
        for part, (rows, columns) in enumerate(((inner, hidden), (inner, hidden), (hidden, inner)))
    )
    biases = [random.standard_normal(size).astype(np.float32) for size in (inner, inner, hidden)]
    layout = record_layout(parse_format(name), hidden, inner, has_bias=True)
    bank = ExpertBank(
        format=name,
        offset_bytes=0,
        record_bytes=layout.record_bytes,
        moe_layers_count=1,
        experts_per_layer_count=1,
        hidden_size=hidden,
        intermediate_size=inner,
        moe_layer_indices=(0,),
        activation="silu",
        has_bias=True,
    )
    origin = ExpertSource(
        gate=WholeMatrix(gate),
        up=WholeMatrix(up),
        down=WholeMatrix(down),
        biases=(Vector(biases[0]), Vector(biases[1]), Vector(biases[2])),
    )
    record = np.zeros(bank.record_bytes, np.uint8)
    end = 0
    for piece in expert_pieces(bank, 0, 0, origin):
        made = make_piece(piece)
        assert piece.offset_bytes >= end
        end = piece.offset_bytes + piece.length_bytes
        record[piece.offset_bytes : end] = made.data
    found, added = naive_formats.read_expert(record.tobytes(), name, hidden, inner, has_bias=True)
    for matrix, values in zip((gate, up, down), found, strict=True):
        assert np.allclose(dequantise(matrix), values, rtol=1e-12, atol=0.0)
    for ours, theirs in zip(biases, added, strict=True):
        assert np.array_equal(ours, theirs)


def test_a_quantised_checkpoint_can_be_brought_into_other_formats(tmp_path: Path) -> None:
    source = tmp_path / "source"
    values = write_quantised(source, test_fp8.fp8("weight_scale_inv", "F32"), test_fp8.CONFIG)
    kept = convert(source, tmp_path / "kept", wanted=wanted("fp8_block"))
    assert (kept.expert_bank.format, kept.quantisation.layer_errors) == ("fp8_block", ())
    assert kept.quantisation.scheme == "fp8"
    index = convert(source, tmp_path / "model", wanted=wanted("nvfp4", "bf16"))
    assert (index.expert_bank.format, index.quantisation.experts_from) == ("nvfp4", "fp8_block")
    assert 0.05 < index.quantisation.layer_errors[0].up < 0.12
    directory = FtwDirectory(tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert index.tensors[name].dtype == "bf16"
    assert np.array_equal(directory.tensor(name), naive.rounded(values[name]))
    up = values["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert 0.05 < relative(directory.expert(0, 1)[1], up) < 0.12


def test_qwen_with_dense_layers(tmp_path: Path) -> None:
    write_tiny_qwen3_moe(tmp_path / "source", mlp_only_layers=[1], attention_bias=True)
    index = convert(tmp_path / "source", tmp_path / "model", wanted=wanted("nvfp4", "q8_0"))
    assert index.tensors["model.layers.1.mlp.gate_proj.weight"].dtype == "int8_g32_f16"
    assert index.tensors["model.layers.0.self_attn.q_proj.bias"].dtype == "f32"
    assert index.tensors["model.layers.0.mlp.gate.weight"].dtype == "f32"


def test_a_full_disk_and_a_changed_source_of_a_quantised_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target, formats = tmp_path / "model", wanted("nvfp4", "int8_g32_f16")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with pytest.raises(ResourceError, match="No space left") as caught:
            convert(source, target, wanted=formats)
    assert caught.value.reason is Reason.DISK_SPACE
    assert not target.exists()

    def touch(_: ConvertProgress) -> None:
        os.utime(source / "model.safetensors", ns=(7, 7))

    with pytest.raises(ModelDataError, match="changed while it was converted"):
        convert(source, target, progress=touch, wanted=formats)
    assert not target.exists()
    assert convert(source, target, wanted=formats) == read_index(target)


def test_a_flipped_and_a_short_shard_of_a_quantised_model(source: Path, tmp_path: Path) -> None:
    index = convert(source, tmp_path / "model", wanted=wanted("nvfp4", "fp8_block"))
    bank = index.expert_bank
    record = bank.record_offset_bytes(bank.expert_id(1, 3))
    shard = index.shards[0]
    # A scale of the first super-group: one bit changes 16 weights.
    with flipped(tmp_path / "model", index, record):
        (damage,) = verify(tmp_path / "model")
    assert "experts" in damage.tensors
    assert any(part.layer_index == 2 for part in damage.experts)
    assert verify(tmp_path / "model") == []
    os.truncate(tmp_path / "model" / shard.file, record - shard.offset_bytes)
    (damage,) = verify(tmp_path / "model")
    assert "cut short" in damage.problem
    assert "layer 2 expert 3 to layer 2 expert 7" in damage.problem
