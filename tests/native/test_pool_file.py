"""Where a pool's file is made, and what it costs before it is filled."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetokend.core.errors import ConfigError, InternalError, ResourceError
from freetokend.native import host
from freetokend.native.host import TmpfsMount
from freetokend.native.pool import POOL_DATA_OFFSET, PoolMapping, create_pool_file, read_header
from tests.native.host_support import IDENTITY, run_child

GIB = 1 << 30


@pytest.fixture
def tmpfs_directory() -> Iterator[Path]:
    """A directory on a real tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def no_huge_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tmpfs with huge pages is mounted, and none can be made."""

    def refuse(size_bytes: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(host, "open_private_tmpfs_file", refuse)
    monkeypatch.setattr(host, "tmpfs_mounts", lambda: (TmpfsMount(path="/dev/shm", huge="never"),))


@pytest.mark.usefixtures("no_huge_mount")
def test_a_memfd_is_sealed_and_empty() -> None:
    pool = create_pool_file("freetoken-pool-m", 3 * GIB + 5, IDENTITY)
    try:
        assert pool.backing == "memfd"
        assert pool.length_bytes == POOL_DATA_OFFSET + 3 * GIB + (2 << 20)
        status = os.fstat(pool.fd)
        assert status.st_size == pool.length_bytes
        assert status.st_blocks * 512 <= host.HUGE_PAGE_BYTES  # the header's page and no more
        seals = fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert not os.get_inheritable(pool.fd)
        with pytest.raises(OSError, match="Operation not permitted"):
            os.ftruncate(pool.fd, 4096)
        assert "huge" in pool.reason
    finally:
        pool.close()


@pytest.mark.usefixtures("no_huge_mount")
def test_the_expected_page_size_follows_the_kernels_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for setting, release, page_bytes in (
        ("never", "5.15.0-91-generic", 4096),
        ("never", "6.0.19", 4096),
        ("never", "6.1.0-18-amd64", 2 << 20),
        ("never", "unknown", 4096),
        ("deny", "6.18.44", 4096),
        ("advise", "5.15.0-91-generic", 2 << 20),
    ):
        monkeypatch.setattr(host, "shmem_huge_setting", lambda setting=setting: setting)
        kernel = os.uname_result(("Linux", "host", release, "#1", "x86_64"))
        monkeypatch.setattr(os, "uname", lambda kernel=kernel: kernel)
        pool = create_pool_file("freetoken-pool-m", 4096, IDENTITY)
        pool.close()
        assert pool.page_bytes == page_bytes
        assert setting in pool.reason


def test_a_configured_tmpfs_gets_an_unnamed_private_file(tmpfs_directory: Path) -> None:
    pool = create_pool_file("freetoken-pool-m", 1 << 20, IDENTITY, str(tmpfs_directory))
    try:
        status = os.fstat(pool.fd)
        assert pool.backing == "tmpfs"
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert list(tmpfs_directory.iterdir()) == []
        assert not os.get_inheritable(pool.fd)
        assert read_header(pool.fd).region_bytes == 1 << 20
        assert str(tmpfs_directory) in pool.reason
    finally:
        pool.close()


@pytest.mark.parametrize("directory", ["/proc", "/nonexistent/pool"])
def test_a_directory_that_is_no_tmpfs_is_a_configuration_error(directory: str) -> None:
    with pytest.raises(ConfigError, match=directory) as caught:
        create_pool_file("freetoken-pool-m", 4096, IDENTITY, directory)
    assert caught.value.param == "pool.directory"


def test_a_tmpfs_without_room_is_refused_with_both_numbers(
    tmpfs_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmpfs_directory)
    small = os.statvfs_result((*real[:4], 1000, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(ResourceError) as caught:
        create_pool_file("freetoken-pool-m", GIB, IDENTITY, str(tmpfs_directory))
    assert str(GIB + POOL_DATA_OFFSET) in caught.value.message
    assert str(1000 * real.f_frsize) in caught.value.message


def test_a_mounted_tmpfs_with_huge_pages_is_found(
    tmpfs_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmpfs_directory / "a-shared"
    private = tmpfs_directory / "b-private"
    for path, mode in ((open_to_all, 0o1777), (private, 0o700)):
        path.mkdir()
        path.chmod(mode)
    mounts = (
        TmpfsMount(path="/nonexistent", huge="always"),
        TmpfsMount(path=str(open_to_all), huge="advise"),
        TmpfsMount(path=str(private), huge="within_size"),
    )
    monkeypatch.setattr(host, "tmpfs_mounts", lambda: mounts)
    pool = create_pool_file("freetoken-pool-m", 4096, IDENTITY)
    pool.close()
    assert (pool.backing, pool.page_bytes) == ("tmpfs", 2 << 20)
    assert str(private) in pool.reason


@pytest.mark.usefixtures("no_huge_mount")
def test_a_mount_that_is_too_small_is_passed_over(
    tmpfs_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        host, "tmpfs_mounts", lambda: (TmpfsMount(path=str(tmpfs_directory), huge="always"),)
    )
    real = os.statvfs(tmpfs_directory)
    small = os.statvfs_result((*real[:4], 1, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    pool = create_pool_file("freetoken-pool-m", GIB, IDENTITY)
    pool.close()
    assert pool.backing == "memfd"


@pytest.mark.usefixtures("no_huge_mount")
def test_a_mount_that_nobody_asked_for_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "tmpfs_mounts", lambda: (TmpfsMount(path="/proc", huge="always"),))
    pool = create_pool_file("freetoken-pool-m", 4096, IDENTITY)
    pool.close()
    assert pool.backing == "memfd"


def test_impossible_sizes_are_refused() -> None:
    for size_bytes in (0, -1, 1 << 60):
        with pytest.raises(InternalError):
            create_pool_file("freetoken-pool-m", size_bytes, IDENTITY)


def test_a_private_tmpfs_is_made_where_memfds_have_no_huge_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the machine forbids it, the pool must still be made, and say what it is."""
    monkeypatch.setattr(host, "tmpfs_mounts", lambda: ())
    monkeypatch.setattr(host, "shmem_huge_setting", lambda: "never")
    before = os.listdir("/proc/self/fd")
    pool = create_pool_file("freetoken-pool-m", 8 << 20, IDENTITY)
    try:
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
        assert not os.get_inheritable(pool.fd)
        if pool.backing == "memfd":
            with pytest.raises(PermissionError):
                host.open_private_tmpfs_file(8 << 20)
            return
        assert stat.S_IMODE(os.fstat(pool.fd).st_mode) == 0o600
        assert os.fstat(pool.fd).st_uid == os.geteuid()
        assert "private tmpfs" in pool.reason
        with PoolMapping(pool.fd) as mapping:
            ctypes.memset(mapping.region_address, 1, mapping.region_bytes)
            assert mapping.pages().page_bytes == pool.page_bytes == 2 << 20
    finally:
        pool.close()


@pytest.mark.usefixtures("no_huge_mount")
def test_no_private_tmpfs_where_memfds_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "shmem_huge_setting", lambda: "advise")
    monkeypatch.setattr(host, "open_private_tmpfs_file", lambda size_bytes: pytest.fail("asked"))
    pool = create_pool_file("freetoken-pool-m", 4096, IDENTITY)
    pool.close()
    assert (pool.backing, pool.page_bytes) == ("memfd", 2 << 20)


def test_a_real_huge_tmpfs_backs_the_mapping_with_huge_pages(tmp_path: Path) -> None:
    """In its own mount namespace where that is allowed; else the same code must say memfd."""
    output = run_child(
        """
        import ctypes, os, sys
        from freetokend.native.pool import PoolMapping, create_pool_file

        libc = ctypes.CDLL(None, use_errno=True)
        CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
        flags = CLONE_NEWNS if os.getuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
        MS_REC, MS_PRIVATE = 0x4000, 0x40000
        directory = sys.argv[1].encode()
        uid, gid = os.getuid(), os.getgid()

        def enter():
            if libc.unshare(flags) != 0:
                return False
            if flags & CLONE_NEWUSER:
                for name, text in (
                    ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")
                ):
                    with open(f"/proc/self/{name}", "w") as file:
                        file.write(text)
            return True

        mounted = (
            enter()
            and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
            and libc.mount(b"pool", directory, b"tmpfs", 0, b"huge=advise,size=64m,mode=700") == 0
        )
        pool = create_pool_file("freetoken-pool-m", 8 << 20, "ab" * 32)
        with PoolMapping(pool.fd) as mapping:
            ctypes.memset(mapping.region_address, 1, mapping.region_bytes)
            print(mounted, pool.backing, pool.page_bytes, mapping.pages().page_bytes)
        """,
        arguments=[str(tmp_path)],
    ).split()
    mounted, backing, expected_bytes, actual_bytes = output
    if mounted == "True":
        assert (backing, expected_bytes, actual_bytes) == ("tmpfs", str(2 << 20), str(2 << 20))
    else:
        assert backing in ("memfd", "tmpfs")
        assert int(actual_bytes) <= int(expected_bytes)


def test_pages_are_spread_over_nodes() -> None:
    pool = create_pool_file("freetoken-pool-n", 4 << 20, IDENTITY)
    try:
        with PoolMapping(pool.fd) as mapping:
            address = mapping.region_address - POOL_DATA_OFFSET
            # a sandbox may forbid the call: then nothing has changed
            expected = "interleave:0" if mapping.interleave([0]) == 0 else "default"
            lines = Path("/proc/self/numa_maps").read_text().splitlines()
            policies = [line.split()[1] for line in lines if int(line.split()[0], 16) == address]
            assert policies == [expected]
            assert mapping.interleave([-1]) == mapping.interleave([1024]) == errno.EINVAL
            assert mapping.interleave([1023]) in (errno.EINVAL, errno.EPERM)
    finally:
        pool.close()
