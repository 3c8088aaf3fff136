"""Files with known bytes, pools of small size, and children that run a piece of Python."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import xxhash

from freetokend.native.loader import CHECKSUM_BLOCK_BYTES, ShardFile
from freetokend.native.pool import PoolFile, PoolMapping, create_pool_file

IDENTITY: Final = hashlib.sha256(b"a model").hexdigest()
DEADLINE_S: Final = 30.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds; fails after a deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"in vain: {what}"
        time.sleep(0.001)


def write_shards(directory: Path, lengths_bytes: Sequence[int], seed: int = 0) -> list[ShardFile]:
    """Shards with random bytes, end to end, with block checksums."""
    shards = []
    offset_bytes = 0
    for index, length_bytes in enumerate(lengths_bytes):
        path = directory / f"{index:05d}.ftw"
        data = random.Random(f"{seed}/{index}").randbytes(length_bytes)
        path.write_bytes(data)
        blocks = range(0, length_bytes, CHECKSUM_BLOCK_BYTES)
        shards.append(
            ShardFile(
                path=str(path),
                offset_bytes=offset_bytes,
                length_bytes=length_bytes,
                block_checksums=tuple(
                    xxhash.xxh3_64_hexdigest(data[at : at + CHECKSUM_BLOCK_BYTES]) for at in blocks
                ),
            )
        )
        offset_bytes += length_bytes
    return shards


def region_bytes(shards: Sequence[ShardFile]) -> int:
    """Length of the region that the shards make."""
    return sum(shard.length_bytes for shard in shards)


def reference_bytes(shards: Sequence[ShardFile]) -> bytes:
    """The region as ordinary reads see it."""
    return b"".join(Path(shard.path).read_bytes() for shard in shards)


@contextmanager
def new_pool(size_bytes: int, identity: str = IDENTITY) -> Iterator[PoolFile]:
    """A pool file that is closed at the end."""
    pool = create_pool_file("freetoken-pool-test", size_bytes, identity)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def new_mapping(size_bytes: int) -> Iterator[PoolMapping]:
    """A mapping of a new pool."""
    with new_pool(size_bytes) as pool, PoolMapping(pool.fd) as mapping:
        yield mapping


def run_child(code: str, *, fds: Sequence[int] = (), arguments: Sequence[str] = ()) -> str:
    """Run Python code to its end in a new process; returns its output, fails if it fails."""
    child = start_child(code, fds=fds, arguments=arguments)
    output, _ = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0, f"the child ended with {child.returncode}"
    return output


def start_child(
    code: str, *, fds: Sequence[int] = (), arguments: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start Python code in a new process; stdout is a pipe, the code finds `arguments` in argv."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        pass_fds=tuple(fds),
        text=True,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
