"""The planner, from odd little shapes to the largest models known."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.ftw.contents import (
    FORMAT_VERSION,
    LAYOUT_VERSION,
    FtwIndex,
    Quantisation,
    RouterSemantics,
    ShardEntry,
    SourceIdentity,
    content_identity,
    index_json,
)
from freetokend.ftw.index import INDEX_FILE, read_index
from freetokend.ftw.layout import (
    BLOCK_BYTES,
    BankSpec,
    RegionPlan,
    TensorSpec,
    bf16_record_bytes,
    blocks_count,
    plan_region,
)

MIB = 1 << 20


def bank_spec(
    layers: tuple[int, ...], experts: int, hidden: int, inter: int, record_bytes: int | None = None
) -> BankSpec:
    return BankSpec(
        format="bf16",
        record_bytes=record_bytes or bf16_record_bytes(hidden, inter),
        experts_per_layer_count=experts,
        hidden_size=hidden,
        intermediate_size=inter,
        moe_layer_indices=layers,
        activation="silu",
    )


tensor_specs = st.lists(
    st.one_of(
        st.tuples(st.just("rows16"), st.just("bf16"),
                  st.tuples(st.integers(1, 99), st.integers(1, 99))),
        st.tuples(st.just("row_major"), st.sampled_from(["bf16", "f32"]),
                  st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple)),
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=80)
@given(tensor_specs, st.integers(1, 5), st.integers(1, 9), st.integers(1, 200), st.integers(1, 200))
def test_places_are_aligned_in_order_and_apart(
    specs: list[tuple[str, str, tuple[int, ...]]],
    layers: int,
    experts: int,
    hidden: int,
    inter: int,
) -> None:
    tensors = [
        TensorSpec(name=f"t{i}", layout=layout, dtype=dtype, shape=shape)
        for i, (layout, dtype, shape) in enumerate(specs)
    ]
    bank = bank_spec(tuple(range(layers)), experts, hidden, inter)
    plan = plan_region(tensors, bank, max_shard_bytes=BLOCK_BYTES)
    end_bytes = 0
    for entry in plan.tensors.values():
        assert entry.offset_bytes % 4096 == 0
        assert 0 <= entry.offset_bytes - end_bytes < 4096
        end_bytes = entry.end_bytes
    assert list(plan.tensors) == [spec.name for spec in tensors] + ["experts"]
    assert plan.region_bytes == end_bytes
    assert plan.region_bytes % 4096 == 0
    assert sum(shard.length_bytes for shard in plan.shards) == plan.region_bytes


def test_one_name_for_two_tensors_is_refused() -> None:
    spec = TensorSpec(name="t", dtype="f32", shape=(4,), layout="row_major")
    bank = bank_spec((0,), 1, 16, 16)
    with pytest.raises(ValueError, match="two tensors are called t"):
        plan_region([spec, spec], bank, max_shard_bytes=BLOCK_BYTES)
    with pytest.raises(ValueError, match="two tensors are called experts"):
        plan_region([replace(spec, name="experts")], bank, max_shard_bytes=BLOCK_BYTES)
    with pytest.raises(ValueError, match="at least one block"):
        plan_region([spec], bank, max_shard_bytes=BLOCK_BYTES - 1)


def scale_plan(layers: range, experts: int, hidden: int, inter: int) -> RegionPlan:
    dense = [
        TensorSpec(
            name=f"model.layers.{layer}.self_attn.{name}_proj.weight",
            dtype="bf16",
            shape=(hidden, hidden),
            layout="rows16",
        )
        for layer in range(layers.stop)
        for name in "qkvo"
    ]
    return plan_region(
        dense, bank_spec(tuple(layers), experts, hidden, inter), max_shard_bytes=4 << 30
    )


def scale_index(plan: RegionPlan) -> FtwIndex:
    bank = plan.bank
    index = FtwIndex(
        format_version=FORMAT_VERSION,
        layout_version=LAYOUT_VERSION,
        identity="",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        tied_embeddings=False,
        region_bytes=plan.region_bytes,
        shards=tuple(
            ShardEntry(
                file=shard.file,
                offset_bytes=shard.offset_bytes,
                length_bytes=shard.length_bytes,
                block_checksums=("0123456789abcdef",) * blocks_count(shard.length_bytes),
            )
            for shard in plan.shards
        ),
        tensors=plan.tensors,
        expert_bank=bank,
        router=RouterSemantics(
            scoring="softmax", selection="top_k", top_k_count=6, normalise=True, weight_scale=1.5
        ),
        quantisation=Quantisation(scheme="none", experts_from="bf16"),
        sources=tuple(
            f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
            for layer in bank.moe_layer_indices
            for expert in range(bank.experts_per_layer_count)
            for matrix in ("gate", "up", "down")
        ),
        source=SourceIdentity(identity="0" * 64, files=()),
        side_files=(),
    )
    return replace(index, identity=content_identity(index))


# Layers, experts per layer, hidden, inter, record bytes: banks of 147 and 438 GB.
SCALES = {
    "43 x 256 x 12.75 MiB": (range(43), 256, 2048, 1088, 13_369_344),
    "75 x 256 x 21.75 MiB": (range(3, 78), 256, 4096, 917, 22_806_528),
}


@pytest.mark.parametrize("name", SCALES)
def test_models_of_hundreds_of_gigabytes(name: str, tmp_path: Path) -> None:
    layers, experts, hidden, inter, record_bytes = SCALES[name]
    plan = scale_plan(layers, experts, hidden, inter)
    bank = plan.bank
    assert bank.record_bytes == record_bytes
    count = len(layers) * experts
    last = bank.expert_id(len(layers) - 1, experts - 1)
    assert last == count - 1
    assert bank.record_offset_bytes(last) == bank.offset_bytes + (count - 1) * record_bytes
    assert bank.record_offset_bytes(last) > 1 << 36
    assert plan.region_bytes == bank.offset_bytes + count * record_bytes
    assert len(plan.shards) == -(-plan.region_bytes // (4 << 30))

    index = scale_index(plan)
    text = index_json(index)
    assert len(text) < 8 * MIB
    (tmp_path / INDEX_FILE).write_bytes(text)
    for shard in plan.shards:
        with open(tmp_path / shard.file, "wb") as file:
            os.truncate(file.fileno(), shard.length_bytes)  # sparse
    before_s = time.process_time()
    assert read_index(tmp_path) == index
    assert time.process_time() - before_s < 5
