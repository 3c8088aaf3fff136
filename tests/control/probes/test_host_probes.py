"""Memory, pressure and load from recorded files of the kernel; what the fakes keep to as well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from freetokend.control.probes.cpu_load import ProcStatLoadProbe
from freetokend.control.probes.host_memory import HostMemoryProbe
from freetokend.control.probes.ports import (
    CpuLoadProbe,
    MemoryProbe,
    MemoryReading,
    PressureProbe,
    PressureReadings,
    ProbeError,
)
from freetokend.control.probes.pressure import PsiProbe
from freetokend.core.host_facts import HostFiles, allowed_cpus
from freetokend.policy.readings import PressureReading
from tests.control.probes.rigs import Clock
from tests.fakes.probes import (
    ScriptedCpuLoad,
    ScriptedHost,
    ScriptedMemory,
    ScriptedPressure,
)

GIB = 1 << 30
ENGINE = 900


@pytest.fixture
def files(tmp_path: Path) -> HostFiles:
    files = HostFiles(proc=tmp_path / "proc", cgroup_root=tmp_path / "cgroup")
    (files.proc / "self").mkdir(parents=True)
    (files.proc / "pressure").mkdir()
    (files.proc / "self/cgroup").write_text("0::/system.slice/freetokend.service\n")
    return files


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def put_meminfo(files: HostFiles) -> None:
    put(
        files.proc / "meminfo",
        "MemTotal:       65536000 kB\nMemFree:         1000000 kB\n"
        "MemAvailable:   32768000 kB\nHugePages_Total:       0\n",
    )


def put_psi(path: Path, some: float, full: float | None) -> None:
    text = f"some avg10={some:.2f} avg60=0.08 avg300=1.85 total=222083872\n"
    if full is not None:
        text += f"full avg10={full:.2f} avg60=0.01 avg300=0.57 total=63671501\n"
    put(path, text)


# ---- what real and scripted probes share ------------------------------------------------------

Broken = Callable[[], None]


@pytest.fixture(params=["kernel", "scripted"])
def memory(
    request: pytest.FixtureRequest, files: HostFiles
) -> tuple[MemoryProbe, MemoryReading, Broken]:
    """A probe, what it is to read, and what breaks it."""
    if request.param == "kernel":
        put_meminfo(files)
        expected = MemoryReading(mem_total_bytes=65536000 << 10, mem_available_bytes=32768000 << 10)
        return HostMemoryProbe(files), expected, (files.proc / "meminfo").unlink
    host = ScriptedHost()

    def scripted_break() -> None:
        host.memory_error = ProbeError("no meminfo")

    return ScriptedMemory(host), host.memory, scripted_break


def test_a_memory_probe_reads_or_says_why_not(
    memory: tuple[MemoryProbe, MemoryReading, Broken],
) -> None:
    probe, expected, break_it = memory
    assert probe.read() == probe.read() == expected
    break_it()
    with pytest.raises(ProbeError, match="meminfo"):
        probe.read()


@pytest.fixture(params=["kernel", "scripted"])
def pressure(
    request: pytest.FixtureRequest, files: HostFiles
) -> tuple[PressureProbe, PressureReadings, Broken]:
    expected = PressureReadings(
        memory=PressureReading(some_avg10=1.5, full_avg10=0.5),
        cpu=PressureReading(some_avg10=84.32),
    )
    if request.param == "kernel":
        path = files.proc / "pressure/memory"
        put_psi(path, 1.5, 0.5)
        put_psi(files.proc / "pressure/cpu", 84.32, None)
        return PsiProbe(files), expected, lambda: put(path, "some avg10=lots\n")
    host = ScriptedHost()
    host.pressure = expected

    def scripted_break() -> None:
        host.pressure_error = ProbeError("avg10 is no number")

    return ScriptedPressure(host), expected, scripted_break


def test_a_pressure_probe_reads_or_says_why_not(
    pressure: tuple[PressureProbe, PressureReadings, Broken],
) -> None:
    probe, expected, break_it = pressure
    assert probe.read() == expected
    break_it()
    with pytest.raises(ProbeError, match="avg10"):
        probe.read()


class Machine:
    """Two CPUs of the executor and one that is not, with an engine of two threads."""

    def __init__(self, files: HostFiles) -> None:
        self.files = files
        self.clock = Clock()
        self.user = [100, 100, 100]  # of each CPU
        self.idle = [1000, 1000, 1000]
        self.threads = {"900": (50, 0), "901": (70, 2)}  # id: ticks and last CPU
        self.write()

    def pass_second(self, *others: int, own: int = 0) -> None:
        """100 ticks a CPU: so many went to others on each, and `own` to thread 900 on CPU 0."""
        for cpu, ticks in enumerate(others):
            spent = ticks + (own if cpu == 0 else 0)
            self.user[cpu] += spent
            self.idle[cpu] += 100 - spent
        used, cpu = self.threads["900"]
        self.threads["900"] = (used + own, cpu)
        self.clock.now_s += 1
        self.write()

    def write(self) -> None:
        lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
        for cpu, (user, idle) in enumerate(zip(self.user, self.idle, strict=True)):
            lines.append(f"cpu{cpu} {user} 0 0 {idle} 7 0 0 0 999 999")
        put(self.files.proc / "stat", "\n".join([*lines, "intr 5 0 0"]) + "\n")
        for thread, (ticks, cpu) in self.threads.items():
            fields = ["R", *["0"] * 10, str(ticks - 10), "10", *["0"] * 23, str(cpu), "0"]
            path = self.files.proc / f"{ENGINE}/task/{thread}/stat"
            put(path, f"{thread} (a) b (c) {' '.join(fields)}\n")


@pytest.fixture(params=["kernel", "scripted"])
def load(request: pytest.FixtureRequest, files: HostFiles) -> tuple[CpuLoadProbe, Broken, Broken]:
    """A probe, what makes a second pass in which others took a quarter, and what breaks it."""
    if request.param == "kernel":
        machine = Machine(files)
        return (
            ProcStatLoadProbe(files, clock=machine.clock),
            lambda: machine.pass_second(50, 0, 0),
            (files.proc / "stat").unlink,
        )
    host = ScriptedHost()

    def scripted_second() -> None:
        host.executor_load = 0.25

    def scripted_break() -> None:
        host.load_error = ProbeError("stat cannot be read")

    return ScriptedCpuLoad(host), scripted_second, scripted_break


def test_a_load_probe_knows_nothing_at_the_first_look_at_some_cpus(
    load: tuple[CpuLoadProbe, Broken, Broken],
) -> None:
    probe, pass_second, break_it = load
    assert probe.read({0, 1}, set()) is None
    pass_second()
    assert probe.read({0, 1}, set()) == 0.25
    assert probe.read({0}, set()) is None
    pass_second()
    break_it()
    with pytest.raises(ProbeError, match="stat cannot be read"):
        probe.read({0}, set())


# ---- what only the real ones have -------------------------------------------------------------


def put_group(group: Path, **numbers: int | str) -> None:
    for name, number in numbers.items():
        put(group / f"memory.{name}", f"{number}\n")


def test_the_control_group_that_leaves_least_is_the_limit(files: HostFiles) -> None:
    put_meminfo(files)
    probe, top = HostMemoryProbe(files), files.cgroup_root
    own = top / "system.slice/freetokend.service"
    put_group(own, max="max", high="max", current=3 * GIB)
    assert probe.read().cgroup_limit_bytes is None
    put_group(own, max=20 * GIB, high=16 * GIB, stat=f"anon 1\ninactive_file {GIB}")
    seen = probe.read()
    assert (seen.cgroup_limit_bytes, seen.cgroup_used_bytes) == (16 * GIB, 2 * GIB)
    # An ancestor with more room in all, but its other children use most of it.
    put_group(top / "system.slice", max=30 * GIB, current=25 * GIB)
    seen = probe.read()
    assert (seen.cgroup_limit_bytes, seen.cgroup_used_bytes) == (30 * GIB, 25 * GIB)


def test_meminfo_without_a_line_is_a_fault_that_names_it(files: HostFiles) -> None:
    put(files.proc / "meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(ProbeError, match="MemAvailable"):
        HostMemoryProbe(files).read()


def test_the_higher_pressure_of_host_and_own_group_counts(files: HostFiles) -> None:
    own = files.cgroup_root / "system.slice/freetokend.service/memory.pressure"
    put_psi(own, 4.0, 3.0)
    assert PsiProbe(files).read().memory == PressureReading(some_avg10=4.0, full_avg10=3.0)
    put_psi(files.proc / "pressure/memory", 9.0, 1.0)
    assert PsiProbe(files).read().memory == PressureReading(some_avg10=9.0, full_avg10=3.0)
    put_psi(own, 4.0, None)
    assert PsiProbe(files).read().memory == PressureReading(some_avg10=9.0, full_avg10=1.0)
    # What other groups suffer is in the host's number; a parent's is not ours.
    own.unlink()
    assert PsiProbe(files).read().memory == PressureReading(some_avg10=9.0, full_avg10=1.0)


def test_a_kernel_without_psi_has_none(files: HostFiles) -> None:
    assert PsiProbe(files).read() == PressureReadings()
    put(files.proc / "pressure/io", "full avg10=1.0\n")
    with pytest.raises(ProbeError, match="form"):
        PsiProbe(files).read()


def test_own_threads_are_not_others(files: HostFiles) -> None:
    machine = Machine(files)
    probe = ProcStatLoadProbe(files, clock=machine.clock)
    probe.read({0, 1}, {ENGINE})
    machine.pass_second(20, 40, 100, own=80)
    assert probe.read({0, 1}, {ENGINE}) == 0.3
    # Thread 901 works on a CPU that is not the executor's: its time hides nothing.
    machine.threads["901"] = (machine.threads["901"][0] + 100, 2)
    machine.pass_second(100, 0, 0)
    assert probe.read({0, 1}, {ENGINE}) == 0.5
    # It comes over: what it used elsewhere is not taken off.
    machine.threads["901"] = (machine.threads["901"][0], 1)
    machine.pass_second(100, 100, 0)
    assert probe.read({0, 1}, {ENGINE}) == 1.0


def test_between_two_looks_the_answer_stands(files: HostFiles) -> None:
    machine = Machine(files)
    probe = ProcStatLoadProbe(files, clock=machine.clock)
    probe.read({0}, set())
    machine.pass_second(100, 0, 0)
    assert probe.read({0}, set()) == 1.0
    machine.clock.now_s += 0.9
    (files.proc / "stat").unlink()
    assert probe.read({0}, set()) == 1.0
    machine.write()
    machine.clock.now_s += 0.1
    assert probe.read({0}, set()) is None  # no tick has passed


def test_cpus_and_processes_that_are_gone(files: HostFiles) -> None:
    machine = Machine(files)
    probe = ProcStatLoadProbe(files, clock=machine.clock)
    probe.read({0, 64}, {4711})
    machine.pass_second(50, 0, 0)
    assert probe.read({0, 64}, {4711}) == 0.5
    assert probe.read({64}, set()) is None
    machine.clock.now_s += 1
    assert probe.read({64}, set()) is None


def test_a_short_line_is_a_fault(files: HostFiles) -> None:
    put(files.proc / "stat", "cpu0 1 2 3 4\n")
    with pytest.raises(ProbeError, match="columns"):
        ProcStatLoadProbe(files).read({0}, set())


def test_the_kernel_that_runs_here() -> None:
    """Files of today, not recorded ones: they are there and have the form that is expected."""
    files, clock = HostFiles(), Clock()
    memory = HostMemoryProbe(files).read()
    assert 0 < memory.mem_available_bytes <= memory.mem_total_bytes
    for one in (PsiProbe(files).read().memory, PsiProbe(files).read().cpu):
        assert one is None or 0 <= one.some_avg10 <= 100
    probe = ProcStatLoadProbe(files, clock=clock)
    cpus = set(allowed_cpus())
    assert probe.read(cpus, {os.getpid()}) is None
    clock.now_s += 1
    busy_until = os.times().user + 0.05
    while os.times().user < busy_until:
        pass
    seen = probe.read(cpus, {os.getpid()})
    assert seen is not None
    assert 0 <= seen <= 1
