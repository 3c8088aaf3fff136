"""GGUF models: every type bit for bit, names, reordered rows, parts, and damage."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.schemes.registry import open_scheme
from tests.ftw.schemes.checkpoints import edit_config, is_quantised, read_all

gguf = pytest.importorskip("gguf")
from tests.ftw.schemes.gguf_checkpoints import Type, write_gguf  # noqa: E402

FORMATS = {
    "Q4_0": "int4_g32_f16",
    "Q8_0": "int8_g32_f16",
    "MXFP4": "mxfp4",
    "Q4_K": "q4_K",
    "Q6_K": "q6_K",
}


@pytest.mark.parametrize("mixtral", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_types(kind: str, mixtral: bool, tmp_path: Path) -> None:
    meaning = write_gguf(tmp_path, Type[kind], mixtral=mixtral)
    matrices = {name: values for name, values in meaning.items() if is_quantised(name)}
    assert len(matrices) == 16
    for name, (weight_format, found) in read_all(tmp_path, matrices).items():
        assert weight_format == FORMATS[kind]
        assert np.array_equal(found.astype(np.float32), matrices[name]), name
        assert matrices[name].std() > 0.001
    with Checkpoint(tmp_path) as checkpoint:
        scheme = open_scheme(checkpoint)
        for name in meaning.keys() - matrices.keys():
            tensor = scheme.tensor(name)
            assert tensor is not None
            assert tensor.shape == meaning[name].shape
        assert not scheme.consumed
        assert scheme.ignorable("rope_freqs.weight")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types(kind: str, tmp_path: Path) -> None:
    """Queries and keys of the llama architecture are reordered; others are taken where they lie."""
    meaning = write_gguf(tmp_path, Type[kind], mixtral=True)
    attention = {name: values for name, values in meaning.items() if ".self_attn." in name}
    reordered = {
        name: attention[name] for name in attention if "q_proj" in name or "k_proj" in name
    }
    for name, (weight_format, found) in read_all(tmp_path, reordered).items():
        assert weight_format == "bf16"
        assert np.array_equal(found, meaning[name]), "the values are bf16 from the start"
    with Checkpoint(tmp_path) as checkpoint:
        scheme = open_scheme(checkpoint)
        for name in attention.keys() - reordered.keys():
            assert scheme.matrix(name, *meaning[name].shape) is None
        expert = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
        assert scheme.matrix(expert, 256, 256) is None
        part, whole = scheme.tensor(expert), checkpoint.tensors["blk.0.ffn_down_exps.weight"]
        assert part is not None
        assert part.offset_bytes == whole.offset_bytes + 2 * part.length_bytes
        assert 4 * part.length_bytes == whole.length_bytes


def test_the_package_agrees_on_the_header(tmp_path: Path) -> None:
    write_gguf(tmp_path, Type.Q8_0)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    with Checkpoint(tmp_path) as checkpoint:
        assert len(reader.tensors) == len(checkpoint.tensors)
        for theirs in reader.tensors:
            ours = checkpoint.tensors[theirs.name]
            assert ours.dtype == theirs.tensor_type.name
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert (ours.offset_bytes, ours.length_bytes) == (theirs.data_offset, theirs.n_bytes)
        values = checkpoint.gguf_values
        assert values is not None
        assert values["general.architecture"] == "qwen3moe"
        assert values["qwen3moe.expert_count"] == 4


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    for kind in ("Q5_K", "IQ4_XS", "Q4_1"):
        write_gguf(tmp_path / kind, Type.Q8_0)
        path = tmp_path / kind / "model.gguf"
        data = bytearray(path.read_bytes())
        name = b"blk.0.attn_k.weight"
        place = data.index(name) + len(name) + 4 + 2 * 8
        data[place : place + 4] = struct.pack("<I", Type[kind].value)
        path.write_bytes(data)
        message = rf"tensor blk\.0\.attn_k\.weight is of type {kind}, which is not implemented"
        with pytest.raises(ModelDataError, match=message) as caught:
            Checkpoint(tmp_path / kind)
        assert caught.value.reason is Reason.MODEL_UNSUPPORTED


def test_metadata_must_agree_with_the_configuration(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a", Type.Q8_0, facts={"attention.head_count_kv": 4})
    with (
        Checkpoint(tmp_path / "a") as checkpoint,
        pytest.raises(
            ModelDataError,
            match=r"qwen3moe\.attention\.head_count_kv = 4, .*num_key_value_heads = 2",
        ),
    ):
        open_scheme(checkpoint)
    write_gguf(tmp_path / "b", Type.Q8_0)
    edit_config(tmp_path / "b", model_type="mixtral")
    with (
        Checkpoint(tmp_path / "b") as checkpoint,
        pytest.raises(
            ModelDataError, match=r"'qwen3moe' and config\.json of the type 'mixtral'; .*'llama'"
        ),
    ):
        open_scheme(checkpoint)
    edit_config(
        tmp_path / "b", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32}
    )
    with (
        Checkpoint(tmp_path / "b") as checkpoint,
        pytest.raises(ModelDataError, match=r"config\.json of the model that was not quantised"),
    ):
        open_scheme(checkpoint)


def test_shapes_must_agree_with_the_configuration(tmp_path: Path) -> None:
    write_gguf(tmp_path, Type.Q8_0)
    with Checkpoint(tmp_path) as checkpoint:
        scheme = open_scheme(checkpoint)
        with pytest.raises(ModelDataError, match=r"blk\.0\.attn_q\.weight has the shape"):
            scheme.matrix("model.layers.0.self_attn.q_proj.weight", 512, 256)
        with pytest.raises(ModelDataError, match=r"ffn_up_exps.* has an expert 4 in it"):
            scheme.matrix("model.layers.0.mlp.experts.4.up_proj.weight", 256, 256)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    write_gguf(directory, Type.Q8_0)
    return directory


class TestParts:
    def split(self, whole: Path, directory: Path) -> list[Path]:
        """The model of `whole` in two files, as llama.cpp's own tool splits it."""
        shutil.copytree(whole, directory)
        (directory / "model.gguf").unlink()
        reader = gguf.GGUFReader(whole / "model.gguf")
        halves = (reader.tensors[:9], reader.tensors[9:])
        paths = []
        for number, tensors in enumerate(halves):
            paths.append(directory / f"tiny-{number + 1:05d}-of-00002.gguf")
            writer = gguf.GGUFWriter(paths[-1], "qwen3moe")
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 2)
            writer.add_int32("split.tensors.count", len(reader.tensors))
            for tensor in tensors:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        return paths

    def test_parts_are_one_model(self, whole: Path, tmp_path: Path) -> None:
        self.split(whole, tmp_path / "parts")
        with Checkpoint(whole) as one, Checkpoint(tmp_path / "parts") as two:
            assert one.tensors.keys() == two.tensors.keys()
            assert len(two.files) == 2
            for name, tensor in one.tensors.items():
                other = two.tensors[name]
                raw = (one.read(tensor, 0, 64), two.read(other, 0, 64))
                assert np.array_equal(*raw)

    def test_a_part_that_is_missing(self, whole: Path, tmp_path: Path) -> None:
        first, second = self.split(whole, tmp_path / "parts")
        second.unlink()
        with pytest.raises(ModelDataError, match="part 2 of 2 of the GGUF model is missing"):
            Checkpoint(tmp_path / "parts")
        shutil.copy(first, second)
        with pytest.raises(ModelDataError, match=r"calls itself part 0 of 2 .* not 1 of 2"):
            Checkpoint(tmp_path / "parts")

    def test_several_models(self, whole: Path, tmp_path: Path) -> None:
        self.split(whole, tmp_path / "parts")
        shutil.copy(whole / "model.gguf", tmp_path / "parts")
        with pytest.raises(ModelDataError, match="holds several GGUF models"):
            Checkpoint(tmp_path / "parts")

    def test_both_kinds_of_files(self, whole: Path, tmp_path: Path) -> None:
        shutil.copytree(whole, tmp_path / "both")
        (tmp_path / "both" / "model.safetensors").touch()
        with pytest.raises(ModelDataError, match=r"holds both model\.safetensors and model\.gguf"):
            Checkpoint(tmp_path / "both")


def test_damaged_files_are_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy" / "model.gguf"
    data = path.read_bytes()
    huge = struct.pack("<Q", 1 << 62)
    for content, message in (
        (b"", "the file ends within its header"),
        (data[:3], "the file ends within its header"),
        (b"GGML" + data[4:], "not a GGUF file"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1"),
        (data[:4] + struct.pack(">I", 3) + data[8:], "GGUF version 50331648 .or of a big-endian"),
        (data[:8] + huge + data[16:], r"4611686018427387904 tensors are more than"),
        (data[:16] + huge + data[24:], r"4611686018427387904 values are more than"),
        (data[:24] + huge + data[32:], "bytes of text are more than"),
        (data[:-64], r"tensor .* is incomplete"),
        (data[:400], "the file ends within its header"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelDataError, match=message):
            Checkpoint(tmp_path / "copy")


def test_no_cut_or_flip_of_the_header_is_fatal(whole: Path, tmp_path: Path) -> None:
    """Whatever a damaged header says, the answer is ours: an error that names the file."""
    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy" / "model.gguf"
    data = path.read_bytes()
    header_bytes = min(tensor.offset_bytes for tensor in _tensors(whole))
    random = np.random.default_rng(9)
    messages = []
    for _ in range(150):
        damaged = bytearray(data)
        damaged[int(random.integers(header_bytes))] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            Checkpoint(tmp_path / "copy").close()
        except ModelDataError as error:
            messages.append(error.message)
    assert len(messages) > 15
    assert all("model.gguf" in message or "parts" in message for message in messages)


def _tensors(directory: Path) -> list[object]:
    with Checkpoint(directory) as checkpoint:
        return list(checkpoint.tensors.values())
