"""What is measured of a machine in slices: memory, the executor, fills, both at once, the disk.

With the deployed experts and the real kernels. Beside what serves it takes room for a few records
and for one piece of a file; nothing that is served with is touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from freetokend.device.copier import HostCopier
from freetokend.device.host_arena import HostArena
from freetokend.enginehost.bandwidth_control import (
    SLICE_S,
    BandwidthParts,
    NotMeasurableError,
    Slices,
)
from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.experts.fill import FillLink
from freetokend.experts.host_rates import cost_line
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.reader import FtwDirectory
from freetokend.native.executor import Executor, Numerics
from freetokend.policy.bandwidth_profile import Figure, FigureName

# Records of a burst, and bursts of a figure, which is their median.
BURST_COUNT: Final = 8
BURSTS_COUNT: Final = 7
# What a burst may read: some ms of one slow core.
_BURST_BYTES: Final = 48 << 20
_READ_BYTES: Final = 8 << 20
_DISK_BYTES: Final = 2 << 20
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """What is measured. region_bytes: of the pool, at the bank's region; link_bytes_per_s: that
    fills stand for, None for as fast as memory; fills: whether a fill is a copy within memory."""

    mapped: MappedBank
    region_bytes: int
    cpus: tuple[int, ...]
    numerics: Numerics
    link_bytes_per_s: float | None
    fills: bool
    file: Path | None


def machine_of(
    directory: FtwDirectory,
    region_address: int,
    cpus: tuple[int, ...],
    *,
    numerics: Numerics,
    link_bytes_per_s: float | None,
    fills: bool,
) -> MeasuredMachine:
    """Of an engine that serves this directory."""
    index = directory.index
    return MeasuredMachine(
        mapped=MappedBank(bank=index.expert_bank, region_address=region_address),
        region_bytes=index.region_bytes,
        cpus=cpus,
        numerics=numerics,
        link_bytes_per_s=link_bytes_per_s,
        fills=fills,
        file=max(directory.shard_paths(), key=lambda path: path.stat().st_size, default=None),
    )


def bandwidth_parts(machine: MeasuredMachine) -> BandwidthParts:
    """By name. Without experts there are only memory and disk."""
    parts: dict[str, Callable[[], Slices]] = {"memory": partial(_memory, machine)}
    if machine.mapped.bank.experts_count:
        parts["cpu"] = partial(_cpu, machine)
        if machine.fills:
            parts["fill"] = partial(_fill, machine)
            parts["pair"] = partial(_pair, machine)
    if machine.file is not None:
        parts["disk"] = partial(_disk, machine.file)
    return BandwidthParts(parts=parts)


def _memory(machine: MeasuredMachine) -> Slices:
    """The pool read by as many threads as the executor has, each its own piece at a time."""
    threads_count = len(machine.cpus)
    piece_bytes = min(_READ_BYTES, machine.region_bytes // threads_count) & ~7
    if piece_bytes < _PAGE_BYTES:
        raise NotMeasurableError(f"the pool has only {machine.region_bytes} bytes")
    memory = (ctypes.c_uint8 * machine.region_bytes).from_address(machine.mapped.region_address)
    pool = np.ctypeslib.as_array(memory).view(np.uint8)
    pieces_count = machine.region_bytes // piece_bytes

    def read(index: int) -> int:
        first = index % pieces_count * piece_bytes
        return int(pool[first : first + piece_bytes].view(np.uint64).max())

    rates = []
    with ThreadPoolExecutor(threads_count) as threads:
        for burst in range(BURSTS_COUNT):
            began_s = time.perf_counter()
            list(threads.map(read, range(burst * threads_count, (burst + 1) * threads_count)))
            rates.append(threads_count * piece_bytes / (time.perf_counter() - began_s))
            yield None
    yield Figure(
        name=FigureName.HOST_READ, value=statistics.median(rates), threads_count=threads_count
    )


class _Experts:
    """Neighbouring experts of the pool in turn, so that most are not in a CPU's cache."""

    def __init__(self, machine: MeasuredMachine, executor: Executor) -> None:
        self._bank = machine.mapped.bank
        self._dispatch = CpuExpertDispatch(executor, machine.mapped, numerics=machine.numerics)
        self._next = 0

    def execute(self, count: int) -> float:
        """Seconds of one token through so many experts of a layer."""
        layer, first = self._place(count)
        x = torch.ones((1, self._bank.hidden_size), dtype=torch.bfloat16)
        ids = torch.arange(first, first + count, dtype=torch.int32).view(1, count)
        weights = torch.full((1, count), 1.0 / count)
        began_s = time.perf_counter()
        self._dispatch.dispatch(layer, x, ids, weights)
        return time.perf_counter() - began_s

    def fills(self, count: int) -> torch.Tensor:
        """A list that copies so many into the first slots."""
        layer, first = self._place(count)
        base = self._bank.expert_id(layer, first)
        return torch.tensor([(base + i, i) for i in range(count)], dtype=torch.int32)

    def _place(self, count: int) -> tuple[int, int]:
        per_layer = self._bank.experts_per_layer_count
        if self._next % per_layer + count > per_layer:
            self._next += per_layer - self._next % per_layer
        start = self._next % self._bank.experts_count
        self._next += count
        return start // per_layer, start % per_layer


def _burst_count(machine: MeasuredMachine, bytes_per_s: float | None = None) -> int:
    bank = machine.mapped.bank
    most_bytes = _BURST_BYTES
    if bytes_per_s is not None:
        most_bytes = min(most_bytes, int(bytes_per_s * SLICE_S / 2))
    most = min(BURST_COUNT, bank.experts_per_layer_count)
    return max(min(most, most_bytes // bank.record_bytes), 1)


def _medians(run: Callable[[int], float], count: int) -> Iterator[tuple[float, float] | None]:
    """The times of one and of so many, at last; each burst is a slice."""
    ones, bursts = [], []
    for _ in range(BURSTS_COUNT):
        ones.append(run(1))
        yield None
        bursts.append(run(count))
        yield None
    yield statistics.median(ones), statistics.median(bursts)


def _cpu(machine: MeasuredMachine) -> Slices:
    """The executor by its number of threads: 1, 2, 4, ... and all."""
    count, record_bytes = _burst_count(machine), machine.mapped.bank.record_bytes
    all_count = len(machine.cpus)
    steps = {1 << power for power in range(all_count.bit_length())} | {all_count}
    for threads_count in sorted(one for one in steps if one <= all_count):
        with Executor(machine.cpus[:threads_count]) as executor:
            experts = _Experts(machine, executor)
            experts.execute(1)
            yield None
            for times in _medians(experts.execute, count):
                if times is None:
                    yield None
                    continue
                fixed_s, rate = cost_line(*times, count, record_bytes)
                yield Figure(name=FigureName.CPU, value=rate, threads_count=threads_count)
                yield Figure(name=FigureName.CPU_FIXED, value=fixed_s, threads_count=threads_count)


class _Fills:
    """Fills into slots of their own, over a link like the one that serves."""

    def __init__(self, machine: MeasuredMachine, undo: ExitStack) -> None:
        bank = machine.mapped.bank
        self.count: Final = _burst_count(machine, machine.link_bytes_per_s)
        pool = SlotPool(
            HostArena(self.count * bank.record_bytes),
            HostCopier(),
            record_bytes=bank.record_bytes,
            experts_count=bank.experts_count,
            slots_capacity=self.count,
        )
        undo.callback(pool.close)
        pool.resize(self.count)
        self.link = FillLink(machine.mapped, pool, rate_bytes_per_s=machine.link_bytes_per_s)
        undo.callback(self.link.close)
        self.executor: Final = undo.enter_context(Executor(machine.cpus))
        self.experts: Final = _Experts(machine, self.executor)

    def fill(self, count: int) -> float:
        fills = self.experts.fills(count)
        began_s = time.perf_counter()
        self.link.wait(self.link.submit(fills, count))
        return time.perf_counter() - began_s

    def both(self) -> tuple[float, float]:
        """Seconds of a burst of fills, and of one expert of the CPU while it goes on."""
        fills = self.experts.fills(self.count)
        began_s = time.perf_counter()
        ticket = self.link.submit(fills, self.count)
        cpu_s = [self.experts.execute(1)]
        while not self.link.is_done(ticket) and time.perf_counter() - began_s < SLICE_S / 2:
            cpu_s.append(self.experts.execute(1))
        self.link.wait(ticket)
        return time.perf_counter() - began_s, statistics.median(cpu_s)


def _fill(machine: MeasuredMachine) -> Slices:
    record_bytes = machine.mapped.bank.record_bytes
    with ExitStack() as undo:
        fills = _Fills(machine, undo)
        fills.fill(1)
        yield None
        for times in _medians(fills.fill, fills.count):
            if times is None:
                yield None
                continue
            fixed_s, rate = cost_line(*times, fills.count, record_bytes)
            yield Figure(name=FigureName.FILL, value=rate)
            yield Figure(name=FigureName.FILL_FIXED, value=fixed_s)


def _pair(machine: MeasuredMachine) -> Slices:
    """Each while the other runs."""
    record_bytes = machine.mapped.bank.record_bytes
    with ExitStack() as undo:
        fills = _Fills(machine, undo)
        pairs = []
        for _ in range(BURSTS_COUNT):
            pairs.append(fills.both())
            yield None
        fill_s, cpu_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        yield Figure(name=FigureName.FILL_BESIDE, value=fills.count * record_bytes / fill_s)
        yield Figure(
            name=FigureName.CPU_BESIDE,
            value=record_bytes / cpu_s,
            threads_count=len(machine.cpus),
        )


def _disk(file: Path) -> Slices:
    """Pieces of the model's file all over it, past the page cache."""
    size_bytes = file.stat().st_size
    if size_bytes < _DISK_BYTES:
        raise NotMeasurableError(f"{file.name} has only {size_bytes} bytes")
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        raise NotMeasurableError(f"{file.name} cannot be read directly: {error.strerror}") from None
    rates = []
    try:
        with mmap.mmap(-1, _DISK_BYTES) as buffer:
            stride = (size_bytes - _DISK_BYTES) // BURSTS_COUNT // _PAGE_BYTES * _PAGE_BYTES
            for burst in range(BURSTS_COUNT):
                began_s = time.perf_counter()
                read_bytes = os.preadv(descriptor, [buffer], burst * stride)
                rates.append(read_bytes / (time.perf_counter() - began_s))
                yield None
    except OSError as error:
        raise NotMeasurableError(f"{file.name} cannot be read directly: {error.strerror}") from None
    finally:
        os.close(descriptor)
    yield Figure(name=FigureName.DISK_READ, value=statistics.median(rates))
