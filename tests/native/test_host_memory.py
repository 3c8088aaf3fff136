"""What is read from /proc and /sys about memory."""

from __future__ import annotations

import pytest

from freetokend.native import host
from freetokend.native.host import MappingPages, TmpfsMount, parse_tmpfs_mounts
from tests.native.host_support import new_mapping, wait_until


def test_mounts_are_parsed_with_their_huge_option() -> None:
    text = (
        "sysfs /sys sysfs rw,nosuid 0 0\n"
        "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n"
        "pool /run/my\\040pool tmpfs rw,size=1024k,huge=advise,mode=700 0 0\n"
        "a /a tmpfs rw,huge=within_size 0 0\n"
        "broken\n"
    )
    assert parse_tmpfs_mounts(text) == (
        TmpfsMount(path="/dev/shm", huge="never"),
        TmpfsMount(path="/run/my pool", huge="advise"),
        TmpfsMount(path="/a", huge="within_size"),
    )


def test_the_last_mount_on_a_path_hides_those_below() -> None:
    below = "one /a tmpfs rw,huge=always 0 0\n"
    assert parse_tmpfs_mounts(below + "two /a tmpfs rw 0 0\n") == (
        TmpfsMount(path="/a", huge="never"),
    )
    assert parse_tmpfs_mounts(below + "/dev/sda /a ext4 rw 0 0\n") == ()


@pytest.mark.parametrize(
    ("huge", "expected"),
    [("never", False), ("advise", True), ("within_size", True), ("always", True), ("?", False)],
)
def test_only_known_options_mean_huge_pages(huge: str, expected: bool) -> None:
    assert TmpfsMount(path="/a", huge=huge).huge_pages is expected


def test_this_machines_own_files_are_understood() -> None:
    assert all(mount.path.startswith("/") for mount in host.tmpfs_mounts())
    settings = {"always", "within_size", "advise", "never", "deny", "force"}
    assert host.shmem_huge_setting() in settings


def test_pages_of_a_mapping_count_what_was_touched_and_locked() -> None:
    with new_mapping(4 << 20) as mapping:
        assert mapping.pages().resident_bytes <= 2 << 20
        any(mapping.view(0, 1 << 20))
        resident_bytes = mapping.pages().resident_bytes
        assert resident_bytes >= 1 << 20
        pinning = mapping.pin(step_bytes=64 << 10)
        wait_until(lambda: pinning.state().done, "pinning ends")
        state = pinning.state()
        assert mapping.pages().locked_bytes == state.pinned_bytes > 0


@pytest.mark.parametrize(
    ("resident", "huge", "expected"), [(10, 0, 4096), (10, 5, 4096), (10, 6, 2 << 20), (0, 0, 4096)]
)
def test_the_page_size_is_the_majoritys(resident: int, huge: int, expected: int) -> None:
    pages = MappingPages(resident_bytes=resident, huge_bytes=huge, locked_bytes=0)
    assert pages.page_bytes == expected
    assert pages.huge_ratio == (huge / resident if resident else 0)
