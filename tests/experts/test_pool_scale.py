"""Offsets beyond 32 bits: sparse pools of the largest models, their last row executed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.ftw.layout import BankSpec, TensorSpec, bf16_record_bytes, plan_region
from freetokend.native.executor import Executor
from freetokend.native.pool import POOL_DATA_OFFSET, PoolMapping, create_pool_file
from tests.experts.records import exact, packed, random_expert

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """A pool as large as a model's; the record is bf16 with as many bytes as the model's own."""

    layers: int
    first_moe_layer: int
    hidden: int
    inner: int
    record_bytes: int
    pool_gib: float


SCALES = {
    "DeepSeek-V4-Flash": Scale(43, 0, 4096, 544, int(12.75 * MIB), 137.06),
    "GLM-5.2": Scale(75, 3, 6144, 576, int(20.25 * MIB), 379.69),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_last_row_of_a_huge_pool_is_filled_read_and_executed(name: str) -> None:
    scale = SCALES[name]
    assert bf16_record_bytes(scale.hidden, scale.inner) == scale.record_bytes
    plan = plan_region(
        [TensorSpec(name="norm", dtype="f32", shape=(scale.hidden,), layout="row_major")],
        BankSpec(
            format="bf16",
            record_bytes=scale.record_bytes,
            experts_per_layer_count=256,
            hidden_size=scale.hidden,
            intermediate_size=scale.inner,
            moe_layer_indices=tuple(
                range(scale.first_moe_layer, scale.first_moe_layer + scale.layers)
            ),
            activation="silu",
        ),
        max_shard_bytes=4 * GIB,
    )
    assert plan.region_bytes / GIB == pytest.approx(scale.pool_gib, abs=0.01)
    last_layer, last_expert = scale.layers - 1, 255
    offset = plan.bank.record_offset_bytes(plan.bank.expert_id(last_layer, last_expert))
    assert offset + scale.record_bytes == plan.region_bytes > 1 << 37
    values = random_expert(scale.hidden, scale.inner, seed=3)
    pool = create_pool_file("freetoken-pool-scale", plan.region_bytes, "ab" * 32)
    try:
        record = packed(values, scale.record_bytes)
        assert os.pwrite(pool.fd, record, POOL_DATA_OFFSET + offset) == len(record)
        with (
            PoolMapping(pool.fd) as mapping,
            Executor(sorted(os.sched_getaffinity(0))[:2]) as executor,
        ):
            mapping.mark_filled()
            mapping.protect()
            assert bytes(mapping.view(offset, 64)) == record[:64]
            mapped = MappedBank(bank=plan.bank, region_address=mapping.region_address)
            x = torch.from_numpy(
                np.random.default_rng(4).standard_normal((2, scale.hidden), dtype=np.float32)
            ).bfloat16()
            got = CpuExpertDispatch(executor, mapped).dispatch(
                last_layer,
                x,
                torch.full((2, 1), last_expert, dtype=torch.int32),
                torch.tensor([[1.0], [0.25]]),
            )
            wanted = np.stack(
                [exact(values, x[0].double().numpy()), 0.25 * exact(values, x[1].double().numpy())]
            )
            difference = np.linalg.norm(got.double().numpy() - wanted, axis=1)
            assert (difference / np.linalg.norm(wanted, axis=1)).max() < 4e-3
            # only what was written and read has memory
            assert os.fstat(pool.fd).st_blocks * 512 < 64 * MIB
    finally:
        pool.close()


def test_expert_ids_are_rows_of_the_bank_whatever_the_layer_is_called() -> None:
    plan = plan_region(
        [],
        BankSpec(
            format="bf16",
            record_bytes=4096,
            experts_per_layer_count=256,
            hidden_size=16,
            intermediate_size=16,
            moe_layer_indices=(3, 4, 7),
            activation="silu",
        ),
        max_shard_bytes=GIB,
    )
    mapped = MappedBank(bank=replace(plan.bank, offset_bytes=1 << 40), region_address=1 << 45)
    assert mapped.layer_address(2) == (1 << 45) + (1 << 40) + 2 * 256 * 4096
    assert mapped.record_address(2, 255) == (1 << 45) + (1 << 40) + (3 * 256 - 1) * 4096
