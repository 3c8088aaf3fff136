"""Offsets are 64 bits wide everywhere: pools of real sizes, sparse, with their last row used."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from freetokend.native import _host
from freetokend.native.pool import POOL_DATA_OFFSET, PoolMapping, create_pool_file
from tests.native.host_support import IDENTITY, reference_bytes, write_shards


@pytest.mark.parametrize(
    ("layers_count", "experts_count", "record_bytes", "pool_bytes_at_least"),
    [
        pytest.param(43, 256, 12_750 << 10, 137 << 30, id="deepseek-v4-flash"),
        pytest.param(75, 256, 22_552_576, 433_000_000_000, id="glm-5.2"),
    ],
)
def test_the_last_row_of_a_real_pool(
    tmp_path: Path,
    layers_count: int,
    experts_count: int,
    record_bytes: int,
    pool_bytes_at_least: int,
) -> None:
    rows_count = layers_count * experts_count
    region_bytes = rows_count * record_bytes
    last_row_bytes = region_bytes - record_bytes
    assert region_bytes >= pool_bytes_at_least * 0.97
    (shard,) = write_shards(tmp_path, [record_bytes])
    resident_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = create_pool_file("freetoken-pool-large", region_bytes, IDENTITY)
    try:
        with PoolMapping(pool.fd) as mapping:
            loader = _host.Loader(
                mapping._mapping,
                [(shard.path, POOL_DATA_OFFSET + last_row_bytes, record_bytes)],
                use_uring=True,
                use_direct=True,
                chunk_bytes=1 << 20,
                start_depth_count=4,
                max_depth_count=8,
                workers_count=0,
            )
            loader.start()
            assert loader.wait(60.0)
            assert loader.outcome.failure == "none"
            mapping.mark_filled()
        with PoolMapping(pool.fd) as again:
            assert again.header.filled
            assert again.region_bytes == region_bytes
            row = again.view(last_row_bytes, record_bytes)
            assert row.tobytes() == reference_bytes([shard])
            row_before = again.view(last_row_bytes - record_bytes, 4096)
            assert not any(row_before)
        # Nothing but the header, the last row and the page just read is committed.
        committed_bytes = os.fstat(pool.fd).st_blocks * 512
        assert record_bytes <= committed_bytes <= record_bytes + (8 << 20)
    finally:
        pool.close()
    resident_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (resident_after - resident_before) * 1024 < 8 * record_bytes
