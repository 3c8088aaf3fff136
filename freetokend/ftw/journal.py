"""What a conversion has safely written, so that the next try can go on from there.

The journal lies in the temporary directory: a header that says what is being converted into what,
then one line for each finished checksum block, appended after the block has reached the disk. A
torn last line (power loss) is dropped.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freetokend.ftw.layer_errors import ErrorSum
from freetokend.ftw.layout import BLOCK_BYTES, ShardPlan, blocks_count

JOURNAL_FILE: Final = "conversion.journal"
_VERSION: Final = 3
_MAX_JOURNAL_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a journal is good for: any difference means starting over.

    source: identity of the checkpoint; plan: identity of the region's layout and its shards.
    """

    source: str
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is finished, in region order, and why earlier work was dropped.

    checksums and errors: one entry per block.
    """

    checksums: tuple[str, ...] = ()
    errors: tuple[tuple[ErrorSum, ...], ...] = ()
    dropped: str | None = None


class Journal:
    """The journal of one temporary directory, open for appending. Close it when done."""

    def __init__(self, directory: Path, task: Task, done: Progress) -> None:
        """Write the journal anew, holding what `done` says is finished."""
        self._path = directory / JOURNAL_FILE
        fresh = directory / (JOURNAL_FILE + ".new")
        with open(fresh, "wb") as file:
            file.write(_line({"version": _VERSION, "source": task.source, "plan": task.plan}))
            file.writelines(
                _block_line(block, checksum, errors)
                for block, (checksum, errors) in enumerate(
                    zip(done.checksums, done.errors, strict=True)
                )
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._next_block = len(done.checksums)

    def finished(self, checksum: str, errors: tuple[ErrorSum, ...]) -> None:
        """Record the next block and what was measured in it; its data must have been synced."""
        self._file.write(_block_line(self._next_block, checksum, errors))
        os.fdatasync(self._file.fileno())
        self._next_block += 1

    def close(self) -> None:
        """Close the file; what is recorded stays."""
        self._file.close()


def read_progress(directory: Path, task: Task, shards: tuple[ShardPlan, ...]) -> Progress:
    """What of `task` is finished in `directory`, judged by its journal and the shards' lengths."""
    path = directory / JOURNAL_FILE
    try:
        with open(path, "rb") as file:
            lines = file.read(_MAX_JOURNAL_BYTES).split(b"\n")[:-1]
    except FileNotFoundError:
        return Progress()
    header = _parse(lines[0]) if lines else None
    if header is None or header.get("version") != _VERSION:
        return Progress(dropped="its journal cannot be read")
    if header.get("source") != task.source:
        return Progress(dropped="the source changed since")
    if header.get("plan") != task.plan:
        return Progress(dropped="it had another layout or shard size")
    checksums, errors = [], []
    for block, line in enumerate(lines[1:]):
        entry = _parse(line)
        if entry is None or entry.get("block") != block:
            break
        checksum, sums = entry.get("checksum"), _errors(entry.get("errors"))
        if not isinstance(checksum, str) or len(checksum) != 16 or sums is None:
            break
        checksums.append(checksum)
        errors.append(sums)
    count = _present(directory, shards)
    return Progress(checksums=tuple(checksums[:count]), errors=tuple(errors[:count]))


def _present(directory: Path, shards: tuple[ShardPlan, ...]) -> int:
    """How many blocks the shard files are long enough for, without a gap."""
    count = 0
    for shard in shards:
        try:
            length_bytes = os.stat(directory / shard.file).st_size
        except FileNotFoundError:
            return count
        if length_bytes < shard.length_bytes:
            return count + length_bytes // BLOCK_BYTES
        count += blocks_count(shard.length_bytes)
    return count


def finished_bytes(blocks: int, shards: tuple[ShardPlan, ...]) -> int:
    """Region offset behind the first `blocks` blocks."""
    end_bytes = 0
    for shard in shards:
        in_shard = min(blocks, blocks_count(shard.length_bytes))
        end_bytes += min(in_shard * BLOCK_BYTES, shard.length_bytes)
        blocks -= in_shard
    return end_bytes


def _block_line(block: int, checksum: str, errors: tuple[ErrorSum, ...]) -> bytes:
    # Python writes every float so that reading it gives the same bits.
    sums = [[sum_.moe_layer_index, sum_.matrix, sum_.error, sum_.values] for sum_ in errors]
    return _line({"block": block, "checksum": checksum, "errors": sums})


def _errors(value: object) -> tuple[ErrorSum, ...] | None:
    """What `_block_line` wrote; None when it is something else."""
    if not isinstance(value, list):
        return None
    result = []
    for item in value:
        match item:
            case [
                int() | None as layer,
                str(matrix),
                int() | float() as error,
                int() | float() as values,
            ]:
                result.append(
                    ErrorSum(
                        moe_layer_index=layer,
                        matrix=matrix,
                        error=float(error),
                        values=float(values),
                    )
                )
            case _:
                return None
    return tuple(result)


def _line(value: dict[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _parse(line: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
