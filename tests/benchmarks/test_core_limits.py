"""What `core_limits` calculates from rates, and that its loops do what they are timed for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.core_limits import (
    ARRIVAL,
    FROM_CACHE,
    FROM_MEMORY,
    KernelCase,
    core_rows,
    parser,
    steady_rate,
    table,
)
from benchmarks.core_sides import (
    CLOCK,
    FMA,
    STREAMS,
    WIDTH,
    Core,
    Weights,
    cache_bytes,
    stream_name,
)
from benchmarks.memory import CeilingSide, HugeMemory
from benchmarks.rounds import Burst, Outcome
from freetokend.ftw.formats import parse_format
from freetokend.native.executor import Executor, available_isas

GHZ = 1e9
ROUNDS = 7


def outcome(rates: dict[str, float], *, busy: bool = False) -> Outcome:
    """Equal rounds of a machine with these rates."""
    names = (*rates, CeilingSide.name)
    bursts = tuple(Burst(rate=rate, cpu_share=1.0) for rate in (*rates.values(), 20e9))
    return Outcome(names=names, rounds=(bursts,) * ROUNDS, void_count=0, busy=busy)


def kernel_outcome(cached: float, cold: float, *, busy: bool = False) -> Outcome:
    rates = {CLOCK: 3 * GHZ, WIDTH: 9 * GHZ, FROM_CACHE: cached, FROM_MEMORY: cold}
    return outcome(rates, busy=busy)


def case(name: str, bytes_per_64: float) -> KernelCase:
    return KernelCase(weight_format=parse_format(name), numerics="exact", bytes_per_64=bytes_per_64)


def test_cycles_are_time_by_the_clock() -> None:
    # 64 weights in 9 cycles of 3 GHz; their 36 bytes arrive in 6 at 18 GB/s, in 12 at 9.
    memory, width, kernel, slower = case("int4_g32_f16", 36).rows(
        kernel_outcome(64 / 9 * 3 * GHZ, 64 / 12 * 3 * GHZ), [18e9, 9e9], 2 << 20
    )
    assert kernel.ours == pytest.approx(9)
    assert kernel.rival == f"{ARRIVAL} 18.0 GB/s"
    assert kernel.rival_value == pytest.approx(6)
    assert kernel.ratio == pytest.approx(6 / 9)
    assert (kernel.goal, kernel.verdict, kernel.rounds_count) == (0.65, "reachable", ROUNDS)
    assert slower.ratio == 1.0  # such memory is slower than the kernel
    assert memory.ours == pytest.approx(12)
    assert memory.ratio == pytest.approx(9 / 12)
    assert width.ours == pytest.approx(3)


@pytest.mark.parametrize(("busy", "verdict"), [(False, "out of reach"), (True, "machine busy")])
def test_a_slow_kernel_cannot_reach_its_goal(busy: bool, verdict: str) -> None:
    slow = kernel_outcome(64 / 12 * 3 * GHZ, 10 * GHZ, busy=busy)
    rows = case("nvfp4", 36).rows(slow, [15e9], 2 << 20)
    assert rows[-1].verdict == verdict
    line = table(rows, [30e9]).splitlines()[-1]
    assert line == "| nvfp4 exact | 0.68 | 3.0 | 19.2 | 12.0 | 7.2 | 0.60 (0.60..0.60) |"


def test_rows_of_the_core() -> None:
    rates = {CLOCK: 3 * GHZ, WIDTH: 10.5 * GHZ, FMA: 6 * GHZ}
    streams = {stream_name(count): 5e9 + count * 5e9 for count in STREAMS}
    rows = {row.case: row for row in core_rows(outcome({**rates, **streams}), 10e9)}
    assert rows["clock"].ours == pytest.approx(3)
    assert rows[WIDTH].ours == pytest.approx(3.5)
    assert rows[FMA].ours == pytest.approx(2)
    assert [rows[stream_name(count)].ratio for count in STREAMS] == pytest.approx([1, 1.5, 2.5])


def test_disturbed_ceilings_do_not_count() -> None:
    assert steady_rate([30.0, 29.0, 28.0, 20.0, 3.0]) == 29.0


def test_command_line() -> None:
    options = parser().parse_args(["--quick", "--formats", "mxfp4,bf16", "--numerics", "fast"])
    assert [str(one) for one in options.formats] == ["mxfp4", "bf16"]
    assert options.numerics == "fast"
    options = parser().parse_args(["--formats", "none", "--ceilings", "20,27.5"])
    assert (options.formats, options.ceilings) == ([], [20.0, 27.5])
    with pytest.raises(SystemExit):
        parser().parse_args(["--ceilings", "0"])


def test_sizes_of_caches(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [
            (1, "Data", "32K"),
            (1, "Instruction", "64K"),
            (2, "Unified", "512K"),
            (3, "Unified", "8M"),
        ]
    ):
        directory = tmp_path / f"index{index}"
        directory.mkdir()
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (directory / name).write_text(f"{text}\n", encoding="ascii")
    assert [cache_bytes(level, tmp_path) for level in (1, 2, 0)] == [32 << 10, 512 << 10, 8 << 20]
    with pytest.raises(ValueError, match="level 4"):
        cache_bytes(4, tmp_path)


@pytest.mark.skipif(
    shutil.which("gcc") is None or "avx2" not in available_isas(),
    reason="needs gcc and AVX2",
)
def test_loops_compute_what_they_say() -> None:
    core = Core()
    memory = HugeMemory(32 << 20)
    sides = [core.additions(CLOCK), core.additions(WIDTH), core.fma()]
    sides += [core.reads(memory, count) for count in STREAMS]
    for side in sides:
        assert side.burst(0.001).rate > 0  # wrong sums raise
    memory.array[12345] = 2
    with pytest.raises(RuntimeError, match="2 streams"):
        core.reads(memory, 2).burst(0.001)


@pytest.mark.parametrize("name", ["int4_g32_f16", "nvfp4"])
def test_products_are_checked(name: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:1]
    weights = Weights(parse_format(name), "exact")
    assert weights.bytes_per_64 == 36
    memory = HugeMemory(16 << 20)
    with Executor(cpus) as executor:
        for side in (
            weights.in_cache(executor, 256 << 10, FROM_CACHE),
            weights.in_memory(executor, memory, FROM_MEMORY),
        ):
            assert side.burst(0.001).cpu_share > 0
