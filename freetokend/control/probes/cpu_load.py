"""How much other programs use the CPUs of the executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freetokend.control.probes.ports import ProbeError
from freetokend.core.host_facts import HostFiles

# The kernel counts in ticks of 10 ms: over a shorter time the share would be too coarse.
_LEAST_SPAN_S: Final = 1.0
# Columns of a CPU's line in /proc/stat: what is neither idle nor waiting is somebody's. The guests'
# columns are left out, their time is in user and nice already.
_IDLE_COLUMNS: Final = (3, 4)
_COLUMNS_COUNT: Final = 8
# Columns of a task's stat behind its name.
_USER, _SYSTEM, _PROCESSOR = 11, 12, 36


@dataclass(frozen=True, slots=True)
class _Look:
    """Ticks since the machine's start. `own`: of each of our threads, by its id."""

    at_s: float
    cpus: frozenset[int]
    busy_ticks: int
    all_ticks: int
    own: dict[str, int]


class ProcStatLoadProbe:
    """A `CpuLoadProbe` from /proc/stat, less what our own threads used on those CPUs.

    A thread's time counts for the CPU that it ran on last, which for pinned ones is exact. Owns the
    last look; between two looks, at least a second apart, the last answer stands.
    """

    def __init__(self, files: HostFiles, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._last: _Look | None = None
        self._load: float | None = None

    def read(self, cpus: Collection[int], own_pids: Collection[int]) -> float | None:
        """See `CpuLoadProbe`."""
        wanted = frozenset(cpus)
        last = self._last
        if last is not None and last.cpus == wanted and self._clock() - last.at_s < _LEAST_SPAN_S:
            return self._load
        self._last, self._load = None, None
        now = self._look(wanted, own_pids)
        if last is not None and last.cpus == wanted:
            self._load = _share(last, now)
        self._last = now
        return self._load

    def _look(self, cpus: frozenset[int], own_pids: Collection[int]) -> _Look:
        at_s = self._clock()
        busy = total = 0
        for ticks in self._lines(cpus):
            total += sum(ticks)
            busy += sum(ticks) - sum(ticks[column] for column in _IDLE_COLUMNS)
        own: dict[str, int] = {}
        for pid in own_pids:
            own |= self._threads(pid, cpus)
        return _Look(at_s, cpus, busy, total, own)

    def _lines(self, cpus: frozenset[int]) -> list[list[int]]:
        """The ticks of those of `cpus` that are there."""
        path = self._files.proc / "stat"
        found = []
        try:
            for line in path.read_text().splitlines():
                name, *columns = line.split()
                if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cpus:
                    found.append([int(column) for column in columns[:_COLUMNS_COUNT]])
        except (OSError, ValueError) as error:
            raise ProbeError(f"{path} cannot be read: {error}") from error
        if any(len(ticks) < _COLUMNS_COUNT for ticks in found):
            raise ProbeError(f"{path} has fewer columns than a kernel of today writes")
        return found

    def _threads(self, pid: int, cpus: frozenset[int]) -> dict[str, int]:
        """Ticks of the process's threads on `cpus`; none of one that has ended."""
        try:
            tasks = list((self._files.proc / str(pid) / "task").iterdir())
        except OSError:
            return {}
        ticks = {}
        for task in tasks:
            fields = _stat_fields(task / "stat")
            if len(fields) > _PROCESSOR and int(fields[_PROCESSOR]) in cpus:
                ticks[task.name] = int(fields[_USER]) + int(fields[_SYSTEM])
        return ticks


def _stat_fields(path: Path) -> list[str]:
    """What stands behind the name, which may itself hold spaces and parentheses."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _share(last: _Look, now: _Look) -> float | None:
    all_ticks = now.all_ticks - last.all_ticks
    if all_ticks <= 0:
        return None
    # A thread that was not here at the last look is left out this once: what it used elsewhere
    # before must not count.
    own = sum(max(0, ticks - last.own.get(thread, ticks)) for thread, ticks in now.own.items())
    others = now.busy_ticks - last.busy_ticks - own
    return min(1.0, max(0.0, others / all_ticks))
