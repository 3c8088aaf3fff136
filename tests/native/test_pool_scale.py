"""Offsets are 64 bits wide everywhere: pools of real sizes, sparse, with their last row used."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from freetokend.native import _host
from freetokend.native.executor import Executor, expert_bytes
from freetokend.native.pool import POOL_DATA_OFFSET, PoolMapping, create_pool_file
from tests.native.exec_support import aligned_bytes
from tests.native.host_support import IDENTITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The rows of a known model; the shape of an expert is one that fits its record in bf16."""

    name: str
    layers_count: int
    experts_count: int
    record_bytes: int
    intermediate_size: int
    region_bytes: int

    @property
    def rows_count(self) -> int:
        return self.layers_count * self.experts_count


HIDDEN_SIZE = 2048
SCALES = (
    Scale(
        name="deepseek-v4-flash",
        layers_count=43,
        experts_count=256,
        record_bytes=12 * 1048576 + 768 * 1024,
        intermediate_size=1088,
        region_bytes=147_169_738_752,
    ),
    Scale(
        name="glm-5.2",
        layers_count=75,
        experts_count=256,
        record_bytes=22_552_576,
        intermediate_size=1824,
        region_bytes=433_009_459_200,
    ),
)


def _record(scale: Scale) -> NDArray[np.uint16]:
    """bf16 words of magnitude 0.004 to 0.016, both signs; the padding is zero."""
    words = aligned_bytes(scale.record_bytes).view(np.uint16)
    words[:] = np.random.default_rng(7).integers(0, 1 << 16, len(words), np.uint16)
    words &= np.uint16(0x80FF)
    words |= np.uint16(0x3B00)
    words[expert_bytes("bf16", HIDDEN_SIZE, scale.intermediate_size) // 2 :] = 0
    return words


def _run_expert(scale: Scale, bank: int, expert_id: int, rows_count: int) -> NDArray[np.float32]:
    tokens = 3
    words = np.random.default_rng(8).integers(0, 1 << 16, (tokens, HIDDEN_SIZE), np.uint16)
    x = (words & np.uint16(0x80FF)) | np.uint16(0x3F00)
    expert_ids = np.full((tokens, 1), expert_id, np.int32)
    weights = np.ones((tokens, 1), np.float32)
    y = np.full((tokens, 1, HIDDEN_SIZE), np.nan, np.float32)
    executor = Executor(sorted(os.sched_getaffinity(0))[:1])
    try:
        executor.experts(
            x.ctypes.data,
            expert_ids.ctypes.data,
            weights.ctypes.data,
            y.ctypes.data,
            tokens=tokens,
            top_k=1,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=scale.intermediate_size,
            bank=bank,
            record_bytes=scale.record_bytes,
            experts_count=rows_count,
        )
    finally:
        executor.close()
    return y


def _fill_row(mapping: PoolMapping, path: Path, offset_bytes: int, length_bytes: int) -> None:
    loader = _host.Loader(
        mapping._mapping,
        [(str(path), POOL_DATA_OFFSET + offset_bytes, length_bytes)],
        use_uring=True,
        use_direct=True,
        use_huge_pages=False,
        chunk_bytes=1 << 20,
        start_depth_count=4,
        max_depth_count=8,
        workers_count=0,
    )
    loader.start()
    assert loader.wait(60.0)
    assert loader.outcome.failure == "none"


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: scale.name)
def test_the_last_row_is_filled_read_and_executed(tmp_path: Path, scale: Scale) -> None:
    region_bytes = scale.rows_count * scale.record_bytes
    assert region_bytes == scale.region_bytes
    last_row_bytes = region_bytes - scale.record_bytes
    record = _record(scale)
    path = tmp_path / "row.ftw"
    path.write_bytes(record.tobytes())
    resident_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = create_pool_file("freetoken-pool-large", region_bytes, IDENTITY)
    try:
        with PoolMapping(pool.fd) as mapping:
            _fill_row(mapping, path, last_row_bytes, scale.record_bytes)
            mapping.mark_filled()
        with PoolMapping(pool.fd) as again:
            assert again.header.filled
            assert again.region_bytes == region_bytes
            again.protect()
            assert bytes(again.view(last_row_bytes, scale.record_bytes)) == record.tobytes()
            assert not any(again.view(last_row_bytes - scale.record_bytes, 4096))
            ours = _run_expert(scale, again.region_address, scale.rows_count - 1, scale.rows_count)
        alone = _run_expert(scale, record.ctypes.data, 0, 1)
        assert np.isfinite(ours).all()
        assert np.abs(ours).max() > 0.01
        assert ours.tobytes() == alone.tobytes()
        # Nothing but the header, the last row and the page just read is committed.
        committed_bytes = os.fstat(pool.fd).st_blocks * 512
        assert scale.record_bytes <= committed_bytes <= scale.record_bytes + (8 << 20)
    finally:
        pool.close()
    resident_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (resident_after - resident_before) * 1024 < 8 * scale.record_bytes
