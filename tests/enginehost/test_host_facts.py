"""What the machine grants, from recorded kernel files."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.core.errors import Reason, ResourceError
from freetokend.enginehost.host_facts import (
    HostFiles,
    choose_cpus,
    cpu_name,
    host_memory,
    read_cpu_choice,
)

GIB = 1 << 30


@pytest.fixture
def files(tmp_path: Path) -> HostFiles:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup/a/b").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:       25165824 kB\nMemAvailable:   16777216 kB\n"
    )
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    return HostFiles(
        proc=tmp_path / "proc", cgroup_root=tmp_path / "cgroup", cpu_root=tmp_path / "cpu"
    )


def limit(path: Path, *, most: str, used: int, cache: int = 0) -> None:
    (path / "memory.max").write_text(f"{most}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 9\n")


def test_without_limits_only_the_machine_counts(files: HostFiles) -> None:
    memory = host_memory(files)
    assert memory.mem_available_bytes == 16 * GIB
    assert memory.cgroup_available_bytes is None


def test_the_tightest_cgroup_on_the_way_up_counts_and_caches_can_go(files: HostFiles) -> None:
    limit(files.cgroup_root / "a", most=str(8 * GIB), used=5 * GIB, cache=GIB)
    limit(files.cgroup_root / "a/b", most="max", used=5 * GIB)
    assert host_memory(files).cgroup_available_bytes == 4 * GIB
    limit(files.cgroup_root / "a/b", most=str(2 * GIB), used=3 * GIB)
    assert host_memory(files).cgroup_available_bytes == 0


def test_unknown_memory_is_an_error_not_a_guess(files: HostFiles) -> None:
    (files.proc / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(ResourceError, match="MemAvailable cannot be read") as caught:
        host_memory(files)
    assert caught.value.reason is Reason.HOST_MEMORY


CORES = {cpu: ("0", str(cpu % 4)) for cpu in range(8)}  # 4 cores of two threads each


@pytest.mark.parametrize(
    ("allowed", "quota", "asked", "cpus", "reason"),
    [
        (range(8), None, 0, (0, 1, 2, 3), "one per physical core"),
        (range(8), None, 2, (0, 1), "2 were asked for"),
        (range(8), None, 6, (0, 1, 2, 3, 4, 5), "6 were asked for"),
        (range(8), None, 99, tuple(range(8)), "99 were asked for, but 8 CPUs are allowed"),
        (range(8), 2.5, 0, (0, 1, 2), "one per physical core, but the control group grants 2.5"),
        (range(8), 0.3, 0, (0,), "one per physical core, but the control group grants 0.3"),
        (range(8), 64.0, 0, (0, 1, 2, 3), "one per physical core"),
        # odd sets: both threads of one core, and a CPU that /sys knows nothing of
        ((2, 6, 7), None, 0, (2, 7), "one per physical core"),
        ((5, 31), None, 0, (5, 31), "one per physical core"),
        ((6,), 4.0, 4, (6,), "4 were asked for, but 1 CPUs are allowed"),
    ],
)
def test_choice_of_cpus(
    allowed: tuple[int, ...],
    quota: float | None,
    asked: int,
    cpus: tuple[int, ...],
    reason: str,
) -> None:
    choice = choose_cpus(tuple(allowed), CORES, quota, asked)
    assert choice.cpus == cpus
    assert choice.reason.startswith(reason)


def test_this_process_gets_at_least_one_cpu(files: HostFiles) -> None:
    (files.cgroup_root / "a/cpu.max").write_text("50000 100000\n")
    (files.cgroup_root / "a/b/cpu.max").write_text("max 100000\n")
    assert len(read_cpu_choice(files, 0).cpus) == 1
    assert len(read_cpu_choice(HostFiles(), 0).cpus) >= 1


def test_the_processor_has_a_name(files: HostFiles) -> None:
    (files.proc / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Example 9000\n")
    assert cpu_name(files) == "Example 9000"
    (files.proc / "cpuinfo").unlink()
    assert cpu_name(files)
