"""Which CPUs the executor's threads get."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.core.host_facts import HostFiles
from freetokend.enginehost.host_facts import choose_cpus, read_cpu_choice

CORES = {cpu: ("0", str(cpu % 4)) for cpu in range(8)}  # 4 cores of two threads each


@pytest.mark.parametrize(
    ("allowed", "quota", "asked", "cpus", "reason"),
    [
        (range(8), None, 0, (0, 1, 2, 3), "one per physical core"),
        (range(8), None, 2, (0, 1), "2 were asked for"),
        (range(8), None, 6, (0, 1, 2, 3, 4, 5), "6 were asked for"),
        (range(8), None, 99, tuple(range(8)), "99 were asked for, but this process may use 8 CPUs"),
        (range(8), 2.5, 0, (0, 1), "one per physical core, but the control group grants 2.5"),
        (range(8), 0.3, 0, (0,), "one per physical core, but the control group grants 0.3"),
        (range(8), 64.0, 0, (0, 1, 2, 3), "one per physical core"),
        # odd sets: both threads of one core, and a CPU that /sys knows nothing of
        ((2, 6, 7), None, 0, (2, 7), "one per physical core"),
        ((5, 31), None, 0, (5, 31), "one per physical core"),
        ((6,), 4.0, 4, (6,), "4 were asked for, but this process may use 1 CPUs"),
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


def test_this_process_gets_at_least_one_cpu(tmp_path: Path) -> None:
    files = HostFiles(proc=tmp_path / "proc", cgroup_root=tmp_path / "cgroup")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup/a").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    (tmp_path / "cgroup/a/cpu.max").write_text("50000 100000\n")
    assert len(read_cpu_choice(files, 0).cpus) == 1
    assert len(read_cpu_choice(HostFiles(), 0).cpus) >= 1
