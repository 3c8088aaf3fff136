"""An arena in ordinary memory, for the device that stands for a GPU where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable

from freetokend.core.errors import InternalError, Reason, ResourceError
from freetokend.core.host_facts import HostFiles, read_host_memory
from freetokend.device.arena import ArenaError, checked_length, rounded_up
from freetokend.native import _host
from freetokend.native.host import HUGE_PAGE_BYTES, mapping_pages


def host_available_bytes() -> int:
    """What the machine and the control groups would still give this process.

    Raises `ResourceError` when the kernel does not tell.
    """
    memory = read_host_memory(HostFiles())
    if memory.cgroup_available_bytes is None:
        return memory.mem_available_bytes
    return min(memory.mem_available_bytes, memory.cgroup_available_bytes)


class HostArena:
    """An `Arena` of anonymous memory in huge pages where the kernel has them.

    limit_bytes: the memory of the device it stands for, None for what the machine has;
    available_bytes: read just before each growth. Committed memory is populated at once, so that
    it is missing here and not in the middle of a step.
    """

    def __init__(
        self,
        reserved_bytes: int,
        *,
        limit_bytes: int | None = None,
        available_bytes: Callable[[], int] = host_available_bytes,
    ) -> None:
        """Raises `ResourceError` when not even the address space can be had."""
        if reserved_bytes < 0:
            raise InternalError(f"an arena cannot reserve {reserved_bytes} bytes")
        self._reserved_bytes = max(rounded_up(reserved_bytes, HUGE_PAGE_BYTES), HUGE_PAGE_BYTES)
        self._limit_bytes = limit_bytes
        self._available_bytes = available_bytes
        self._committed_bytes = 0
        try:
            self._space = _host.Reservation(self._reserved_bytes)
        except OSError as error:
            raise ResourceError(
                f"{self._reserved_bytes} bytes of address space were refused: {_told(error)}. "
                "Raise the limit on address space (ulimit -v), or ask for fewer slots.",
                reason=Reason.HOST_MEMORY,
            ) from error
        self._base_address = self._space.address

    @property
    def base_address(self) -> int:
        """Address of the first byte, aligned to 2 MiB."""
        return self._base_address

    @property
    def reserved_bytes(self) -> int:
        """Length of the address space."""
        return self._reserved_bytes

    @property
    def granularity_bytes(self) -> int:
        """A huge page."""
        return HUGE_PAGE_BYTES

    @property
    def committed_bytes(self) -> int:
        """Bytes that can be used."""
        return self._committed_bytes

    def claimed_bytes(self) -> int:
        """Resident bytes of the reserved range in /proc/self/smaps (milliseconds)."""
        if self._base_address == 0:
            return 0
        return mapping_pages(self._base_address, self._reserved_bytes).resident_bytes

    def grow_to(self, length_bytes: int) -> None:
        """See `Arena.grow_to`."""
        wanted_bytes = checked_length(length_bytes, HUGE_PAGE_BYTES, self._reserved_bytes)
        missing_bytes = wanted_bytes - self._committed_bytes
        if missing_bytes <= 0:
            return
        available_bytes = self._available_now_bytes()
        if missing_bytes > available_bytes:
            raise ArenaError(
                f"the host device was asked for {missing_bytes} more bytes and has "
                f"{available_bytes}; it keeps its {self._committed_bytes}. Ask for fewer slots, or "
                "free memory.",
                asked_bytes=missing_bytes,
                available_bytes=available_bytes,
            )
        try:
            self._space.commit(self._committed_bytes, missing_bytes)
        except OSError as error:
            raise ArenaError(
                f"the kernel refused the host device {missing_bytes} more bytes: {_told(error)}; "
                f"it keeps its {self._committed_bytes}. Ask for fewer slots, or raise the limit "
                "on the process's memory.",
                asked_bytes=missing_bytes,
                available_bytes=available_bytes,
            ) from error
        self._committed_bytes = wanted_bytes

    def shrink_to(self, length_bytes: int) -> None:
        """See `Arena.shrink_to`."""
        wanted_bytes = checked_length(length_bytes, HUGE_PAGE_BYTES, self._reserved_bytes)
        if wanted_bytes >= self._committed_bytes:
            return
        try:
            self._space.release(wanted_bytes, self._committed_bytes - wanted_bytes)
        except OSError as error:
            raise ResourceError(
                f"the kernel did not take {self._committed_bytes - wanted_bytes} bytes back: "
                f"{_told(error)}. The memory stays claimed until the engine is restarted.",
                reason=Reason.HOST_MEMORY,
            ) from error
        self._committed_bytes = wanted_bytes

    def close(self) -> None:
        """Give everything back; no address of it may be used any more."""
        self._space.close()
        self._base_address = 0
        self._committed_bytes = 0

    def _available_now_bytes(self) -> int:
        available_bytes = self._available_bytes()
        if self._limit_bytes is None:
            return available_bytes
        return min(available_bytes, self._limit_bytes - self._committed_bytes)


def _told(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
