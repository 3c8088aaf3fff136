"""Block checksums after a load: a damaged block is named, and only when it is asked for."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import xxhash

from freetokend.core.errors import CancelledRequestError, ModelDataError
from freetokend.native.loader import CHECKSUM_BLOCK_BYTES, ShardFile
from tests.native.host_support import new_mapping, region_bytes, write_shards


def _sparse_shards(directory: Path) -> list[ShardFile]:
    """Two blocks in the first shard and one in the second; almost all bytes are 0."""
    shards = []
    offset_bytes = 0
    for index, length_bytes in enumerate((CHECKSUM_BLOCK_BYTES + 4096, 8192)):
        path = directory / f"{index:05d}.ftw"
        with open(path, "wb") as file:
            file.truncate(length_bytes)
            for at in range(0, length_bytes, CHECKSUM_BLOCK_BYTES // 2):
                file.seek(at)
                file.write(bytes([1 + index + at % 251]))
        data = memoryview(path.read_bytes())
        blocks = range(0, length_bytes, CHECKSUM_BLOCK_BYTES)
        checksums = tuple(
            xxhash.xxh3_64_hexdigest(data[at : at + CHECKSUM_BLOCK_BYTES]) for at in blocks
        )
        shards.append(
            ShardFile(
                path=str(path),
                offset_bytes=offset_bytes,
                length_bytes=length_bytes,
                block_checksums=checksums,
            )
        )
        offset_bytes += length_bytes
    return shards


def _flip(shard: ShardFile, offset_bytes: int) -> None:
    with open(shard.path, "r+b") as file:
        file.seek(offset_bytes)
        (byte,) = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 0x10]))


def test_sound_shards_pass_and_are_counted(tmp_path: Path) -> None:
    shards = _sparse_shards(tmp_path)
    seen: list[tuple[int, int]] = []
    with new_mapping(region_bytes(shards)) as mapping:
        result = mapping.load(shards, lambda *bytes_: seen.append(bytes_), verify=True)
    total = region_bytes(shards)
    assert result.verified_bytes == total
    assert result.verify_s > 0
    assert seen[-3:] == [
        (CHECKSUM_BLOCK_BYTES, total),
        (CHECKSUM_BLOCK_BYTES + 4096, total),
        (total, total),
    ]


@pytest.mark.parametrize(
    ("shard_index", "offset_bytes", "block"),
    [(0, 0, 0), (0, CHECKSUM_BLOCK_BYTES - 1, 0), (0, CHECKSUM_BLOCK_BYTES, 1), (1, 8191, 0)],
)
def test_a_flipped_bit_names_shard_and_block(
    tmp_path: Path, shard_index: int, offset_bytes: int, block: int
) -> None:
    shards = _sparse_shards(tmp_path)
    _flip(shards[shard_index], offset_bytes)
    with new_mapping(region_bytes(shards)) as mapping:
        assert mapping.load(shards).verified_bytes == 0  # not asked for: not seen
        with pytest.raises(ModelDataError, match=rf"block {block} of shard .*0000{shard_index}"):
            mapping.load(shards, verify=True)
        assert not mapping.filled


def test_shards_without_checksums_cannot_be_verified(tmp_path: Path) -> None:
    (shard,) = write_shards(tmp_path, [8192])
    for checksums in ((), shard.block_checksums * 2):
        changed = dataclasses.replace(shard, block_checksums=checksums)
        with new_mapping(8192) as mapping:
            mapping.load([changed])
            with pytest.raises(ModelDataError, match="block checksums"):
                mapping.load([changed], verify=True)


def test_verification_can_be_cancelled(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [8192, 8192, 8192])
    cancel = threading.Event()

    def progress(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:  # the reads have ended
            cancel.set()

    with new_mapping(region_bytes(shards)) as mapping, pytest.raises(CancelledRequestError):
        mapping.load(shards, progress, verify=True, cancel=cancel)
