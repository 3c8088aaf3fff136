"""How fills and the CPU share the misses: measured rates, the table made of them, whole steps."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Final, cast

import torch

from freetokend.device.host_arena import HostArena
from freetokend.enginehost.cuda_profile import SlotProfile
from freetokend.experts.gpu.transfers import torch_transfers
from freetokend.experts.host_rates import BURST_COUNT, measure_host_rates
from freetokend.experts.plan.contract import Stat
from freetokend.policy.fill_table import LATER_RATIO, FillRates, fill_table, split_s
from tests.gpu.bench import BUCKETS, Bench
from tests.gpu.judge import LOGITS_ERROR, Judge
from tests.gpu.rows import GPU, Row, not_run

if TYPE_CHECKING:
    from freetokend.enginehost.cuda_platform import CudaPlatform

SHARES: Final = (0.37, 0.11)
_BUDGET_S: Final = 0.5
# Beside fills whose rate is known in another way: on a GPU they are timed by hand; on the host
# their link is given a rate, so low that a burst outlasts what other programs do on these cores.
RATE_RATIO: Final = 2.0
HOST_LINK_BYTES_PER_S: Final = 5e7
BESIDE_RATIO: Final = 1.1
# Two medians of the same steps differ by about as much.
_NOISE_RATIO: Final = 1.02
_TIMES: Final = 10


def measured_rates(bench: Bench, link_bytes_per_s: float | None = None) -> FillRates:
    """As an engine measures them when it starts; slots hold nothing before and after.
    link_bytes_per_s: of the host device's link; None for as fast as memory."""
    if bench.kind.driver is None:
        arena = HostArena(BURST_COUNT * bench.facts.record_bytes)
        return measure_host_rates(
            bench.bank.mapped,
            bench.executor,
            arena,
            rate_bytes_per_s=link_bytes_per_s,
            budget_s=_BUDGET_S,
        ).rates
    bench.pool.resize(0)
    bench.pool.resize(BURST_COUNT)
    # What a profile needs of a platform is in a bench's kind.
    platform = cast("CudaPlatform", bench.kind)
    layers_count = bench.shape.layers
    profile = SlotProfile(
        bench.bank.mapped, bench.pool, platform, bench.slot_ops(), layers_count=layers_count
    )
    profile.check_fills()
    transfers = torch_transfers(bench.kind.driver)
    try:
        found = profile.measured(bench.executor, transfers)
    finally:
        bench.kind.synchronize()
        transfers.close()
        bench.pool.resize(0)
    assert found is not None
    return found.rates


def contended(bench: Bench) -> list[Row]:
    """Fills and the CPU, each alone and while the other runs; and the table made of that."""
    known = HOST_LINK_BYTES_PER_S if bench.kind.driver is None else _fill_bytes_per_s(bench)
    rates = measured_rates(bench, HOST_LINK_BYTES_PER_S)
    return [rates_row(rates, known), table_row(rates, bench.shape.experts)]


def rates_row(rates: FillRates, known_bytes_per_s: float) -> Row:
    """known_bytes_per_s: of fills alone, known in another way."""
    fill, fill_alone = rates.fill_bytes_per_s, rates.fill_alone_bytes_per_s
    cpu, cpu_alone = rates.cpu_bytes_per_s, rates.cpu_alone_bytes_per_s
    told = [f"{one / 1e9:.2f}" for one in (fill_alone, fill, cpu_alone, cpu)]
    sound = all(math.isfinite(one) and one > 0 for one in (fill, fill_alone, cpu, cpu_alone))
    return Row(
        check="rates of fills and of the CPU, each alone and beside the other",
        measured="fills {} and {}, the CPU {} and {} GB/s; ".format(*told)
        + f"fills otherwise {known_bytes_per_s / 1e9:.2f}",
        gate=f"all above 0, beside <= {BESIDE_RATIO} times alone, fills alone within "
        f"{RATE_RATIO:g} times what they are otherwise",
        passed=sound
        and fill <= BESIDE_RATIO * fill_alone
        and cpu <= BESIDE_RATIO * cpu_alone
        and fill_alone <= RATE_RATIO * known_bytes_per_s
        and known_bytes_per_s <= RATE_RATIO * fill_alone,
    )


def table_row(rates: FillRates, misses_capacity: int) -> Row:
    """Every entry beside all splits there are: what the table promises for these rates."""
    table = fill_table(rates, misses_capacity)
    wrong, steps_back = 0, 0
    for bucket, row in enumerate(table):
        before_s = 0.0
        for misses, fills in enumerate(row):
            if not misses:
                wrong += fills != 0
                continue
            costs_s = [
                split_s(rates, bucket=bucket, misses_count=misses, fills_count=one)
                for one in range(1, misses + 1)
            ]
            if not 1 <= fills <= misses or costs_s[fills - 1] > LATER_RATIO * 1.001 * min(costs_s):
                wrong += 1
            steps_back += min(costs_s) * LATER_RATIO < before_s
            before_s = min(costs_s)
    shown = sorted({1, min(8, misses_capacity), misses_capacity // 4, misses_capacity})
    fills_shown = ", ".join(f"{table[0][one]} of {one}" for one in shown)
    return Row(
        check="the table of fills made of these rates",
        measured=f"fills {fills_shown}; {wrong} entries are not within {LATER_RATIO} of the best, "
        f"{steps_back} times more misses cost less",
        gate="0, 0, and a row for every bucket",
        passed=not wrong and not steps_back and len(table) == BUCKETS,
    )


def split_by_table(bench: Bench, judge: Judge) -> list[Row]:
    """Steps whose misses are split as an engine would split them here."""
    rates = measured_rates(bench)
    table = fill_table(rates, bench.shape.experts)
    rows = []
    for share in SHARES:
        bench.pool.resize(bench.slots_of(share))
        bench.split_by(table)
        bench.dispatch.totals.zero_()
        error = judge.error_now(bench)
        totals = bench.dispatch.totals.sum(0).tolist()
        rows.append(
            Row(
                check=f"logits with the measured table, {share:.0%} of the experts in slots",
                measured=f"{error:.1e}, {totals[Stat.FILLS]} fills, {totals[Stat.CPU]} on the CPU",
                gate=f"<= {LOGITS_ERROR:.0e}, and fills happened",
                passed=error <= LOGITS_ERROR and totals[Stat.FILLS] > 0,
            )
        )
    bench.split_misses(1.0)
    return rows


def branches(bench: Bench) -> list[Row]:
    """Replayed steps with all, none and parts of the misses filled, and with the measured table;
    on a GPU alone, because the host device computes both branches with the same cores."""
    check = "a step with both branches"
    if bench.kind.driver is None:
        why = "the host device computes both branches with the same cores"
        return [not_run(check, GPU, why)]
    table = fill_table(measured_rates(bench), bench.shape.experts)
    rows = []
    for share in SHARES:
        bench.pool.resize(bench.slots_of(share))
        timed = {}
        for part in (0.0, 0.25, 0.5, 0.75, 1.0):
            bench.split_misses(part)
            timed[part] = _step_s(bench)
        bench.split_by(table)
        rows += branch_rows(f"{check}, {share:.0%} of the experts in slots", timed, _step_s(bench))
    bench.split_misses(1.0)
    return rows


def branch_rows(check: str, timed: dict[float, float], table_s: float) -> list[Row]:
    """timed: seconds by the part that is filled, 0 and 1 among them; table_s: with the table."""
    single = min(timed[0.0], timed[1.0])
    both = min(seconds for part, seconds in timed.items() if 0 < part < 1)
    return [
        Row(
            check=check,
            measured=", ".join(f"{at:.0%}: {s * 1e6:.0f} us" for at, s in timed.items()),
            gate="the best split no slower than the better branch alone",
            passed=both <= single,
        ),
        Row(
            check=f"{check}, split by the measured table",
            measured=f"{table_s * 1e6:.0f} us, the better branch alone {single * 1e6:.0f} us",
            gate=f"<= {_NOISE_RATIO} times the better branch alone",
            passed=table_s <= _NOISE_RATIO * single,
        ),
    ]


def _step_s(bench: Bench) -> float:
    """The median step with the misses split as they are now."""
    pages = bench.pages()
    graphed = bench.graphed(bench.program(), pages)
    times_s = []
    for at in range(24):
        began_s = time.perf_counter()
        bench.run(graphed, pages, at)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s[4:])


def _fill_bytes_per_s(bench: Bench) -> float:
    """Of the fastest fill of as many records as are measured with, one list after the other."""
    count = min(BURST_COUNT, bench.facts.experts_count)
    bench.pool.resize(count)
    numbers = torch.arange(count, dtype=torch.int32)
    fills = torch.stack((numbers, numbers), dim=1).to(bench.kind.device)
    fills_count = torch.full((1,), count, dtype=torch.int32, device=bench.kind.device)
    best_s = float("inf")
    for _ in range(_TIMES):
        bench.kind.synchronize()
        began_s = time.perf_counter()
        bench.fill(fills, fills_count)
        bench.kind.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    bench.pool.resize(0)
    return count * bench.facts.record_bytes / best_s
