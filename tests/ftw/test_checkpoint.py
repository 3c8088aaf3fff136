"""What is wrong with a checkpoint is said before a byte is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.convert import convert
from freetokend.ftw.model import ModelSource, Wanted
from freetokend.ftw.schemes.scheme import PlainScheme
from tests.support.safetensors_files import Stored, write_header, write_safetensors
from tests.support.tiny_checkpoints import write_tiny_mixtral, write_tiny_qwen3_moe

Header = dict[str, Any]


def edit_header(path: Path, change: Callable[[Header], object]) -> None:
    """Apply `change` to the header of a safetensors file; the data stays as it is."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    with open(path, "wb") as file:
        start = write_header(file.fileno(), header)
        os.pwrite(file.fileno(), data[8 + size :], start)


def edit_config(source: Path, **values: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rename(header: Header, old: str, new: str) -> None:
    header[new] = header.pop(old)


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
Q0 = "model.layers.0.self_attn.q_proj.weight"
E0 = "model.layers.0.mlp.experts.3.down_proj.weight"

DAMAGED_HEADERS: dict[str, tuple[Callable[[Header], object], str]] = {
    "missing tensor": (lambda h: rename(h, Q0, "model.layers.0.self_attn.rotary_emb.inv_freq"),
                       rf"lacks the tensor {Q0}"),
    "missing expert": (lambda h: rename(h, E0, "model.layers.7.self_attn.rotary_emb.inv_freq"),
                       rf"lacks the tensor {E0}"),
    "leftover": (lambda h: h.update({"vision.weight": EMPTY}),
                 r"no use for: vision\.weight\."),
    "wrong shape": (lambda h: h[Q0].update(shape=[64, 128]),
                    rf"{Q0} has the shape \[64, 128\]; config.json says \[128, 64\]"),
    "type that cannot be converted": (lambda h: h[E0].update(dtype="I16"),
                                      rf"{E0} is I16; as plain numbers only BF16, F16, F32"),
    "type that nobody knows": (lambda h: h[E0].update(dtype="Q7"), "does not know"),
    "size that does not fit": (lambda h: h[E0].update(shape=[64, 49]), r"differs"),
    "overlap": (lambda h: h[Q0].update(data_offsets=[0, h[Q0]["data_offsets"][1]
                                                     - h[Q0]["data_offsets"][0]]), "overlaps"),
    "negative offset": (lambda h: h[Q0].update(data_offsets=[-8, 0]), "data_offsets is -8"),
    "backward offsets": (lambda h: h[Q0].update(data_offsets=[8, 0]), "data_offsets is 0"),
    "huge size": (lambda h: h[Q0].update(shape=[1 << 60, 1]), "outside 0"),
    "size of the wrong type": (lambda h: h[Q0].update(shape=["64", 64]), "must be an integer"),
    "no offsets": (lambda h: h[Q0].pop("data_offsets"), "data_offsets is missing"),
    "unknown key": (lambda h: h[Q0].update(scale=1), "unknown key 'scale'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED_HEADERS)
def test_damaged_header_is_named(name: str, source: Path, tmp_path: Path) -> None:
    change, message = DAMAGED_HEADERS[name]
    edit_header(source / "model.safetensors", change)
    with pytest.raises(ModelDataError, match=message):
        convert(source, tmp_path / "model")
    assert not list(tmp_path.glob(".*")), "nothing may have been written"


def test_rotary_buffers_are_the_only_tensors_ignored(source: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_header(source / "model.safetensors", lambda h: h.update({name: EMPTY}))
    assert name not in convert(source, tmp_path / "model").sources


@pytest.mark.parametrize("tied_bias", [False, True])
def test_bias_that_the_config_does_not_ask_for_is_left_over(
    tmp_path: Path, tied_bias: bool
) -> None:
    write_tiny_qwen3_moe(tmp_path / "source", layers=1, attention_bias=True, tied=tied_bias)
    edit_config(tmp_path / "source", attention_bias=False)
    with pytest.raises(ModelDataError, match=r"no use for: .*k_proj\.bias"):
        convert(tmp_path / "source", tmp_path / "model")


def test_both_namings_of_experts_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    edit_header(source / "model.safetensors", lambda h: h.update({fused: EMPTY}))
    with pytest.raises(ModelDataError, match=f"no use for: {fused}"):
        convert(source, tmp_path / "model")


CONFIGS: dict[str, tuple[dict[str, object], Reason, str]] = {
    "unknown architecture": ({"architectures": ["Llama7ForCausalLM"]}, Reason.MODEL_UNSUPPORTED,
                             "Llama7ForCausalLM.*MixtralForCausalLM, Qwen3MoeForCausalLM"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, Reason.MODEL_UNSUPPORTED,
                  "quantization_config"),
    "no experts": ({"mlp_only_layers": [0, 1, 2]}, Reason.MODEL_UNSUPPORTED,
                   "no layer of this model has routed experts"),
    "too many experts": ({"num_experts": 1 << 20, "num_hidden_layers": 4000},
                         Reason.MODEL_INVALID, "more than 1000000"),
    "negative size": ({"hidden_size": -64}, Reason.MODEL_INVALID, "hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_what_decides(name: str, source: Path, tmp_path: Path) -> None:
    values, reason, message = CONFIGS[name]
    edit_config(source, **values)
    with pytest.raises(ModelDataError, match=message) as caught:
        convert(source, tmp_path / "model")
    assert caught.value.reason is reason


def test_missing_and_damaged_files(source: Path, tmp_path: Path) -> None:
    weights = source / "model.safetensors"
    data = weights.read_bytes()
    for content, message in (
        (data[:-1], r"of \d+ bytes; tensor .* is incomplete"),
        (data + b"\0", "1 bytes behind its last tensor"),
        (data[:5], "not a safetensors file"),
        (b"\xff" * 8 + data[8:], "claims a header of 18446744073709551615"),
        (data[:8] + b"{" * 64 + data[72:], "not valid JSON"),
        (data[:8] + b"\xff" + data[9:], "not UTF-8|UTF-8"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ModelDataError, match=message):
            convert(source, tmp_path / "model")
    weights.unlink()
    with pytest.raises(ModelDataError, match=r"model\.safetensors is missing: expected"):
        convert(source, tmp_path / "model")
    (source / "config.json").unlink()
    with pytest.raises(ModelDataError, match=r"config\.json is missing"):
        convert(source, tmp_path / "model")


class TestSharded:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        write_tiny_mixtral(tmp_path / "sharded", layers=1, shards=3)
        return tmp_path / "sharded"

    def weight_map(self, source: Path) -> dict[str, str]:
        table = json.loads((source / "model.safetensors.index.json").read_text())
        return dict(table["weight_map"])

    def write_map(self, source: Path, weight_map: dict[str, object]) -> None:
        path = source / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def test_duplicate_tensor(self, sharded: Path) -> None:
        extra = Stored("BF16", (64,), bytes(128))
        file = "model-00004-of-00003.safetensors"
        write_safetensors(sharded / file, {"model.norm.weight": extra, "other": extra})
        self.write_map(sharded, {**self.weight_map(sharded), "other": file})
        with pytest.raises(ModelDataError, match=r"model\.norm\.weight is in both"):
            Checkpoint(sharded)

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(ModelDataError, match=r"00002-of-00003\.safetensors is missing"):
            Checkpoint(sharded)

    def test_tensor_in_another_file_than_the_map_says(self, sharded: Path) -> None:
        weight_map = self.weight_map(sharded)
        other = next(file for file in weight_map.values() if file != weight_map[Q0])
        self.write_map(sharded, {**weight_map, Q0: other})
        with pytest.raises(ModelDataError, match="but it is in model-"):
            Checkpoint(sharded)

    def test_tensor_in_no_file(self, sharded: Path) -> None:
        weight_map = self.weight_map(sharded)
        self.write_map(sharded, {**weight_map, "ghost": weight_map[Q0]})
        with pytest.raises(ModelDataError, match=r"ghost.*in none of the files"):
            Checkpoint(sharded)

    def test_tensor_that_the_map_does_not_list(self, sharded: Path) -> None:
        weight_map = self.weight_map(sharded)
        del weight_map[Q0]
        self.write_map(sharded, weight_map)
        with pytest.raises(ModelDataError, match=rf"{Q0}, which .* does not list"):
            Checkpoint(sharded)

    @pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", 7, ""])
    def test_paths_that_leave_the_directory(self, sharded: Path, file: object) -> None:
        self.write_map(sharded, {**self.weight_map(sharded), Q0: file})
        with pytest.raises(ModelDataError, match="the file of model"):
            Checkpoint(sharded)

    def test_empty_map(self, sharded: Path) -> None:
        self.write_map(sharded, {})
        with pytest.raises(ModelDataError, match="weight_map is empty"):
            Checkpoint(sharded)


def test_links_into_a_download_cache_are_followed(source: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (source / "model.safetensors").rename(blob)
    (source / "model.safetensors").symlink_to(blob)
    convert(source, tmp_path / "model")


def test_files_are_closed(source: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint(source) as checkpoint:
        assert len(os.listdir("/proc/self/fd")) > before
        ModelSource(checkpoint, PlainScheme(checkpoint), Wanted())
    assert len(os.listdir("/proc/self/fd")) == before


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_header_bytes_give_our_error_or_none(source: Path, data: st.DataObject) -> None:
    path = source / "model.safetensors"
    original = path.read_bytes()
    size = int.from_bytes(original[:8], "little")
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, 8 + size - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        with Checkpoint(source) as checkpoint:
            ModelSource(checkpoint, PlainScheme(checkpoint), Wanted())
    except ModelDataError:
        pass
    finally:
        path.write_bytes(original)
