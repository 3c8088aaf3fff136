"""InterruptionError conversions: nothing half-done is ever in place, and nothing done is lost."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freetokend.core.errors import InvalidInputError, ModelDataError, Reason, ResourceError
from freetokend.ftw.convert import ConvertProgress, convert
from freetokend.ftw.index import FtwIndex, read_index
from freetokend.ftw.journal import JOURNAL_FILE
from freetokend.ftw.layout import BLOCK_BYTES
from tests.ftw.conftest import SHARD_BYTES

# Behind two whole blocks: the first is then known to be in the journal.
STOP_BYTES = 2 * BLOCK_BYTES + 1


class InterruptionError(Exception):
    """Stands for whatever ends a conversion."""


def stop_at(limit_bytes: int) -> Callable[[ConvertProgress], None]:
    def progress(step: ConvertProgress) -> None:
        if step.done_bytes >= limit_bytes:
            raise InterruptionError

    return progress


class Run:
    """One target directory; conversions into it with their notes."""

    def __init__(self, source: Path, directory: Path) -> None:
        self.source = source
        self.directory = directory
        self.temporary = directory.parent / f".{directory.name}.converting"
        self.notes: list[str] = []
        self.first_bytes: int | None = None

    def _record(self, step: ConvertProgress) -> None:
        if step.note:
            self.notes.append(step.note)
        elif self.first_bytes is None:
            self.first_bytes = step.done_bytes

    def convert(self, *, force: bool = False, max_shard_bytes: int = SHARD_BYTES) -> FtwIndex:
        self.notes, self.first_bytes = [], None
        return convert(
            self.source,
            self.directory,
            progress=self._record,
            max_shard_bytes=max_shard_bytes,
            force=force,
        )

    def interrupt(self) -> None:
        with pytest.raises(InterruptionError):
            convert(
                self.source,
                self.directory,
                progress=stop_at(STOP_BYTES),
                max_shard_bytes=SHARD_BYTES,
            )
        assert not self.directory.exists()
        assert self.temporary.is_dir()


@pytest.fixture
def run(big: Path, tmp_path: Path) -> Iterator[Run]:
    """A conversion of one's own of the big checkpoint, whose weights are shared."""
    (tmp_path / "source").mkdir()
    shutil.copy2(big / "source" / "config.json", tmp_path / "source")
    os.link(big / "source" / "model.safetensors", tmp_path / "source" / "model.safetensors")
    yield Run(tmp_path / "source", tmp_path / "model")
    shutil.rmtree(tmp_path)


def assert_same(left: Path, right: Path) -> None:
    """The two directories hold the same files with the same bytes."""
    names = sorted(path.name for path in left.iterdir())
    assert names == sorted(path.name for path in right.iterdir())
    assert filecmp.cmpfiles(left, right, names, shallow=False) == (names, [], [])


KILLED_CHILD = """
import sys
from freetokend.ftw.convert import convert
def progress(step):
    if step.done_bytes >= int(sys.argv[3]):
        print("here", flush=True)
        sys.stdin.read()
convert(sys.argv[1], sys.argv[2], progress=progress, max_shard_bytes=int(sys.argv[4]))
"""


@pytest.mark.parametrize("stop_bytes", [STOP_BYTES, 3 * BLOCK_BYTES + 1])
def test_killed_conversion_is_resumed_to_the_same_bytes(
    stop_bytes: int, run: Run, big: Path
) -> None:
    arguments = [str(run.source), str(run.directory), str(stop_bytes), str(SHARD_BYTES)]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_CHILD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert not run.directory.exists()
    run.convert()
    assert run.first_bytes in range(
        stop_bytes // BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES, stop_bytes
    )
    assert run.first_bytes, "something must have been taken over"
    assert run.notes == [f"resuming an unfinished conversion at {run.first_bytes} bytes."]
    assert_same(run.directory, big / "model")
    assert not run.temporary.exists()


def test_changed_source_starts_over(run: Run) -> None:
    run.interrupt()
    private = run.source / "copy"
    shutil.copyfile(run.source / "model.safetensors", private)
    private.rename(run.source / "model.safetensors")
    index = run.convert()
    assert run.notes == [
        "an unfinished conversion is dropped: the source changed since; starting over."
    ]
    assert run.first_bytes == 0
    assert read_index(run.directory) == index


def test_other_shard_size_starts_over(run: Run) -> None:
    run.interrupt()
    run.convert(max_shard_bytes=BLOCK_BYTES)
    assert "another layout or shard size" in run.notes[0]
    assert run.first_bytes == 0


def damage_header(journal: bytes) -> bytes:
    return b"garbage\n" + journal


def tear_last_line(journal: bytes) -> bytes:
    return journal[:-5]


def skip_a_block(journal: bytes) -> bytes:
    lines = journal.splitlines(keepends=True)
    return lines[0] + json.dumps({"block": 1, "checksum": "0" * 16}).encode() + b"\n"


@pytest.mark.parametrize("change", [damage_header, tear_last_line, skip_a_block])
def test_damaged_journal_never_spoils_the_result(
    change: Callable[[bytes], bytes], run: Run, big: Path
) -> None:
    run.interrupt()
    journal = run.temporary / JOURNAL_FILE
    journal.write_bytes(change(journal.read_bytes()))
    run.convert()
    assert_same(run.directory, big / "model")


def test_shard_shorter_than_the_journal_says_is_written_again(run: Run, big: Path) -> None:
    run.interrupt()
    os.truncate(run.temporary / "00000.ftw", BLOCK_BYTES - 1)
    run.convert()
    assert run.first_bytes == 0
    assert_same(run.directory, big / "model")


def test_file_size_limit_is_told_and_survived(run: Run, big: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 4096, old[1]))
    try:
        with pytest.raises(ResourceError, match=r"File too large.*again to go on") as caught:
            run.convert()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.reason is Reason.DISK_SPACE
    assert not run.directory.exists()
    run.convert()
    assert run.first_bytes == BLOCK_BYTES
    assert_same(run.directory, big / "model")


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, Reason.DISK_SPACE), (errno.EDQUOT, Reason.DISK_SPACE),
     (errno.EIO, Reason.IO_FAILED)],
)  # fmt: skip
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_failing_disk(
    call: str, number: int, reason: Reason, source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(ResourceError, match=os.strerror(number)) as caught:
            convert(source, tmp_path / "model")
    assert caught.value.reason is reason
    assert not (tmp_path / "model").exists()
    convert(source, tmp_path / "model")
    assert read_index(tmp_path / "model")


def test_lack_of_space_is_told_with_both_numbers(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 100_000 // real.f_frsize  # f_bavail
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
        with pytest.raises(
            ResourceError, match=r"needs (\d+) bytes and .* has (\d+) free"
        ) as caught:
            convert(source, tmp_path / "model")
    assert caught.value.reason is Reason.DISK_SPACE
    assert not list(tmp_path.glob(".*")), "nothing is left of a conversion that did not begin"
    free_bytes = fields[4] * real.f_frsize
    assert f"has {free_bytes} free" in caught.value.message
    region_bytes = convert(source, tmp_path / "model").region_bytes
    needed_bytes = int(caught.value.message.split(" needs ")[1].split()[0])
    assert region_bytes < needed_bytes < region_bytes + (20 << 20)


def test_source_that_changes_under_way_is_noticed(source: Path, tmp_path: Path) -> None:
    def touch(_: ConvertProgress) -> None:
        os.utime(source / "model.safetensors", ns=(7, 7))

    with pytest.raises(ModelDataError, match="changed while it was converted"):
        convert(source, tmp_path / "model", progress=touch)
    assert not (tmp_path / "model").exists()
    notes: list[str] = []
    convert(source, tmp_path / "model", progress=lambda step: notes.append(step.note))
    assert any("the source changed since" in note for note in notes)


def test_two_conversions_into_one_target_exclude_each_other(source: Path, tmp_path: Path) -> None:
    temporary = tmp_path / ".model.converting"
    temporary.mkdir()
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(InvalidInputError, match=r"another conversion .* is running"):
            convert(source, tmp_path / "model")
    finally:
        os.close(descriptor)
    convert(source, tmp_path / "model")


@pytest.mark.parametrize("failing_rename", [1, 2])
def test_crash_between_the_renames_of_a_replacement(
    failing_rename: int, source: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(source / "model.safetensors", ns=(7, 7))
    count = 0
    rename = os.rename

    def failing(old: str, new: str) -> None:
        nonlocal count
        count += 1
        if count == failing_rename:
            raise InterruptionError
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        with pytest.raises(InterruptionError):
            convert(source, model, force=True)
    first_bytes: list[int] = []
    index = convert(
        source, model, progress=lambda step: first_bytes.append(step.done_bytes), force=True
    )
    assert first_bytes[0] == index.region_bytes, "nothing is converted twice"
    assert read_index(model) == index
    assert not list(model.parent.glob(".*"))


def test_page_cache_and_descriptors_are_given_back(source: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    convert(source, tmp_path / "model")
    with pytest.raises(InterruptionError):
        convert(source, tmp_path / "other", progress=stop_at(1))
    assert len(os.listdir("/proc/self/fd")) == before
