"""A GPU through NVIDIA's management library.

The memory is read with the second version of the driver's answer where it has one. Both versions
agree on what is free (neither counts what the driver reserves for itself), but the first counts
the reserve as used, several hundred MiB that would look like another program's. So with the first
version alone what is used is unknown.

Processes come as two lists, of those that compute and those that draw. One that does both is in
both, each time with all its memory: it is counted once. In a foreign PID namespace the lists are
empty or hold pids of another namespace; then our own processes are not in them, and what they hold
is unknown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from freetokend.control.probes.ports import ProbeError
from freetokend.policy.readings import GpuProcess, GpuReading

# Codes of nvmlReturn_t.
_UNINITIALIZED: Final = 1
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_NOT_FOUND: Final = 6
_DRIVER_NOT_LOADED: Final = 9
_LIBRARY_NOT_FOUND: Final = 12
_FUNCTION_NOT_FOUND: Final = 13
_GPU_IS_LOST: Final = 15
_RESET_REQUIRED: Final = 16
_VERSION_MISMATCH: Final = 18
_ARGUMENT_VERSION_MISMATCH: Final = 25

_LOST: Final = frozenset({_GPU_IS_LOST, _RESET_REQUIRED})
# The library has to be set up anew after these.
_OVER: Final = frozenset({_UNINITIALIZED, _NOT_FOUND, _DRIVER_NOT_LOADED, _VERSION_MISMATCH})
# This driver, or this GPU, does not have the quantity: unknown for good, and no fault.
_NOT_THERE: Final = frozenset(
    {_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH}
)
_ADVICE: Final = {
    _DRIVER_NOT_LOADED: "load the kernel module nvidia",
    _VERSION_MISMATCH: "the driver was updated while its kernel module ran: restart the machine",
    _LIBRARY_NOT_FOUND: "there is no libnvidia-ml.so.1: without NVIDIA's driver no GPU is watched",
}
# So many failures on end, and the library is set up anew.
_PATIENCE_COUNT: Final = 8
_FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 60.0
# A quantity that is not available is 2^64 - 1; no GPU has as much as this either.
_UNKNOWN_FROM: Final = 1 << 60

# Bits of the reasons for lower clocks. Idleness (bit 0) is left out: it slows nothing down.
_IDLE: Final = 0x1
_CLOCK_REASONS: Final = {
    0x2: "applications-clocks-setting",
    0x4: "sw-power-cap",
    0x8: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal-slowdown",
    0x40: "hw-thermal-slowdown",
    0x80: "hw-power-brake-slowdown",
    0x100: "display-clock-setting",
    0x200: "board-limit",
    0x400: "reliability",
}


class _CallFailed(Exception):  # noqa: N818 - its name says what happened, not that it is one
    """A call of the library failed: its name, the library's code and words."""

    def __init__(self, call: str, code: int, words: str) -> None:
        super().__init__(f"{call}: {words}" + (f"; {_ADVICE[code]}" if code in _ADVICE else ""))
        self.code = code


@dataclass(frozen=True, slots=True)
class _Card:
    """The chosen GPU of the present session with the library."""

    handle: Any
    chosen: str
    uuid: str
    name: str
    driver_version: str


class NvmlProbe:
    """A `GpuProbe`. Owns the session with the library and the times at which it is tried again.

    After a failure that ends the session, and after eight on end, it is set up anew: a second later
    the first time, then after waits that double up to a minute. The one GPU, once found, stays the
    one that is watched. Not for use by two threads at a time.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        bindings: ModuleType | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bindings`: pynvml, which is imported at the first reading otherwise."""
        self._proc = proc
        self._bindings = bindings
        self._clock = clock
        self._is_open = False
        self._card: _Card | None = None
        self._last_card: _Card | None = None  # also of earlier sessions
        self._failures_count = 0
        self._wait_s = _FIRST_RETRY_S
        self._retry_at_s: float | None = None
        self._standing: GpuReading | ProbeError | None = None
        self._standing_choice = ""

    def read(self, own_pids: Collection[int], device: str = "") -> GpuReading:
        """See `GpuProbe`. Until a failed session may be tried again the failure stands."""
        waits = self._retry_at_s is not None and self._clock() < self._retry_at_s
        if waits and device == self._standing_choice:
            return self._stand()
        try:
            card = self._find(device)
            reading = self._read(card, own_pids)
        except _CallFailed as error:
            return self._failed(error, device)
        self._failures_count, self._wait_s, self._retry_at_s = 0, _FIRST_RETRY_S, None
        return reading

    def close(self) -> None:
        """See `GpuProbe`."""
        self._card = None
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(_CallFailed):
                self._call("nvmlShutdown")

    def _stand(self) -> GpuReading:
        if isinstance(self._standing, GpuReading):
            return self._standing
        assert self._standing is not None
        raise ProbeError(str(self._standing), is_absent=self._standing.is_absent, is_new=False)

    def _failed(self, error: _CallFailed, device: str) -> GpuReading:
        """A reading of a lost GPU; otherwise raises `ProbeError`."""
        self._failures_count += 1
        known = self._last_card
        was_there = known is not None and device in (known.chosen, known.uuid)
        is_lost = error.code in _LOST or (error.code == _NOT_FOUND and was_there)
        ends = is_lost or error.code in _OVER or self._failures_count >= _PATIENCE_COUNT
        fault = ProbeError(str(error), is_absent=error.code == _LIBRARY_NOT_FOUND)
        if ends or not self._is_open:
            self.close()
            wait_s = _LAST_RETRY_S if fault.is_absent else self._wait_s
            self._retry_at_s = self._clock() + wait_s
            self._wait_s = min(2 * self._wait_s, _LAST_RETRY_S)
            self._standing_choice = device
            self._standing = self._lost(device) if is_lost else fault
        if is_lost:
            return self._lost(device)
        raise fault

    def _lost(self, device: str) -> GpuReading:
        known = self._last_card
        return GpuReading(
            uuid=device if known is None else known.uuid,
            name="" if known is None else known.name,
            driver_version="" if known is None else known.driver_version,
            taken_s=self._clock(),
            is_lost=True,
        )

    def _find(self, device: str) -> _Card:
        if not self._is_open:
            self._call("nvmlInit")
            self._is_open = True
        if self._card is None or self._card.chosen != device:
            handle = self._handle(device)
            self._card = self._last_card = _Card(
                handle,
                device,
                uuid=self._call("nvmlDeviceGetUUID", handle),
                name=self._call("nvmlDeviceGetName", handle),
                driver_version=self._call("nvmlSystemGetDriverVersion"),
            )
        return self._card

    def _handle(self, device: str) -> Any:
        if not device and self._last_card is not None and not self._last_card.chosen:
            device = self._last_card.uuid
        if device and not device.isdecimal():
            return self._call("nvmlDeviceGetHandleByUUID", device)
        count = self._call("nvmlDeviceGetCount")
        if not device and count > 1:
            raise _CallFailed(
                "nvmlDeviceGetCount",
                _NOT_FOUND,
                f"there are {count} GPUs: set control.gpu to the UUID or the index of the one to "
                "watch",
            )
        index = int(device or "0")
        if index >= count:
            which = f"no GPU {index}, it has {count}" if count else "no GPU"
            raise _CallFailed("nvmlDeviceGetCount", _NOT_FOUND, f"the driver knows {which}")
        return self._call("nvmlDeviceGetHandleByIndex", index)

    def _read(self, card: _Card, own_pids: Collection[int]) -> GpuReading:
        handle = card.handle
        total_bytes, free_bytes, used_bytes = self._memory(handle)
        processes = self._processes(handle)
        reasons = self._optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuReading(
            uuid=card.uuid,
            name=card.name,
            taken_s=self._clock(),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            used_bytes=used_bytes,
            own_bytes=_own_bytes(processes, own_pids),
            processes=processes,
            link_generation=self._optional("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            link_generation_max=self._optional("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            link_width=self._optional("nvmlDeviceGetCurrPcieLinkWidth", handle),
            link_width_max=self._optional("nvmlDeviceGetMaxPcieLinkWidth", handle),
            throttle_reasons=_reason_names(reasons or 0),
            driver_version=card.driver_version,
        )

    def _memory(self, handle: Any) -> tuple[int | None, int | None, int | None]:
        """Total, free, used."""
        assert self._bindings is not None
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle, self._bindings.nvmlMemory_v2)
        if memory is not None:
            return _known(memory.total), _known(memory.free), _known(memory.used)
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle)
        if memory is None:
            return None, None, None
        return _known(memory.total), _known(memory.free), None

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:
        """Those that compute and those that draw, each once, with most memory first."""
        lists = [
            self._optional(f"nvmlDeviceGet{kind}RunningProcesses", handle)
            for kind in ("Compute", "Graphics")
        ]
        if all(found is None for found in lists):
            return None
        held: dict[int, int | None] = {}
        for found in (process for some in lists for process in some or ()):
            used_bytes, before = _known(found.usedGpuMemory), held.get(found.pid)
            known = [value for value in (used_bytes, before) if value is not None]
            held[found.pid] = max(known, default=None)
        united = (
            GpuProcess(pid=pid, name=self._name(pid), used_bytes=used_bytes)
            for pid, used_bytes in held.items()
        )
        return tuple(sorted(united, key=lambda one: (-(one.used_bytes or 0), one.pid)))

    def _name(self, pid: int) -> str | None:
        try:
            return (self._proc / str(pid) / "comm").read_text(errors="replace").strip()
        except OSError:
            return None

    def _optional(self, call: str, *arguments: Any) -> Any:
        """What the call returns, or None where this driver or GPU has no such thing."""
        try:
            return self._call(call, *arguments)
        except _CallFailed as error:
            if error.code in _NOT_THERE:
                return None
            raise

    def _call(self, call: str, *arguments: Any) -> Any:
        if self._bindings is None:
            import pynvml  # noqa: PLC0415 - large, and only where there is a GPU to watch

            self._bindings = pynvml
        try:
            return getattr(self._bindings, call)(*arguments)
        except self._bindings.NVMLError as error:
            raise _CallFailed(call, int(error.value), str(error)) from error
        except self._bindings.NVMLLibraryMismatchError as error:
            raise _CallFailed(call, _FUNCTION_NOT_FOUND, str(error)) from error


def _known(number: int | None) -> int | None:
    return None if number is None or number >= _UNKNOWN_FROM else int(number)


def _own_bytes(processes: tuple[GpuProcess, ...] | None, own_pids: Collection[int]) -> int | None:
    """What `own_pids` hold. Nobody holds nothing; one that is not listed is not known to."""
    if not own_pids:
        return 0
    held = [one.used_bytes for one in processes or () if one.pid in own_pids]
    known = [used_bytes for used_bytes in held if used_bytes is not None]
    return sum(known) if known and len(known) == len(held) else None


def _reason_names(bits: int) -> tuple[str, ...]:
    rest = bits & ~_IDLE
    names = [name for bit, name in _CLOCK_REASONS.items() if rest & bit]
    unnamed = rest & ~sum(_CLOCK_REASONS)
    return tuple(sorted([*names, *([f"reason-{unnamed:#x}"] if unnamed else [])]))
