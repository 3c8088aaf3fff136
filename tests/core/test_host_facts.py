"""What the machine grants, from recorded files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.core.errors import Reason, ResourceError
from freetokend.core.host_facts import (
    HostFiles,
    HostMemory,
    NvidiaCard,
    allowed_cpus,
    cpu_limit,
    cpu_name,
    cpu_quota_count,
    meminfo_bytes,
    numa_nodes,
    nvidia_cards,
    nvidia_driver_version,
    physical_cores_count,
    read_host_memory,
)

GIB = 1 << 30


@pytest.fixture
def files(tmp_path: Path) -> HostFiles:
    files = HostFiles(
        proc=tmp_path / "proc",
        cgroup_root=tmp_path / "cgroup",
        cpu_root=tmp_path / "cpu",
        pci_root=tmp_path / "pci",
        node_root=tmp_path / "node",
    )
    (files.proc / "self").mkdir(parents=True)
    (files.proc / "meminfo").write_text("MemTotal:  25165824 kB\nMemAvailable:   16777216 kB\n")
    in_cgroup(files, "0::/a/b")
    return files


def in_cgroup(files: HostFiles, *lines: str) -> None:
    (files.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def write(directory: Path, **contents: object) -> None:
    """One file per argument; "__" in its name stands for a dot."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def limit(directory: Path, *, most: object, used: int, cache: int = 0) -> None:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 9"
    write(directory, memory__max=most, memory__current=used, memory__stat=stat)


def limit_1(directory: Path, *, most: int, used: int, cache: int = 0) -> None:
    """A limit of version 1; its plain inactive_file leaves out the groups below."""
    stat = f"inactive_file 1\ntotal_inactive_file {cache}"
    write(directory, memory__limit_in_bytes=most, memory__usage_in_bytes=used, memory__stat=stat)


def left_bytes(files: HostFiles) -> int | None:
    return read_host_memory(files).cgroup_available_bytes


def test_without_limits_only_the_machine_counts(files: HostFiles) -> None:
    assert read_host_memory(files, 5) == HostMemory(mem_available_bytes=16 * GIB, cap_bytes=5)


def test_the_tightest_group_on_the_way_up_counts_and_caches_can_go(files: HostFiles) -> None:
    limit(files.cgroup_root / "a", most=8 * GIB, used=5 * GIB, cache=GIB)
    limit(files.cgroup_root / "a/b", most="max", used=5 * GIB)
    assert left_bytes(files) == 4 * GIB
    limit(files.cgroup_root / "a/b", most=2 * GIB, used=3 * GIB)
    assert left_bytes(files) == 0


def test_the_root_of_a_container_has_the_limit(files: HostFiles) -> None:
    limit(files.cgroup_root, most=3 * GIB, used=GIB)
    for path in ("/", "/../../other", "/not/visible/here"):
        in_cgroup(files, f"0::{path}")
        assert left_bytes(files) == 2 * GIB


def test_version_1_has_the_same_meaning(files: HostFiles) -> None:
    in_cgroup(files, "12:cpu,cpuacct:/a/b", "9:memory:/a/b", "1:name=systemd:/a/b", "0::/a/b")
    memory, cpu = files.cgroup_root / "memory/a", files.cgroup_root / "cpu/a"
    limit_1(memory, most=8 * GIB, used=5 * GIB, cache=GIB)
    limit_1(memory / "b", most=9223372036854771712, used=GIB)
    write(cpu, cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    write(cpu / "b", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert left_bytes(files) == 4 * GIB
    assert cpu_quota_count(files) == 2.5


def test_unknown_memory_is_an_error_not_a_guess(files: HostFiles) -> None:
    write(files.proc, meminfo="MemTotal: 1 kB")
    with pytest.raises(ResourceError, match="MemAvailable cannot be read") as caught:
        read_host_memory(files)
    assert caught.value.reason is Reason.HOST_MEMORY


def test_the_tightest_quota_counts(files: HostFiles) -> None:
    assert cpu_quota_count(files) is None
    write(files.cgroup_root / "a/b", cpu__max="max 100000")
    assert cpu_quota_count(files) is None
    write(files.cgroup_root / "a", cpu__max="50000 100000")
    write(files.cgroup_root, cpu__max="400000 100000")
    assert cpu_quota_count(files) == 0.5


@pytest.mark.parametrize(
    ("allowed", "quota", "count", "words"),
    [
        (8, None, 8, "may use 8 CPUs"),
        (8, 2.5, 2, "grants 2.5 CPUs"),
        (8, 0.1, 1, "grants 0.1 CPUs"),
        (8, 8.0, 8, "may use 8 CPUs"),
        (0, None, 1, "may use 1 CPUs"),
    ],
)
def test_mask_and_quota_are_one_limit(
    allowed: int, quota: float | None, count: int, words: str
) -> None:
    found = cpu_limit(allowed, quota)
    assert found.count == count
    assert words in found.reason


def test_siblings_are_one_core_and_unknown_cpus_one_each(files: HostFiles) -> None:
    for cpu, core in enumerate((0, 0, 1)):
        write(files.cpu_root / f"cpu{cpu}/topology", core_id=core, physical_package_id=0)
    write(files.cpu_root / "cpu3/topology", core_id=0, physical_package_id=1)
    assert physical_cores_count(files, range(4)) == 3
    assert physical_cores_count(files, (2, 8, 9)) == 3


def test_the_processor_has_a_name(files: HostFiles) -> None:
    write(files.proc, cpuinfo="processor\t: 0\nmodel name\t: Example 9000")
    assert cpu_name(files) == "Example 9000"
    (files.proc / "cpuinfo").unlink()
    assert cpu_name(files)


def test_gpus_are_seen_on_the_bus_without_a_driver(files: HostFiles) -> None:
    assert nvidia_cards(files) == ()
    write(files.pci_root / "0000:00:02.0", vendor="0x8086", **{"class": "0x030000"})
    write(files.pci_root / "0000:01:00.0", vendor="0x10de", **{"class": "0x030000"})
    write(files.pci_root / "0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    write(files.pci_root / "0000:02:00.0", vendor="0x10de", **{"class": "0x030200"})
    (files.pci_root / "0000:02:00.0/driver").symlink_to("../../../bus/pci/drivers/nvidia")
    write(files.pci_root / "0000:03:00.0", vendor="", **{"class": "?"})
    assert nvidia_cards(files) == (
        NvidiaCard(pci_address="0000:01:00.0", driver=""),
        NvidiaCard(pci_address="0000:02:00.0", driver="nvidia"),
    )


def test_the_version_of_a_loaded_driver(files: HostFiles) -> None:
    assert nvidia_driver_version(files) == ""
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025"
    write(files.proc / "driver/nvidia", version=line)
    assert nvidia_driver_version(files) == "580.65.06"


def test_this_machine_has_some_of_everything() -> None:
    files = HostFiles()
    assert read_host_memory(files).mem_available_bytes > 0
    assert 1 <= physical_cores_count(files, allowed_cpus()) <= len(allowed_cpus())


def test_the_numa_nodes_of_cpus(files: HostFiles) -> None:
    assert numa_nodes(files, (0, 1)) == ()
    write(files.node_root / "node0", cpulist="0-3,8-11")
    write(files.node_root / "node1", cpulist="4-7,12")
    write(files.node_root / "node10", cpulist="")  # memory without CPUs
    write(files.node_root / "power", state="x")
    assert numa_nodes(files, (1, 8)) == (0,)
    assert numa_nodes(files, (12,)) == (1,)
    assert numa_nodes(files, (11, 4)) == (0, 1)
    assert numa_nodes(files, (99,)) == ()


def test_the_line_above_which_a_group_is_slowed_down_is_a_limit_too(files: HostFiles) -> None:
    group = files.cgroup_root / "a/b"
    limit(group, most=9 * GIB, used=GIB)
    write(group, memory__high=5 * GIB)
    assert left_bytes(files) == 4 * GIB
    write(group, memory__high="max")
    assert left_bytes(files) == 8 * GIB
    limit(group, most="max", used=GIB)
    write(group, memory__high=3 * GIB)
    assert left_bytes(files) == 2 * GIB


def test_sizes_of_meminfo_are_in_bytes_and_counts_are_left_out(files: HostFiles) -> None:
    (files.proc / "meminfo").write_text("MemTotal: 2 kB\nHugePages_Total: 7\n\nodd\nX: y kB\n")
    assert meminfo_bytes(files) == {"MemTotal": 2048}
    (files.proc / "meminfo").unlink()
    assert meminfo_bytes(files) == {}
