"""The place a conversion writes to: its temporary directory, lock, space, and final rename."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import xxhash

from freetokend.core.errors import InvalidInputError, ModelDataError, Reason, ResourceError
from freetokend.ftw.contents import INDEX_FILE, FtwIndex, SideFile, index_json
from freetokend.ftw.index import read_index
from freetokend.ftw.journal import JOURNAL_FILE
from freetokend.ftw.strict_json import io_error

SIDE_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
)
_MAX_SIDE_FILE_BYTES: Final = 1 << 30
_COPY_BYTES: Final = 1 << 20


class Target:
    """An FTW directory to be. temporary: where it grows; `directory` appears when complete."""

    def __init__(self, source: Path, directory: Path) -> None:
        """InvalidInputError when source and target contain one another."""
        self.directory = Path(os.path.abspath(directory))
        parent = self.directory.parent
        self.temporary = parent / f".{self.directory.name}.converting"
        self._replaced = parent / f".{self.directory.name}.replaced"
        inside = Path(os.path.realpath(source))
        outside = Path(os.path.realpath(self.directory))
        if inside == outside or inside in outside.parents or outside in inside.parents:
            raise InvalidInputError(
                f"the target {directory} and the source {source} must not contain one another; "
                f"name a directory beside the checkpoint.",
                param="out_dir",
            )

    def existing(self, source_identity: str, *, force: bool) -> FtwIndex | None:
        """The index of a complete conversion of the same source; None when the way is free.

        With `force` whatever is there will be replaced, if it is an FTW directory.
        InvalidInputError when something else is in the way.
        """
        if not os.path.lexists(self.directory):
            return None
        if not self.directory.is_dir() or self.directory.is_symlink():
            raise InvalidInputError(f"{self.directory} exists and is not a directory; move it.")
        entries = os.listdir(self.directory)
        if not entries:
            return None
        if INDEX_FILE not in entries:
            raise InvalidInputError(
                f"{self.directory} exists and is not an FTW directory (it holds {entries[0]}); "
                f"it will not be replaced. Choose another target."
            )
        if force:
            return None
        try:
            index = read_index(self.directory)
        except ModelDataError as error:
            raise InvalidInputError(
                f"{self.directory} exists but is damaged: {error.message} Use --force to "
                f"replace it."
            ) from error
        if index.source.identity != source_identity:
            raise InvalidInputError(
                f"{self.directory} exists and was converted from another checkpoint, or this "
                f"one was changed since. Use --force to replace it, or choose another target."
            )
        return index

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the temporary directory and keep other conversions out of it."""
        try:
            os.makedirs(self.temporary, exist_ok=True)
            descriptor = os.open(self.temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ResourceError(
                f"cannot create {self.temporary}: {error.strerror}. The user running this must "
                f"be able to write to {self.temporary.parent}.",
                reason=Reason.IO_FAILED,
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInputError(
                    f"another conversion into {self.directory} is running; wait for it."
                ) from None
            yield
        finally:
            with suppress(OSError):
                os.rmdir(self.temporary)  # only if nothing was begun
            os.close(descriptor)

    def check_space(self, needed_bytes: int) -> None:
        """ResourceError with both numbers when the file system has less than is needed."""
        status = os.statvfs(self.temporary)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < needed_bytes:
            raise ResourceError(
                f"converting into {self.directory} needs {needed_bytes} bytes and the file "
                f"system has {free_bytes} free. Make room or choose a target elsewhere.",
                reason=Reason.DISK_SPACE,
            )

    def drop_leftovers(self, *, keep_shards: bool) -> None:
        """Remove what an earlier run left in the temporary directory and nobody will use."""
        for entry in os.scandir(self.temporary):
            keep = entry.name == JOURNAL_FILE or entry.name.endswith(".ftw")
            if not (keep_shards and keep):
                os.unlink(entry.path)

    def publish(self, index: FtwIndex) -> None:
        """Write the index, sync, and put the finished directory in place.

        The journal goes last: a crash between the renames then finds a conversion to resume.
        """
        with open(self.temporary / INDEX_FILE, "wb") as file:
            file.write(index_json(index))
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(self.temporary)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self.directory.exists() and os.listdir(self.directory):
            os.rename(self.directory, self._replaced)
        os.rename(self.temporary, self.directory)
        _sync_directory(self.directory.parent)
        os.unlink(self.directory / JOURNAL_FILE)
        _sync_directory(self.directory)
        shutil.rmtree(self._replaced, ignore_errors=True)


def side_file_bytes(source: Path) -> int:
    """Total length of the side files that `source` has."""
    return sum((source / name).stat().st_size for name in SIDE_FILES if (source / name).is_file())


def copy_side_files(source: Path, target: Path) -> tuple[SideFile, ...]:
    """Copy configuration, tokenizer and template files, synced; ModelDataError when one is odd."""
    copied = []
    for name in SIDE_FILES:
        path = source / name
        if not path.exists():
            continue
        if not path.is_file() or path.stat().st_size > _MAX_SIDE_FILE_BYTES:
            raise ModelDataError(
                f"{path} is not a file of at most {_MAX_SIDE_FILE_BYTES} bytes; it would be "
                f"copied beside the weights."
            )
        copied.append(_copy(path, target / name))
    return tuple(copied)


def checksum_file(path: Path) -> tuple[int, str]:
    """Length and xxh3_64 (hex) of a file, read in steps; ModelDataError when it cannot be read."""
    digest = xxhash.xxh3_64()
    length_bytes = 0
    try:
        with open(path, "rb") as file:
            while data := file.read(_COPY_BYTES):
                digest.update(data)
                length_bytes += len(data)
    except FileNotFoundError:
        raise ModelDataError(f"{path} is missing.") from None
    except OSError as error:
        raise io_error(f"cannot read {path}", error) from error
    return length_bytes, digest.hexdigest()


def _copy(source: Path, target: Path) -> SideFile:
    digest = xxhash.xxh3_64()
    length_bytes = 0
    with open(source, "rb") as original, open(target, "wb") as copy:
        while data := original.read(_COPY_BYTES):
            digest.update(data)
            length_bytes += len(data)
            copy.write(data)
        copy.flush()
        os.fsync(copy.fileno())
    return SideFile(file=target.name, length_bytes=length_bytes, checksum=digest.hexdigest())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
