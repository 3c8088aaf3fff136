from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freetokend.core.errors import ModelDataError
from freetokend.ftw.contents import INDEX_FILE, experts_in_range, tensors_in_range
from freetokend.ftw.index import FtwIndex, read_index
from freetokend.ftw.layout import BLOCK_BYTES
from freetokend.ftw.verify import VerifyProgress, verify


@contextmanager
def flipped(directory: Path, index: FtwIndex, region_offset_bytes: int) -> Iterator[None]:
    """One bit of the region is wrong inside the context."""
    shard = next(s for s in index.shards if region_offset_bytes < s.offset_bytes + s.length_bytes)
    with open(directory / shard.file, "r+b", buffering=0) as file:
        within_bytes = region_offset_bytes - shard.offset_bytes
        (byte,) = os.pread(file.fileno(), 1, within_bytes)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), within_bytes)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), bytes([byte]), within_bytes)


def test_sound_directory(pristine: Path) -> None:
    assert verify(pristine / "model") == []


@pytest.mark.parametrize("threads_count", [1, 3])
def test_bad_block_is_named_down_to_the_expert(big: Path, threads_count: int) -> None:
    directory = big / "model"
    index = read_index(directory)
    bank = index.expert_bank
    offset_bytes = bank.record_offset_bytes(bank.expert_id(1, 6)) + 12345
    shard = index.shards[1]
    block_index = (offset_bytes - shard.offset_bytes) // BLOCK_BYTES
    with flipped(directory, index, offset_bytes):
        (damage,) = verify(directory, threads_count=threads_count)
    assert (damage.file, damage.block_index) == ("00001.ftw", block_index)
    assert damage.offset_bytes == shard.offset_bytes + block_index * BLOCK_BYTES
    assert damage.tensors == ("experts",)
    (experts,) = damage.experts
    assert (experts.layer_index, experts.moe_layer_index) == (1, 1)
    assert experts.first_expert <= 6 <= experts.last_expert
    assert f"00001.ftw block {block_index} (bytes" in damage.problem
    assert f"layer 1 expert {experts.first_expert} to layer 1 expert" in damage.problem


def test_bad_tensor_is_named(pristine: Path, model: Path) -> None:
    index = read_index(model)
    name = "model.layers.2.self_attn.q_norm.weight"
    with flipped(model, index, index.tensors[name].offset_bytes):
        (damage,) = verify(model)
    assert name in damage.tensors


def test_several_bad_blocks_come_in_order(big: Path) -> None:
    directory = big / "model"
    index = read_index(directory)
    with flipped(directory, index, index.region_bytes - 1), flipped(directory, index, 0):
        damage = verify(directory)
    assert [(d.file, d.block_index) for d in damage] == [
        ("00000.ftw", 0),
        ("00001.ftw", len(index.shards[1].block_checksums) - 1),
    ]
    assert "model.embed_tokens.weight" in damage[0].problem


def test_missing_and_short_shards_are_damage_too(model: Path) -> None:
    index = read_index(model)
    bank = index.expert_bank
    os.truncate(model / "00000.ftw", bank.record_offset_bytes(bank.expert_id(1, 2)))
    (damage,) = verify(model)
    assert damage.block_index is None
    assert "cut short" in damage.problem
    assert "layer 2 expert 2 to layer 2 expert 7" in damage.problem
    (model / "00000.ftw").unlink()
    (damage,) = verify(model)
    assert "is missing" in damage.problem


def test_side_files_are_checked(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").unlink()
    damage = verify(model)
    assert [d.file for d in damage] == ["tokenizer.json", "chat_template.jinja"]
    assert "was changed" in damage[0].problem
    assert "is missing" in damage[1].problem


def test_damaged_index_is_an_error_not_damage(model: Path) -> None:
    (model / INDEX_FILE).write_text("{}")
    with pytest.raises(ModelDataError, match="format is missing"):
        verify(model)


def test_progress_reaches_the_total(big: Path) -> None:
    steps: list[VerifyProgress] = []
    verify(big / "model", steps.append)
    total_bytes = read_index(big / "model").region_bytes
    assert [step.total_bytes for step in steps] == [total_bytes] * len(steps)
    assert len(steps) == -(-total_bytes // BLOCK_BYTES)
    assert steps[-1].done_bytes == total_bytes


def test_callers_exception_ends_it(pristine: Path) -> None:
    def stop(_: VerifyProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(pristine / "model", stop)


def test_ranges_agree_with_every_byte_of_a_small_region(pristine: Path) -> None:
    index = read_index(pristine / "model")
    bank = index.expert_bank
    for start in range(0, index.region_bytes, 4096):
        for length in (1, 4096, 3 * bank.record_bytes):
            end = min(start + length, index.region_bytes)
            wanted = {
                (bank.moe_layer_indices[expert_id // 8], expert_id % 8)
                for expert_id in range(bank.experts_count)
                if bank.record_offset_bytes(expert_id) < end
                and bank.record_offset_bytes(expert_id + 1) > start
            }
            found = {
                (part.layer_index, expert)
                for part in experts_in_range(index, start, end)
                for expert in range(part.first_expert, part.last_expert + 1)
            }
            assert found == wanted
            names = tensors_in_range(index, start, end)
            assert ("experts" in names) == bool(wanted)
