"""The way into an FTW directory: read its index, and see that its files are there.

`read_index` is for everyone who wants to use a directory: it refuses whatever the writer could not
have written. The values it returns are those of `freetokend.ftw.contents`, offered here too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from freetokend.core.errors import ModelDataError
from freetokend.ftw.contents import (
    FORMAT_VERSION,
    INDEX_FILE,
    LAYOUT_VERSION,
    FtwIndex,
    RouterSemantics,
    ShardEntry,
    SideFile,
    SourceIdentity,
    describe_range,
)
from freetokend.ftw.layout import BLOCK_BYTES, ExpertBank, TensorEntry
from freetokend.ftw.schema import parse_index
from freetokend.ftw.strict_json import io_error

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "INDEX_FILE",
    "LAYOUT_VERSION",
    "ExpertBank",
    "FtwIndex",
    "RouterSemantics",
    "ShardEntry",
    "SideFile",
    "SourceIdentity",
    "TensorEntry",
    "check_shards",
    "read_index",
    "shard_problem",
]


def read_index(directory: str | os.PathLike[str]) -> FtwIndex:
    """Read and check the index of `directory` and that every shard is there at full length.

    ModelDataError names the file, and the layer and expert where a shard falls short. Contents of
    the shards are not read: that is `verify`'s work.
    """
    index = parse_index(Path(directory))
    check_shards(Path(directory), index)
    return index


def check_shards(directory: Path, index: FtwIndex) -> None:
    """ModelDataError for the first shard that is missing, outside, or not of its stated length."""
    for position in range(len(index.shards)):
        problem = shard_problem(directory, index, position)
        if problem is not None:
            raise ModelDataError(problem)


def shard_problem(directory: Path, index: FtwIndex, position: int) -> str | None:
    """What is wrong with the file of shard `position`, from the outside; None when nothing is."""
    shard = index.shards[position]
    path = directory / shard.file
    try:
        real = path.resolve(strict=True)
        if real.parent != directory.resolve(strict=True):
            return (
                f"{path} is a link to {real}, outside the directory; FTW shards must lie beside "
                f"their index. Move the file in."
            )
        status = os.stat(real)
    except FileNotFoundError:
        where = describe_range(index, shard.offset_bytes, shard.offset_bytes + shard.length_bytes)
        return f"{path} is missing ({where}). Copy it again or convert again."
    except (OSError, RuntimeError) as error:
        raise io_error(f"cannot examine {path}", error) from error
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file. Copy the shard again or convert again."
    if status.st_size < shard.length_bytes:
        where = describe_range(
            index, shard.offset_bytes + status.st_size, shard.offset_bytes + shard.length_bytes
        )
        return (
            f"{path} is cut short: {status.st_size} of {shard.length_bytes} bytes, missing "
            f"{where}. Copy it again or convert again."
        )
    if status.st_size > shard.length_bytes:
        return (
            f"{path} has {status.st_size} bytes, {INDEX_FILE} says {shard.length_bytes}: the two "
            f"are not from one conversion. Copy the directory again or convert again."
        )
    return None
