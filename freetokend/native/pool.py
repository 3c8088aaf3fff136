"""The expert pool: one file in memory that outlives the engine.

Layout: a header page, then from `POOL_DATA_OFFSET` the FTW region byte for byte. Control creates
the file and reads its header; only the engine maps it, fills it, and writes the filled mark last.
A pool whose header does not match, or that has no mark, is loaded again, never trusted.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from freetokend.core.errors import ConfigError, InternalError, ResourceError
from freetokend.native import _host, host
from freetokend.native.loader import (
    LoadResult,
    LoadSettings,
    Progress,
    ShardFile,
    load_shards,
    verify_blocks,
)

POOL_MAGIC: Final = b"FTKPOOL1"
POOL_LAYOUT_VERSION: Final = 1
# That of the FTW index whose region a pool holds; `ftw` lies above this package and has it too.
FTW_FORMAT_VERSION: Final = 3
POOL_HEADER_BYTES: Final = 4096
POOL_DATA_OFFSET: Final = 2 << 20
FILLED_MARK: Final = 0x4C4F_4144_4544_2E31
PIN_STEP_BYTES: Final = 256 << 20
# Above any machine, below what offsets can hold: a damaged length must not become a huge mapping.
_MAX_REGION_BYTES: Final = 1 << 45

_HEADER: Final = struct.Struct("<8sII32sQQQ")
_FILLED_OFFSET: Final = _HEADER.size - 8


class PoolMismatchError(ResourceError):
    """A pool that cannot be used as it is: drop it and load again. `field` says what differs."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message, param=field)
        self.field = field


def identity_bytes(identity: str) -> bytes:
    """An FTW identity (hexadecimal, at most 64 digits) as the 32 bytes of the header."""
    try:
        raw = bytes.fromhex(identity)
    except ValueError as error:
        raise InternalError(f"the FTW identity {identity!r} is not hexadecimal") from error
    if not 0 < len(raw) <= 32:
        raise InternalError(f"the FTW identity has {len(raw)} bytes; 1 to 32 are possible")
    return raw.ljust(32, b"\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHeader:
    """The first page of a pool. `identity` names the FTW content, 32 bytes."""

    identity: bytes
    region_bytes: int
    format_version: int = FTW_FORMAT_VERSION
    layout_version: int = POOL_LAYOUT_VERSION
    data_offset_bytes: int = POOL_DATA_OFFSET
    filled: bool = False

    def pack(self) -> bytes:
        """The header page, `POOL_HEADER_BYTES` long."""
        return _HEADER.pack(
            POOL_MAGIC,
            self.layout_version,
            self.format_version,
            self.identity,
            self.region_bytes,
            self.data_offset_bytes,
            FILLED_MARK if self.filled else 0,
        ).ljust(POOL_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> PoolHeader:
        """Parse a header page. Raises `PoolMismatchError` for anything this version cannot use."""
        if len(page) < POOL_HEADER_BYTES:
            raise _mismatch("length", f"it has {len(page)} bytes, too few for a header")
        magic, layout, version, identity, region_bytes, data_offset, filled = _HEADER.unpack_from(
            page
        )
        if magic != POOL_MAGIC:
            raise _mismatch("magic", f"it starts with {magic!r} instead of {POOL_MAGIC!r}")
        if layout != POOL_LAYOUT_VERSION:
            raise _mismatch(
                "layout_version", f"its layout version is {layout}, ours is {POOL_LAYOUT_VERSION}"
            )
        if data_offset != POOL_DATA_OFFSET:
            raise _mismatch(
                "data_offset", f"its data starts at {data_offset} instead of {POOL_DATA_OFFSET}"
            )
        if not 0 < region_bytes <= _MAX_REGION_BYTES:
            raise _mismatch("region_bytes", f"its region has {region_bytes} bytes")
        if filled not in (0, FILLED_MARK):
            raise _mismatch("filled", f"its filled mark is {filled:#x}, which nobody writes")
        if any(page[_HEADER.size : POOL_HEADER_BYTES]):
            raise _mismatch("reserved", "the unused part of its header is not zero")
        return cls(
            identity=identity,
            region_bytes=region_bytes,
            format_version=version,
            filled=filled == FILLED_MARK,
        )

    def check(
        self, *, identity: str, region_bytes: int, format_version: int = FTW_FORMAT_VERSION
    ) -> None:
        """Raise `PoolMismatchError` unless this pool is for that FTW content."""
        if self.format_version != format_version:
            raise _mismatch(
                "format_version",
                f"it holds FTW format {self.format_version}, the model has {format_version}",
            )
        if self.identity != identity_bytes(identity):
            raise _mismatch("identity", "it holds another model or another conversion of it")
        if self.region_bytes != region_bytes:
            raise _mismatch(
                "region_bytes",
                f"its region has {self.region_bytes} bytes, the model has {region_bytes}",
            )


def _mismatch(field: str, what: str) -> PoolMismatchError:
    return PoolMismatchError(field, f"the pool is not usable: {what}; it is loaded again")


def pool_length_bytes(region_bytes: int) -> int:
    """Length of the pool file: whole huge pages, so that the last record lies in one too."""
    end_bytes = POOL_DATA_OFFSET + region_bytes
    return -(-end_bytes // host.HUGE_PAGE_BYTES) * host.HUGE_PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFile:
    """A new pool; the receiver owns `fd`.

    `backing`: "tmpfs" or "memfd". `page_bytes`: the page size its mappings can expect after a load;
    `PoolMapping.pages()` tells what they got. `reason`: one sentence on why this backing was taken.
    """

    fd: int
    name: str
    length_bytes: int
    backing: str
    page_bytes: int
    reason: str

    def close(self) -> None:
        """Drop this descriptor; the memory is freed with the last descriptor and mapping."""
        os.close(self.fd)


def create_pool_file(
    name: str, region_bytes: int, identity: str, directory: str | None = None
) -> PoolFile:
    """Make an empty pool with an unfilled header. No memory is committed but its header page.

    `directory`: a tmpfs to use; None looks for a mounted one with huge pages and room, then makes
    one where that is allowed and of use, and takes a memfd otherwise. Raises `ConfigError` (the
    directory is no usable tmpfs), `ResourceError` (no room in it, or the kernel refuses).
    """
    if not 0 < region_bytes <= _MAX_REGION_BYTES:
        raise InternalError(f"a pool of {region_bytes} bytes is impossible")
    header = PoolHeader(identity=identity_bytes(identity), region_bytes=region_bytes)
    length_bytes = pool_length_bytes(region_bytes)
    if directory is not None:
        pool = _on_configured(name, length_bytes, directory)
    else:
        pool = (
            _on_discovered(name, length_bytes)
            or _on_private_tmpfs(name, length_bytes)
            or _on_memfd(name, length_bytes)
        )
    try:
        os.pwrite(pool.fd, header.pack(), 0)
        if pool.backing == "memfd":
            # No write seal: it would forbid the writable mapping of an engine that loads again.
            fcntl.fcntl(
                pool.fd,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
    except OSError as error:
        pool.close()
        raise ResourceError(f"cannot write the header of the pool: {error}") from error
    return pool


def _on_configured(name: str, length_bytes: int, directory: str) -> PoolFile:
    real = os.path.realpath(directory)
    if not os.path.isdir(real):
        raise ConfigError(f"pool.directory {directory} is not a directory", param="pool.directory")
    around = [m for m in host.tmpfs_mounts() if os.path.commonpath((m.path, real)) == m.path]
    mount = max(around, key=lambda m: len(m.path), default=None)
    if mount is None or os.stat(mount.path).st_dev != os.stat(real).st_dev:
        raise ConfigError(
            f"pool.directory {directory} is not on a tmpfs: a pool on a disk would be read back "
            "and forth; name a tmpfs (best mounted with huge=advise) or leave it at auto",
            param="pool.directory",
        )
    free_bytes = _free_bytes(real)
    if free_bytes is not None and free_bytes < length_bytes:
        raise ResourceError(
            f"the pool needs {length_bytes} bytes and {directory} has {free_bytes} free: "
            "mount it with a larger size= or leave pool.directory at auto",
            param="pool.directory",
        )
    try:
        return _on_tmpfs(
            name, length_bytes, host.TmpfsMount(path=real, huge=mount.huge), "it is configured"
        )
    except OSError as error:
        raise ConfigError(
            f"cannot make the pool in {directory}: {error.strerror}; check its owner and mode",
            param="pool.directory",
        ) from error


def _on_discovered(name: str, length_bytes: int) -> PoolFile | None:
    """On the best mounted tmpfs with huge pages and room; None when none can be used."""
    usable = []
    for mount in host.tmpfs_mounts():
        if not mount.huge_pages or not os.access(mount.path, os.W_OK | os.X_OK):
            continue
        free_bytes = _free_bytes(mount.path)
        if free_bytes is None or free_bytes >= length_bytes:
            usable.append(mount)
    # A directory that not everybody can fill keeps its room.
    usable.sort(key=lambda mount: (not host.is_private_directory(mount.path), mount.path))
    for mount in usable:
        try:
            return _on_tmpfs(name, length_bytes, mount, "it is mounted with huge pages")
        except OSError:
            continue  # a foreign user namespace, a quota: nobody asked for this mount
    return None


def _free_bytes(path: str) -> int | None:
    """Free bytes of a file system; None for a tmpfs without a size limit."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _on_tmpfs(name: str, length_bytes: int, mount: host.TmpfsMount, why: str) -> PoolFile:
    """Raises `OSError` when no file can be made there."""
    fd = os.open(mount.path, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return _sized(
        fd,
        length_bytes,
        PoolFile(
            fd=fd,
            name=name,
            length_bytes=length_bytes,
            backing="tmpfs",
            page_bytes=_expected_page_bytes(mount.huge_pages),
            reason=f"on the tmpfs {mount.path} (huge={mount.huge}) because {why}",
        ),
    )


def _on_private_tmpfs(name: str, length_bytes: int) -> PoolFile | None:
    """On a tmpfs made for this pool, where memfds have no huge pages at the first touch.

    None when memfds are as good, or when the process may not make one.
    """
    if host.shmem_huge_setting() in host.HUGE_WHEN_ADVISED:
        return None
    try:
        fd = host.open_private_tmpfs_file(length_bytes)
    except OSError:
        return None
    return _sized(
        fd,
        length_bytes,
        PoolFile(
            fd=fd,
            name=name,
            length_bytes=length_bytes,
            backing="tmpfs",
            page_bytes=host.HUGE_PAGE_BYTES,
            reason="on a private tmpfs (huge=advise) because memfds get no huge pages here",
        ),
    )


def _on_memfd(name: str, length_bytes: int) -> PoolFile:
    try:
        fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ResourceError(f"cannot make a memfd for the pool: {error.strerror}") from error
    setting = host.shmem_huge_setting()
    return _sized(
        fd,
        length_bytes,
        PoolFile(
            fd=fd,
            name=name,
            length_bytes=length_bytes,
            backing="memfd",
            page_bytes=_expected_page_bytes(setting in host.HUGE_WHEN_ADVISED),
            reason="in a memfd because no tmpfs with huge pages and enough room is mounted"
            f" (huge pages for memfds: {setting})",
        ),
    )


def _expected_page_bytes(when_touched: bool) -> int:
    """`when_touched`: huge pages come by themselves; else the loader can ask for them."""
    huge = when_touched or host.kernel_collapses_pages()
    return host.HUGE_PAGE_BYTES if huge else host.BASE_PAGE_BYTES


def _sized(fd: int, length_bytes: int, pool: PoolFile) -> PoolFile:
    try:
        os.ftruncate(fd, length_bytes)
    except OSError as error:
        os.close(fd)
        raise ResourceError(
            f"the kernel refuses a pool file of {length_bytes} bytes: {error.strerror}"
        ) from error
    return pool


def read_header(fd: int) -> PoolHeader:
    """The header of a pool file, without mapping it.

    Raises `PoolMismatchError` when it is not a pool that this version can use, also when the file
    is shorter than its header says.
    """
    try:
        length_bytes = os.fstat(fd).st_size
        page = os.pread(fd, POOL_HEADER_BYTES, 0)
    except OSError as error:
        raise _mismatch("fd", f"it cannot be read ({error.strerror})") from error
    header = PoolHeader.unpack(page)
    if length_bytes != pool_length_bytes(header.region_bytes):
        raise _mismatch(
            "length",
            f"the file has {length_bytes} bytes and its header asks for "
            f"{pool_length_bytes(header.region_bytes)}",
        )
    return header


class PoolMapping:
    """The engine's view of a pool. Owns the mapping, the load and the pinning; not the fd.

    Used by one thread, except `pinning.state()`. `region_address` stays the same until `close()`,
    after which no address or view of it may be used.
    """

    def __init__(self, fd: int) -> None:
        """Map the pool read-write. Raises `PoolMismatchError`, `ResourceError`."""
        started_s = time.monotonic()
        self._header = read_header(fd)
        try:
            self._mapping = _host.Mapping(fd, pool_length_bytes(self._header.region_bytes))
        except OSError as error:
            what = os.strerror(error.errno) if error.errno else str(error)
            reason = (
                "the address space limit (ulimit -v) is too small"
                if error.errno == errno.ENOMEM
                else "the descriptor must be open for reading and writing"
            )
            raise ResourceError(f"cannot map the pool: {what}; {reason}") from error
        self._mapping.advise_huge()
        self._pinning: host.Pinning | None = None
        self.attach_s = time.monotonic() - started_s

    @property
    def header(self) -> PoolHeader:
        """The header with the present state of the filled mark."""
        return dataclasses.replace(self._header, filled=self.filled)

    @property
    def filled(self) -> bool:
        """Whether the region is complete."""
        return self._mapping.load_u64(_FILLED_OFFSET) == FILLED_MARK

    @property
    def region_address(self) -> int:
        """Address of the first byte of the region, aligned to 2 MiB."""
        return self._mapping.address + POOL_DATA_OFFSET

    @property
    def region_bytes(self) -> int:
        """Length of the region."""
        return self._header.region_bytes

    @property
    def pinning(self) -> host.Pinning | None:
        """The pinning that `pin()` started."""
        return self._pinning

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """A read-only view of a part of the region; not to be used after `close()`."""
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self.region_bytes:
            raise InternalError(
                f"bytes {offset_bytes} to {offset_bytes + length_bytes} lie outside the region"
            )
        return self._mapping.view(POOL_DATA_OFFSET + offset_bytes, length_bytes)

    def interleave(self, nodes: Sequence[int]) -> int:
        """Spread pages that are touched from now on over NUMA nodes; 0, or the errno."""
        return self._mapping.interleave(list(nodes))

    def pages(self) -> host.MappingPages:
        """How the mapping is backed now; walks its page tables (milliseconds per GiB)."""
        return host.mapping_pages(self._mapping.address, self._mapping.length_bytes)

    def load(
        self,
        shards: Sequence[ShardFile],
        progress: Progress | None = None,
        *,
        verify: bool = False,
        cancel: threading.Event | None = None,
        settings: LoadSettings | None = None,
    ) -> LoadResult:
        """Fill the region from `shards`; the mark is cleared first and not set (`mark_filled`).

        `verify` also checks the block checksums; `progress` then runs a second time over the
        bytes. Errors: see `load_shards` and `verify_blocks`.
        """
        self._mapping.store_u64(_FILLED_OFFSET, 0)
        result = load_shards(
            self._mapping,
            shards,
            data_offset_bytes=POOL_DATA_OFFSET,
            region_bytes=self.region_bytes,
            progress=progress,
            cancel=cancel,
            settings=settings,
        )
        if not verify:
            return result
        started_s = time.monotonic()
        verified_bytes = verify_blocks(
            self._mapping,
            shards,
            data_offset_bytes=POOL_DATA_OFFSET,
            progress=progress,
            cancel=cancel,
        )
        return dataclasses.replace(
            result, verified_bytes=verified_bytes, verify_s=time.monotonic() - started_s
        )

    def mark_filled(self) -> None:
        """Declare the region complete. The last write: every byte before it is in the file."""
        self._mapping.store_u64(_FILLED_OFFSET, FILLED_MARK)

    def protect(self) -> None:
        """Make the mapping read-only. Raises `OSError` (not seen in practice)."""
        self._mapping.protect_read_only()

    def pin(self, step_bytes: int = PIN_STEP_BYTES) -> host.Pinning:
        """Lock the region into memory, in the background, in steps; only useful once filled."""
        if self._pinning is None:
            length_bytes = -(-self.region_bytes // host.BASE_PAGE_BYTES) * host.BASE_PAGE_BYTES
            self._pinning = host.Pinning(
                _host.Pinner(self._mapping, POOL_DATA_OFFSET, length_bytes, step_bytes)
            )
        return self._pinning

    def close(self) -> None:
        """Stop pinning and unmap; the pool itself lives on in its file. May be called twice."""
        if self._pinning is not None:
            self._pinning.abort()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
