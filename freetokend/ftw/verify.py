"""Checks every byte of an FTW directory against its index and names what is damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from freetokend.core.errors import ModelDataError
from freetokend.ftw.contents import (
    ExpertRange,
    FtwIndex,
    describe_range,
    experts_in_range,
    tensors_in_range,
)
from freetokend.ftw.index import shard_problem
from freetokend.ftw.layout import BLOCK_BYTES
from freetokend.ftw.schema import parse_index
from freetokend.ftw.target import checksum_file
from freetokend.ftw.threads import threads_to_use

_READ_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """How much of the region has been read."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong.

    file: the shard or side file; block_index: its checksum block, None when the whole file is
    meant; [offset, offset + length) lies in the region (0, 0 for side files); tensors and experts:
    what lies there; problem: a sentence for people.
    """

    file: str
    block_index: int | None
    offset_bytes: int
    length_bytes: int
    tensors: tuple[str, ...]
    experts: tuple[ExpertRange, ...]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    shard_index: int
    block_index: int
    offset_bytes: int
    length_bytes: int
    checksum: str


def verify(
    directory: str | os.PathLike[str],
    progress: Callable[[VerifyProgress], None] = lambda _: None,
    *,
    threads_count: int | None = None,
) -> list[Damage]:
    """Read the whole directory; an empty list means that every byte is as it was written.

    ModelDataError when the index itself cannot be trusted. `progress` is called from the calling
    thread. Damage comes in region order, side files last.
    """
    path = Path(directory)
    index = parse_index(path)
    damage = [
        found for number in range(len(index.shards)) if (found := _shard(path, index, number))
    ]
    unusable = {found.file for found in damage}
    blocks = [
        block for block in _blocks(index) if index.shards[block.shard_index].file not in unusable
    ]
    threads = threads_to_use(threads_count)
    done_bytes = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="ftw-verify") as pool:
        try:
            for block, problem in _checked(pool, path, index, blocks, 2 * threads):
                done_bytes += block.length_bytes
                if problem is not None:
                    damage.append(_block_damage(index, block, problem))
                progress(VerifyProgress(done_bytes=done_bytes, total_bytes=index.region_bytes))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    damage.sort(key=lambda found: found.offset_bytes)
    return damage + _side_file_damage(path, index)


def _blocks(index: FtwIndex) -> Iterator[_Block]:
    for shard_index, shard in enumerate(index.shards):
        for block_index, checksum in enumerate(shard.block_checksums):
            start_bytes = block_index * BLOCK_BYTES
            yield _Block(
                shard_index=shard_index,
                block_index=block_index,
                offset_bytes=start_bytes,
                length_bytes=min(BLOCK_BYTES, shard.length_bytes - start_bytes),
                checksum=checksum,
            )


def _checked(
    pool: ThreadPoolExecutor, path: Path, index: FtwIndex, blocks: list[_Block], window_count: int
) -> Iterator[tuple[_Block, str | None]]:
    """Blocks with what is wrong with them, as they finish; at most `window_count` are under way."""
    under_way: dict[Future[str | None], _Block] = {}
    for block in blocks:
        shard = path / index.shards[block.shard_index].file
        under_way[pool.submit(_check_block, shard, block)] = block
        if len(under_way) >= window_count:
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                yield under_way.pop(future), future.result()
    for future in list(under_way):
        yield under_way.pop(future), future.result()


def _check_block(path: Path, block: _Block) -> str | None:
    digest = xxhash.xxh3_64()
    buffer = np.empty(min(_READ_BYTES, block.length_bytes), dtype=np.uint8).data
    try:
        with open(path, "rb", buffering=0) as file:
            # What was verified must come from the disk next time too, and not crowd the cache.
            os.posix_fadvise(
                file.fileno(), block.offset_bytes, block.length_bytes, os.POSIX_FADV_SEQUENTIAL
            )
            file.seek(block.offset_bytes)
            left_bytes = block.length_bytes
            while left_bytes:
                count = file.readinto(buffer[: min(left_bytes, len(buffer))])
                if not count:
                    return f"ends {left_bytes} bytes early"
                digest.update(buffer[:count])
                left_bytes -= count
            os.posix_fadvise(
                file.fileno(), block.offset_bytes, block.length_bytes, os.POSIX_FADV_DONTNEED
            )
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    found = digest.hexdigest()
    return None if found == block.checksum else f"has checksum {found}, not {block.checksum}"


def _shard(path: Path, index: FtwIndex, number: int) -> Damage | None:
    shard = index.shards[number]
    try:
        problem = shard_problem(path, index, number)
    except ModelDataError as error:
        problem = error.message
    if problem is None:
        return None
    return _damage(index, shard.file, None, shard.offset_bytes, shard.length_bytes, problem)


def _block_damage(index: FtwIndex, block: _Block, problem: str) -> Damage:
    shard = index.shards[block.shard_index]
    start_bytes = shard.offset_bytes + block.offset_bytes
    where = describe_range(index, start_bytes, start_bytes + block.length_bytes)
    return _damage(
        index,
        shard.file,
        block.block_index,
        start_bytes,
        block.length_bytes,
        f"{shard.file} block {block.block_index} (bytes {block.offset_bytes} to "
        f"{block.offset_bytes + block.length_bytes - 1}) {problem}: {where}.",
    )


def _damage(
    index: FtwIndex,
    file: str,
    block_index: int | None,
    offset_bytes: int,
    length_bytes: int,
    problem: str,
) -> Damage:
    return Damage(
        file=file,
        block_index=block_index,
        offset_bytes=offset_bytes,
        length_bytes=length_bytes,
        tensors=tensors_in_range(index, offset_bytes, offset_bytes + length_bytes),
        experts=experts_in_range(index, offset_bytes, offset_bytes + length_bytes),
        problem=problem,
    )


def _side_file_damage(path: Path, index: FtwIndex) -> list[Damage]:
    damage = []
    for side in index.side_files:
        try:
            found = checksum_file(path / side.file)
        except ModelDataError as error:
            problem = error.message
        else:
            if found == (side.length_bytes, side.checksum):
                continue
            problem = (
                f"{side.file} was changed after the conversion ({found[0]} bytes, then "
                f"{side.length_bytes})."
            )
        damage.append(
            Damage(
                file=side.file,
                block_index=None,
                offset_bytes=0,
                length_bytes=0,
                tensors=(),
                experts=(),
                problem=problem,
            )
        )
    return damage
