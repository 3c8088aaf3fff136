"""Round trips: what a checkpoint says is what the directory holds, read by independent code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetokend.core.errors import FreetokenError, InvalidInputError, ModelDataError
from freetokend.ftw.convert import ConvertProgress, convert
from freetokend.ftw.index import read_index
from freetokend.ftw.layout import ROWS16
from freetokend.ftw.reader import FtwDirectory
from tests.ftw import naive
from tests.support.tiny_checkpoints import write_tiny_mixtral, write_tiny_qwen3_moe

MIXTRAL_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
QWEN_EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"

CASES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "mixtral bf16": (write_tiny_mixtral, {"dtype": "bf16"}),
    "mixtral f16 tied": (write_tiny_mixtral, {"dtype": "f16", "tied": True, "shards": 2}),
    "mixtral f32 odd sizes": (
        write_tiny_mixtral,
        {"dtype": "f32", "hidden": 51, "inter": 37, "experts": 3, "vocab": 269},
    ),
    "mixtral fused odd": (
        write_tiny_mixtral,
        {"dtype": "bf16", "hidden": 34, "inter": 21, "fused": True},
    ),
    "qwen bf16 dense layers": (write_tiny_qwen3_moe, {"mlp_only_layers": [0], "shards": 3}),
    "qwen f16 bias step 2": (
        write_tiny_qwen3_moe,
        {"dtype": "f16", "attention_bias": True, "decoder_sparse_step": 2, "layers": 4},
    ),
    "qwen f32 tied odd": (
        write_tiny_qwen3_moe,
        {"dtype": "f32", "tied": True, "hidden": 45, "inter": 19, "dense_inter": 33,
         "mlp_only_layers": [2]},
    ),
    "qwen fused": (write_tiny_qwen3_moe, {"fused": True, "norm_topk_prob": False}),
}  # fmt: skip


def write_case(name: str, directory: Path) -> None:
    write, options = CASES[name]
    write(directory, **options)


def expert_of(
    checkpoint: dict[str, naive.Floats], layer: int, expert: int, inner: int
) -> tuple[naive.Floats, naive.Floats, naive.Floats]:
    fused = checkpoint.get(f"model.layers.{layer}.mlp.experts.gate_up_proj")
    if fused is not None:
        down = checkpoint[f"model.layers.{layer}.mlp.experts.down_proj"]
        return fused[expert, :inner], fused[expert, inner:], down[expert]
    for pattern, names in ((MIXTRAL_EXPERT, "w1 w3 w2"), (QWEN_EXPERT, "gate up down")):
        keys = [pattern.format(layer=layer, expert=expert, matrix=name) for name in names.split()]
        if keys[0] in checkpoint:
            return tuple(checkpoint[key] for key in keys)  # type: ignore[return-value]
    raise AssertionError("no known naming")


@pytest.mark.parametrize("name", CASES)
def test_region_holds_the_checkpoint(name: str, tmp_path: Path) -> None:
    write_case(name, tmp_path / "source")
    index = convert(tmp_path / "source", tmp_path / "model", threads_count=2)
    checkpoint = naive.read_checkpoint(tmp_path / "source")
    region = b"".join((tmp_path / "model" / s.file).read_bytes() for s in index.shards)
    assert len(region) == index.region_bytes
    assert set(index.sources) == set(checkpoint)

    directory = FtwDirectory(tmp_path / "model")
    for tensor, entry in index.tensors.items():
        if tensor == "experts":
            continue
        original = tensor if tensor in checkpoint else tensor.replace("block_sparse_moe", "mlp")
        wanted = checkpoint[original]
        raw = region[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        if entry.dtype == "f32":
            found = np.frombuffer(raw, "<f4").astype(np.float64).reshape(entry.shape)
        elif entry.layout == ROWS16:
            wanted = naive.rounded(wanted)
            found = naive.unpack_rows16(raw, *entry.shape)
        else:
            wanted = naive.rounded(wanted)
            count = entry.length_bytes // 2
            found = np.array([naive.bf16_at(raw, i) for i in range(count)]).reshape(entry.shape)
        assert np.array_equal(found, wanted), tensor
        assert np.array_equal(directory.tensor(tensor), wanted), tensor

    bank = index.expert_bank
    for moe_layer, layer in enumerate(bank.moe_layer_indices):
        for expert in range(bank.experts_per_layer_count):
            expert_id = moe_layer * bank.experts_per_layer_count + expert
            start = bank.offset_bytes + expert_id * bank.record_bytes
            record = region[start : start + bank.record_bytes]
            sizes = (bank.hidden_size, bank.intermediate_size)
            wanted = expert_of(checkpoint, layer, expert, bank.intermediate_size)
            found = naive.unpack_expert(record, *sizes)
            for ours, theirs, read in zip(
                found, wanted, directory.expert(moe_layer, expert), strict=True
            ):
                assert np.array_equal(ours, naive.rounded(theirs)), (layer, expert)
                assert np.array_equal(ours, read)


def test_what_lies_between_tensors_is_zero(pristine: Path) -> None:
    index = read_index(pristine / "model")
    region = b"".join((pristine / "model" / s.file).read_bytes() for s in index.shards)
    end = 0
    for entry in sorted(index.tensors.values(), key=lambda e: e.offset_bytes):
        assert not any(region[end : entry.offset_bytes])
        end = entry.end_bytes
    assert end == len(region)


def test_index_describes_the_model(pristine: Path) -> None:
    index = read_index(pristine / "model")
    assert (index.architecture, index.model_type) == ("Qwen3MoeForCausalLM", "qwen3_moe")
    assert index.expert_bank.moe_layer_indices == (0, 2), "the dense layer takes no rows"
    router = index.router
    assert (router.scoring, router.selection, router.top_k_count) == ("softmax", "top_k", 2)
    assert (router.normalise, router.weight_scale) == (True, 1.0)
    embedding = index.tensors["model.embed_tokens.weight"]
    assert (embedding.layout, embedding.dtype) == ("row_major", "bf16")
    assert index.tensors["model.layers.0.mlp.gate.weight"].dtype == "f32"
    assert index.tensors["model.layers.0.self_attn.q_norm.weight"].dtype == "f32"
    assert len(index.identity_bytes) == 32


def test_tied_embedding_is_one_tensor_fit_for_both_uses(tmp_path: Path) -> None:
    write_tiny_mixtral(tmp_path / "source", tied=True)
    index = convert(tmp_path / "source", tmp_path / "model")
    assert index.tied_embeddings
    assert index.tensors["model.embed_tokens.weight"].layout == ROWS16
    assert "lm_head.weight" not in index.tensors


def add_tied_head(source: Path, *, like_embedding: bool) -> None:
    write_tiny_mixtral(source, tied=False)
    checkpoint_file = source / "model.safetensors"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if like_embedding:
        data = bytearray(checkpoint_file.read_bytes())
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        begin, end = header["model.embed_tokens.weight"]["data_offsets"]
        head = header["lm_head.weight"]["data_offsets"][0]
        start = 8 + size
        data[start + head : start + head + end - begin] = data[start + begin : start + end]
        checkpoint_file.write_bytes(data)


def test_tied_head_that_was_saved_too_must_equal_the_embedding(tmp_path: Path) -> None:
    add_tied_head(tmp_path / "same", like_embedding=True)
    index = convert(tmp_path / "same", tmp_path / "model")
    assert "lm_head.weight" in index.sources
    add_tied_head(tmp_path / "differs", like_embedding=False)
    with pytest.raises(ModelDataError, match=r"lm_head\.weight and .* differ"):
        convert(tmp_path / "differs", tmp_path / "other")


def test_side_files_come_along(pristine: Path) -> None:
    index = read_index(pristine / "model")
    copied = {side.file for side in index.side_files}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= copied
    for file in copied:
        original = (pristine / "source" / file).read_bytes()
        assert (pristine / "model" / file).read_bytes() == original
    config = FtwDirectory(pristine / "model").model_config()
    assert config == json.loads((pristine / "source" / "config.json").read_text())
    names = {path.name for path in (pristine / "model").iterdir()}
    assert names == copied | {"00000.ftw", "freetoken_weight.json"}


def test_progress_is_in_bytes_and_rises_to_the_total(source: Path, tmp_path: Path) -> None:
    seen: list[ConvertProgress] = []
    index = convert(source, tmp_path / "model", progress=seen.append)
    done = [step.done_bytes for step in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, index.region_bytes)
    assert {step.total_bytes for step in seen} == {index.region_bytes}


def test_conversion_is_reproducible(source: Path, tmp_path: Path) -> None:
    first = convert(source, tmp_path / "one", threads_count=1)
    second = convert(source, tmp_path / "two", threads_count=4)
    assert first == second
    assert (tmp_path / "one/00000.ftw").read_bytes() == (tmp_path / "two/00000.ftw").read_bytes()


def test_identity_follows_the_source_even_when_only_its_time_differs(
    source: Path, tmp_path: Path
) -> None:
    first = convert(source, tmp_path / "one")
    os.utime(source / "model.safetensors", ns=(1, 1))
    second = convert(source, tmp_path / "two")
    assert first.shards == second.shards
    assert first.identity != second.identity


class TestTarget:
    def test_complete_conversion_of_the_same_source_is_left_alone(
        self, source: Path, tmp_path: Path
    ) -> None:
        index = convert(source, tmp_path / "model")
        before = (tmp_path / "model/00000.ftw").stat()
        notes: list[str] = []
        again = convert(source, tmp_path / "model", progress=lambda p: notes.append(p.note))
        assert again == index
        assert (tmp_path / "model/00000.ftw").stat().st_ino == before.st_ino
        assert any("already" in note for note in notes)

    def test_conversion_of_another_source_is_refused_and_forced(
        self, source: Path, tmp_path: Path
    ) -> None:
        write_tiny_mixtral(tmp_path / "other")
        convert(tmp_path / "other", tmp_path / "model")
        with pytest.raises(InvalidInputError, match=r"another checkpoint.*--force"):
            convert(source, tmp_path / "model")
        index = convert(source, tmp_path / "model", force=True)
        assert read_index(tmp_path / "model") == index
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "other", "source"]

    def test_damaged_conversion_is_refused_and_forced(self, source: Path, model: Path) -> None:
        os.truncate(model / "00000.ftw", 4096)
        with pytest.raises(InvalidInputError, match=r"damaged.*cut short.*--force"):
            convert(source, model)
        index = convert(source, model, force=True)
        assert read_index(model) == index

    @pytest.mark.parametrize("force", [False, True])
    def test_foreign_directories_are_never_replaced(
        self, source: Path, tmp_path: Path, force: bool
    ) -> None:
        home = tmp_path / "home"
        home.mkdir()
        (home / "letter.txt").write_text("precious")
        with pytest.raises(InvalidInputError, match=r"not an FTW directory.*letter\.txt"):
            convert(source, home, force=force)
        assert (home / "letter.txt").read_text() == "precious"

    def test_an_empty_directory_is_taken(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        convert(source, tmp_path / "model")
        read_index(tmp_path / "model")

    def test_a_file_in_the_way_is_refused(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "model").write_text("")
        with pytest.raises(InvalidInputError, match="not a directory"):
            convert(source, tmp_path / "model")

    @pytest.mark.parametrize("target", [".", "inside", ".."])
    def test_source_and_target_may_not_contain_one_another(self, source: Path, target: str) -> None:
        with pytest.raises(InvalidInputError, match="must not contain one another"):
            convert(source, source / target, force=True)

    def test_missing_parents_are_made(self, source: Path, tmp_path: Path) -> None:
        convert(source, tmp_path / "a" / "b" / "model")
        read_index(tmp_path / "a" / "b" / "model")

    def test_unwritable_parent_is_named(self, source: Path) -> None:
        with pytest.raises(FreetokenError, match="cannot create /proc/"):
            convert(source, "/proc/model")

    def test_tiny_shards_are_refused(self, source: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="67108864"):
            convert(source, tmp_path / "model", max_shard_bytes=4096)

    @pytest.mark.parametrize("threads_count", [0, 257])
    def test_thread_counts_are_bounded(
        self, source: Path, tmp_path: Path, threads_count: int
    ) -> None:
        with pytest.raises(InvalidInputError, match=r"outside 1\.\.256"):
            convert(source, tmp_path / "model", threads_count=threads_count)
