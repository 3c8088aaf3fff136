"""The index reader: what it refuses and how it says so."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.contents import content_identity, index_document, index_json
from freetokend.ftw.index import INDEX_FILE, FtwIndex, read_index
from freetokend.ftw.reader import FtwDirectory
from freetokend.ftw.schema import MAX_INDEX_BYTES, index_from_json
from freetokend.native.pool import FTW_FORMAT_VERSION

Document = dict[str, Any]


@pytest.fixture(scope="session")
def document(pristine: Path) -> Document:
    loaded: Document = json.loads((pristine / "model" / INDEX_FILE).read_text())
    return loaded


def test_written_and_read_again(pristine: Path) -> None:
    index = read_index(pristine / "model")
    assert index_from_json(index_json(index), "x") == index
    assert index_json(index) == (pristine / "model" / INDEX_FILE).read_bytes()


def test_pools_are_made_for_the_version_that_is_written(pristine: Path) -> None:
    assert read_index(pristine / "model").format_version == FTW_FORMAT_VERSION


def at(document: Document, *keys: Any) -> Any:
    for key in keys:
        document = document[key]
    return document


def set_at(*path: Any) -> Callable[[Document], None]:
    """A change: the last of `path` becomes the value at the keys before it."""
    *keys, last, value = path

    def change(document: Document) -> None:
        at(document, *keys)[last] = value

    return change


NORM = "model.norm.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"

CHANGES: dict[str, tuple[Callable[[Document], object], str]] = {
    "other format": (set_at("format", "gguf"), "not an FTW index"),
    "newer version": (set_at("format_version", 4), "format_version is 4 and this program reads 3"),
    "older version": (set_at("format_version", 2), "format_version is 2"),
    "other layout": (set_at("layout_version", 9), "layout_version is 9"),
    "version as text": (set_at("format_version", "3"), "must be an integer, not a string"),
    "version as boolean": (set_at("format_version", True), "must be an integer, not a boolean"),
    "unknown key": (set_at("surprise", 1), "unknown key 'surprise'"),
    "missing key": (lambda d: d.pop("router"), "router is missing"),
    "no region": (set_at("region_bytes", 0), "region_bytes is 0"),
    "negative region": (set_at("region_bytes", -4096), "region_bytes is -4096"),
    "huge region": (set_at("region_bytes", 1 << 70), "outside"),
    "region as float": (set_at("region_bytes", 4096.0), "must be an integer"),
    "region beyond the shards": (lambda d: d.update(region_bytes=d["region_bytes"] + 4096),
                                 "shards hold"),
    "no shards": (set_at("shards", []), "shards hold 0 bytes"),
    "absolute path": (set_at("shards", 0, "file", "/etc/shadow"), "'/etc/shadow', which does not"),
    "path upward": (set_at("shards", 0, "file", "../00000.ftw"), "does not match"),
    "name out of turn": (set_at("shards", 0, "file", "00001.ftw"), "does not match 00000"),
    "shard of odd length": (set_at("shards", 0, "length_bytes", 5000), "not a multiple of 4096"),
    "gap between shards": (set_at("shards", 0, "offset_bytes", 4096), "offset_bytes is 4096"),
    "too few checksums": (set_at("shards", 0, "block_checksums", []), "0 entries for 1 blocks"),
    "too many checksums": (lambda d: d["shards"][0]["block_checksums"].append("0" * 16),
                           "more than 1"),
    "checksum of odd form": (set_at("shards", 0, "block_checksums", 0, "XYZ"), "does not match"),
    "tensor off the page": (set_at("tensors", NORM, "offset_bytes", 100), "multiple of 4096"),
    "tensor at a negative place": (set_at("tensors", NORM, "offset_bytes", -4096), "is -4096"),
    "tensor beyond the region": (set_at("tensors", NORM, "offset_bytes", 1 << 40),
                                 f"tensor {NORM} ends at .* beyond the region"),
    "tensor over another": (lambda d: d["tensors"][NORM].update(
        offset_bytes=d["tensors"][Q0]["offset_bytes"]), "overlaps"),
    "tensor of the wrong length": (set_at("tensors", NORM, "length_bytes", 100), "takes 256"),
    "huge shape": (set_at("tensors", NORM, "shape", [1 << 40]), "outside 1"),
    "empty shape": (set_at("tensors", NORM, "shape", []), "has 0 sizes"),
    "shape of zero": (set_at("tensors", NORM, "shape", [0]), "shape is 0"),
    "long shape": (set_at("tensors", NORM, "shape", [1] * 5), "more than 4"),
    "rows16 vector": (set_at("tensors", Q0, "shape", [8192]), "wrong for the layout rows16"),
    "fp32 rows16": (set_at("tensors", Q0, "dtype", "f32"), "layout rows16 does not have"),
    "unknown dtype": (set_at("tensors", Q0, "dtype", "f64"), "f64, which the layout rows16 does"),
    "another format than the bytes": (set_at("tensors", Q0, "dtype", "fp8_block"), "takes"),
    "alias of a format": (set_at("tensors", Q0, "dtype", "q8_0"), "rows16 does not have"),
    "format of wider matrices": (set_at("tensors", Q0, "dtype", "q4_K"), "not a multiple of 256"),
    "plain fp8": (set_at("tensors", NORM, "dtype", "fp8_block"), "row_major does not have"),
    "unknown layout": (set_at("tensors", Q0, "layout", "tiles"), "does not match"),
    "tensor name with a line break": (lambda d: d["tensors"].update({"a\nb": d["tensors"][Q0]}),
                                      "name of a tensor"),
    "surrogate in a name": (lambda d: d["tensors"].update({"\ud800": d["tensors"][Q0]}),
                            "name of a tensor"),
    "tensors as list": (set_at("tensors", []), "must be an object, not a list"),
    "no bank tensor": (lambda d: d["tensors"].pop("experts"), "does not describe the same place"),
    "bank elsewhere": (set_at("expert_bank", "offset_bytes", 0), "does not describe the same"),
    "bank of an unknown format": (set_at("expert_bank", "format", "mxfp9"), "mxfp9 is unknown"),
    "bank of another format": (set_at("expert_bank", "format", "int8_g32_f16"),
                               "not a multiple of 32"),
    "bank of an alias": (set_at("expert_bank", "format", "q4_0"), "q4_0 is unknown"),
    "biases that are not there": (set_at("expert_bank", "has_bias", True), "identity is not"),
    "limit below zero": (set_at("expert_bank", "activation_limit", -1), "activation_limit is -1"),
    "alpha as text": (set_at("expert_bank", "activation_alpha", "1.7"), "must be a number"),
    "error below zero": (lambda d: d["quantisation"]["layer_errors"].append(
        {"layer_index": 0, "gate": -0.1, "up": 0, "down": 0}), "gate is -0.1"),
    "error without a matrix": (lambda d: d["quantisation"]["layer_errors"].append(
        {"layer_index": 0, "gate": 0, "up": 0}), "down is missing"),
    "record of the wrong size": (set_at("expert_bank", "record_bytes", 4096), "take 20480"),
    "huge bank": (set_at("expert_bank", "experts_per_layer_count", 1 << 20),
                  "does not describe the same place"),
    "no layers": (set_at("expert_bank", "moe_layers_count", 0), "moe_layers_count is 0"),
    "layers missing": (set_at("expert_bank", "moe_layer_indices", [0]), "1 of 2 entries"),
    "layers out of order": (set_at("expert_bank", "moe_layer_indices", [2, 0]), "does not rise"),
    "unknown activation": (set_at("expert_bank", "activation", "relu"), "does not match silu"),
    "unknown scoring": (set_at("router", "scoring", "dice"), "does not match softmax"),
    "more experts chosen than there are": (set_at("router", "top_k_count", 9), "9 of 8 experts"),
    "flag as number": (set_at("router", "normalise", 1), "must be true or false"),
    "scale out of range": (set_at("router", "weight_scale", -1), "weight_scale is -1"),
    "null where text belongs": (set_at("identity", None), "must be a string, not null"),
    "identity of odd form": (set_at("identity", "abc"), "does not match"),
    "source name of odd form": (set_at("sources", 0, "a b"), "sources is 'a b'"),
    "side file elsewhere": (set_at("side_files", 0, "file", "../x"), "does not match"),
    "another identity": (set_at("identity", "0" * 64), "identity is not that of the contents"),
    "changed checksum": (set_at("shards", 0, "block_checksums", 0, "0" * 16), "identity is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changed_index_is_refused(name: str, document: Document) -> None:
    change, message = CHANGES[name]
    changed = copy.deepcopy(document)
    change(changed)
    with pytest.raises(ModelDataError, match=message) as caught:
        index_from_json(json.dumps(changed).encode(), "DIR/freetoken_weight.json")
    assert caught.value.message.startswith("DIR/freetoken_weight.json")


@pytest.mark.parametrize("name", ["newer version", "other layout", "bank of an unknown format"])
def test_what_another_version_may_read_is_unsupported_not_invalid(
    name: str, document: Document
) -> None:
    changed = copy.deepcopy(document)
    CHANGES[name][0](changed)
    with pytest.raises(ModelDataError) as caught:
        index_from_json(json.dumps(changed).encode(), "x")
    assert caught.value.reason is Reason.MODEL_UNSUPPORTED


TEXTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Expecting value"),
    "no object": (b"[]", "must be an object, not a list"),
    "a number": (b"7", "must be an object, not a number"),
    "cut short": (b'{"format": "free', "Unterminated"),
    "duplicate key": (b'{"format": 1, "format": 2}', "'format' appears twice"),
    "NaN": (b'{"format": NaN}', "NaN is not a number"),
    "infinity": (b'{"format": -Infinity}', "-Infinity is not a number"),
    "number out of range": (b'{"format": 1e999}', "out of range"),
    "endless digits": (b'{"format": ' + b"9" * 100_000 + b"}", "number of 100000 digits"),
    "deep nesting": (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nested too deeply"),
    "not UTF-8": (b'{"format": "\xff"}', "not UTF-8"),
    "UTF-16": ('{"format": 1}'.encode("utf-16"), "not UTF-8"),
    "many elements": (b"[" + b"0," * 2_000_000 + b"0]", "more than 1500000 elements"),
    "zeros": (bytes(4096), "Expecting value"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_no_index(name: str) -> None:
    text, message = TEXTS[name]
    with pytest.raises(ModelDataError, match=message):
        index_from_json(text, "x")


def test_any_change_of_contents_changes_the_identity(pristine: Path) -> None:
    index = read_index(pristine / "model")
    shard = replace(index.shards[0], block_checksums=("0" * 16,))
    variants = [
        replace(index, shards=(shard,)),
        replace(index, source=replace(index.source, identity="0" * 64)),
        replace(index, layout_version=2),
        replace(index, tensors=dict(list(index.tensors.items())[1:])),
        replace(index, router=replace(index.router, top_k_count=1)),
        replace(index, expert_bank=replace(index.expert_bank, offset_bytes=0)),
    ]
    identities = {content_identity(variant) for variant in [index, *variants]}
    assert len(identities) == 1 + len(variants)


class TestFiles:
    def test_no_such_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ModelDataError, match="is missing; it is needed as the index"):
            read_index(tmp_path / "nowhere")

    def test_index_larger_than_allowed_is_not_read(self, model: Path) -> None:
        os.truncate(model / INDEX_FILE, MAX_INDEX_BYTES + 1)
        with pytest.raises(ModelDataError, match=f"may have at most {MAX_INDEX_BYTES}"):
            read_index(model)

    def test_index_that_is_a_directory(self, model: Path) -> None:
        (model / INDEX_FILE).unlink()
        (model / INDEX_FILE).mkdir()
        with pytest.raises(ModelDataError, match="not a regular file"):
            read_index(model)

    def test_index_that_is_a_pipe_does_not_block(self, model: Path) -> None:
        (model / INDEX_FILE).unlink()
        os.mkfifo(model / INDEX_FILE)
        with pytest.raises(ModelDataError, match="not a regular file"):
            read_index(model)

    def test_missing_shard_names_what_was_in_it(self, model: Path) -> None:
        (model / "00000.ftw").unlink()
        with pytest.raises(
            ModelDataError, match=r"00000\.ftw is missing.*layer 0 expert 0 to layer 2 expert 7"
        ):
            read_index(model)

    def test_truncated_shard_names_the_first_missing_expert(self, model: Path) -> None:
        bank = read_index(model).expert_bank
        kept_bytes = bank.record_offset_bytes(bank.expert_id(1, 5)) + 10
        os.truncate(model / "00000.ftw", kept_bytes)
        with pytest.raises(
            ModelDataError,
            match=rf"00000\.ftw is cut short: {kept_bytes} of .*"
            r"missing layer 2 expert 5 to layer 2 expert 7",
        ):
            read_index(model)

    def test_shard_that_is_too_long(self, model: Path) -> None:
        with open(model / "00000.ftw", "ab") as file:
            file.write(b"\0")
        with pytest.raises(ModelDataError, match="not from one conversion"):
            read_index(model)

    def test_link_out_of_the_directory(self, model: Path, tmp_path: Path) -> None:
        (model / "00000.ftw").rename(tmp_path / "elsewhere.ftw")
        (model / "00000.ftw").symlink_to(tmp_path / "elsewhere.ftw")
        with pytest.raises(ModelDataError, match="outside the directory"):
            read_index(model)

    def test_link_to_itself(self, model: Path) -> None:
        (model / "00000.ftw").unlink()
        (model / "00000.ftw").symlink_to("00000.ftw")
        with pytest.raises(ModelDataError, match=r"00000\.ftw"):
            read_index(model)

    def test_shard_that_is_a_directory(self, model: Path) -> None:
        (model / "00000.ftw").unlink()
        (model / "00000.ftw").mkdir()
        with pytest.raises(ModelDataError, match="not a regular file"):
            read_index(model)

    def test_link_to_the_directory_itself_is_fine(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "current").symlink_to(model)
        assert read_index(tmp_path / "current") == read_index(model)

    def test_unknown_tensor_is_named(self, model: Path) -> None:
        with pytest.raises(ModelDataError, match="no tensor called ghost"):
            FtwDirectory(model).tensor("ghost")

    def test_damaged_config_is_named(self, model: Path) -> None:
        (model / "config.json").write_text("[1]")
        with pytest.raises(ModelDataError, match=r"config\.json must be an object, not a list"):
            FtwDirectory(model).model_config()


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(),
    st.text(max_size=8),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[]]),
)


def slots_of(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    found: list[tuple[Any, Any]] = []
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in entries:
        found.append((value, key))
        if isinstance(item, dict | list):
            found += slots_of(item)
    return found


def attempt(text: bytes, original: FtwIndex) -> None:
    """Reading `text` fails with our error, or gives what was there before."""
    try:
        index = index_from_json(text, "x")
    except ModelDataError as error:
        str(error).encode("utf-8")
    else:
        assert index == original


def fuzz_values(document: Document, original: FtwIndex, data: st.DataObject) -> None:
    changed = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(slots_of(changed)))
        match data.draw(st.integers(0, 2)):
            case 0:
                container[key] = data.draw(ATOMS)
            case 1:
                del container[key]
            case _ if isinstance(container[key], int):
                container[key] += data.draw(st.sampled_from([-4096, -1, 1, 4096, 1 << 63]))
            case _:
                container[key] = [container[key]]
        if not slots_of(changed):
            break
    attempt(json.dumps(changed).encode(), original)


def fuzz_bytes(text: bytes, original: FtwIndex, data: st.DataObject) -> None:
    changed = bytearray(text)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(changed))))
    attempt(bytes(changed[:cut]), original)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_fuzzed_values(document: Document, pristine: Path, data: st.DataObject) -> None:
    fuzz_values(document, read_index(pristine / "model"), data)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_fuzzed_bytes(pristine: Path, data: st.DataObject) -> None:
    original = read_index(pristine / "model")
    fuzz_bytes(index_json(original), original, data)


@pytest.mark.full
@settings(max_examples=4_000, deadline=None)
@given(st.data())
def test_fuzzed_at_length(document: Document, pristine: Path, data: st.DataObject) -> None:
    original = read_index(pristine / "model")
    fuzz_values(document, original, data)
    fuzz_bytes(index_json(original), original, data)


def test_document_has_only_json_types(pristine: Path) -> None:
    document = index_document(read_index(pristine / "model"))
    assert json.loads(json.dumps(document)) == document
