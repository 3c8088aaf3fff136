"""What the host's memory offers a pool: tmpfs mounts, huge pages, and pinning.

Everything here reads /proc and /sys or wraps the C++ pinner; nothing decides policy.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freetokend.native import _host

HUGE_PAGE_BYTES: Final = 2 << 20
BASE_PAGE_BYTES: Final = 4096
# Settings under which a mapping that asks for huge pages (MADV_HUGEPAGE) can get them.
HUGE_WHEN_ADVISED: Final = frozenset({"advise", "within_size", "always", "force"})

_MAPPING_LINE: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
_OCTAL_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TmpfsMount:
    """A mounted tmpfs; `huge` is its mount option ("never" when it has none)."""

    path: str
    huge: str

    @property
    def huge_pages(self) -> bool:
        """Whether a mapping that asks for huge pages gets them here."""
        return self.huge in HUGE_WHEN_ADVISED


def parse_tmpfs_mounts(text: str) -> tuple[TmpfsMount, ...]:
    """The tmpfs mounts in text of the form of /proc/self/mounts; the last mount on a path wins."""
    mounts: dict[str, TmpfsMount] = {}
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        path = _OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[1])
        # Whatever is mounted over a tmpfs hides it.
        mounts.pop(path, None)
        if fields[2] != "tmpfs":
            continue
        options = dict(option.partition("=")[::2] for option in fields[3].split(","))
        mounts[path] = TmpfsMount(path=path, huge=options.get("huge", "never"))
    return tuple(mounts.values())


def tmpfs_mounts() -> tuple[TmpfsMount, ...]:
    """The tmpfs mounts this process sees; none when /proc is not mounted."""
    try:
        return parse_tmpfs_mounts(Path("/proc/self/mounts").read_text(errors="surrogateescape"))
    except OSError:
        return ()


def shmem_huge_setting() -> str:
    """The kernel's choice for memfd huge pages ("never", "advise", ...); "never" if unknown."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "never"
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else "never"


def kernel_collapses_pages() -> bool:
    """Whether a load can make huge pages where files in memory get none by themselves.

    MADV_COLLAPSE came with Linux 6.1 and obeys no setting but "deny".
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    version = (int(release[1]), int(release[2])) if release else (0, 0)
    return version >= (6, 1) and shmem_huge_setting() != "deny"


def open_private_tmpfs_file(size_bytes: int) -> int:
    """An unnamed file (mode 0600) on a tmpfs of its own with huge=advise; the caller owns the fd.

    The tmpfs is mounted nowhere and goes away with the file. Raises `OSError` where the process
    may neither mount nor make a user namespace.
    """
    return _host.open_private_tmpfs_file(size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingPages:
    """How one mapping is backed right now, from /proc/self/smaps.

    `huge_bytes`: mapped with huge pages, of shared or of private memory.
    """

    resident_bytes: int
    huge_bytes: int
    locked_bytes: int

    @property
    def page_bytes(self) -> int:
        """The page size that most of the resident memory is mapped with."""
        return HUGE_PAGE_BYTES if self.huge_ratio > 0.5 else BASE_PAGE_BYTES

    @property
    def huge_ratio(self) -> float:
        """The share of the resident memory that is mapped with huge pages, 0 to 1."""
        return self.huge_bytes / self.resident_bytes if self.resident_bytes else 0.0


def mapping_pages(address: int, length_bytes: int) -> MappingPages:
    """Sum of the mappings inside [address, address + length_bytes): pinning splits a mapping."""
    resident_bytes = huge_bytes = locked_bytes = 0
    inside = False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as smaps:
        for line in smaps:
            if found := _MAPPING_LINE.match(line):
                start = int(found[1], 16)
                if start >= address + length_bytes:
                    break
                inside = start >= address
            elif inside:
                name, _, value = line.partition(":")
                match name:
                    case "Rss":
                        resident_bytes += _kib(value)
                    case "ShmemPmdMapped" | "AnonHugePages":
                        huge_bytes += _kib(value)
                    case "Locked":
                        locked_bytes += _kib(value)
    return MappingPages(
        resident_bytes=resident_bytes, huge_bytes=huge_bytes, locked_bytes=locked_bytes
    )


def _kib(value: str) -> int:
    return int(value.split(maxsplit=1)[0]) * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """Progress of pinning. `pinned_bytes` is a prefix of the pool's region.

    `done` means that no more will be pinned: all is, or a step failed, or it was aborted; `note`
    then says which in one sentence (empty when all is pinned). `limited` is true when the cause
    is the process's limit on locked memory.
    """

    pinned_bytes: int
    total_bytes: int
    done: bool
    elapsed_s: float
    error_number: int
    limited: bool
    note: str


class Pinning:
    """Background pinning of a pool. Owns the C++ thread; `abort()` ends and joins it."""

    def __init__(self, pinner: _host.Pinner) -> None:
        self._pinner = pinner

    def state(self) -> PinState:
        """A consistent snapshot; never blocks on the pinning itself."""
        now = self._pinner.progress()
        return PinState(
            pinned_bytes=now.pinned_bytes,
            total_bytes=now.total_bytes,
            done=now.done,
            elapsed_s=now.elapsed_s,
            error_number=now.error_number,
            limited=now.limited,
            note=now.note,
        )

    def abort(self) -> None:
        """Stop after the running step (at most `step_bytes` of work); what is pinned stays so."""
        self._pinner.abort()


def is_private_directory(path: str) -> bool:
    """Whether only its owner and group can create files in `path`."""
    return os.stat(path).st_mode & 0o002 == 0
