"""An arena in a GPU's memory, through the driver's virtual memory management."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from freetokend.core.errors import InternalError
from freetokend.device.arena import ArenaError, checked_length, rounded_up
from freetokend.device.copier import CopyRange
from freetokend.device.cuda_driver import CudaDriver, CudaError
from freetokend.native import _host

# A mapping costs the driver tens of microseconds whatever its size; a granule (2 MiB) each would
# make thousands of a pool of slots. What rounding up to it wastes is at most one.
DEFAULT_CHUNK_BYTES: Final = 32 << 20
_STAGING_BYTES: Final = 4 << 20


class CudaArena:
    """An `Arena` of chunks, each a mapping of its own, at the end of one address range."""

    def __init__(
        self, driver: CudaDriver, reserved_bytes: int, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> None:
        """chunk_bytes: rounded up to the driver's granularity. Raises `CudaError`."""
        if reserved_bytes < 0 or chunk_bytes <= 0:
            raise InternalError(f"an arena cannot reserve {reserved_bytes} bytes")
        self._driver = driver
        self._chunk_bytes = rounded_up(chunk_bytes, driver.granularity_bytes)
        self._reserved_bytes = max(rounded_up(reserved_bytes, self._chunk_bytes), self._chunk_bytes)
        self._committed_bytes = 0
        self._closed = False
        self._base_address = driver.reserve(self._reserved_bytes, driver.granularity_bytes)

    @property
    def base_address(self) -> int:
        """Device address of the first byte."""
        return self._base_address

    @property
    def reserved_bytes(self) -> int:
        """Length of the address space."""
        return self._reserved_bytes

    @property
    def granularity_bytes(self) -> int:
        """A chunk."""
        return self._chunk_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes that can be used."""
        return self._committed_bytes

    def claimed_bytes(self) -> int:
        """Chunks of the whole reserved range in which the driver has memory."""
        if self._closed:
            return 0
        chunks = range(0, self._reserved_bytes, self._chunk_bytes)
        return sum(
            self._chunk_bytes
            for offset_bytes in chunks
            if self._driver.is_mapped(self._base_address + offset_bytes)
        )

    def grow_to(self, length_bytes: int) -> None:
        """See `Arena.grow_to`. Another program may take memory at any time: free memory is read
        just before, and what fails all the same is rolled back.
        """
        wanted_bytes = checked_length(length_bytes, self._chunk_bytes, self._reserved_bytes)
        missing_bytes = wanted_bytes - self._committed_bytes
        if missing_bytes <= 0:
            return
        free_bytes = self._driver.memory().free_bytes
        if missing_bytes > free_bytes:
            raise self._refused(missing_bytes, free_bytes, "that much is not free")
        mapped_bytes = self._committed_bytes
        try:
            while mapped_bytes < wanted_bytes:
                self._driver.map_new(self._base_address + mapped_bytes, self._chunk_bytes)
                mapped_bytes += self._chunk_bytes
            self._driver.allow_access(self._base_address + self._committed_bytes, missing_bytes)
        except CudaError as error:
            self._unmap(mapped_bytes, self._committed_bytes)
            if error.out_of_memory:
                raise self._refused(missing_bytes, free_bytes, str(error)) from error
            raise
        self._committed_bytes = wanted_bytes

    def shrink_to(self, length_bytes: int) -> None:
        """See `Arena.shrink_to`."""
        wanted_bytes = checked_length(length_bytes, self._chunk_bytes, self._reserved_bytes)
        while self._committed_bytes > wanted_bytes:
            self._unmap(self._committed_bytes, self._committed_bytes - self._chunk_bytes)
            self._committed_bytes -= self._chunk_bytes

    def close(self) -> None:
        """Give everything back; no address of it may be used any more."""
        if self._closed:
            return
        self.shrink_to(0)
        self._driver.free_reserved(self._base_address, self._reserved_bytes)
        self._closed = True

    def _unmap(self, from_bytes: int, to_bytes: int) -> None:
        """End the chunks in [to, from), the last first."""
        for end_bytes in range(from_bytes, to_bytes, -self._chunk_bytes):
            self._driver.unmap(
                self._base_address + end_bytes - self._chunk_bytes, self._chunk_bytes
            )

    def _refused(self, asked_bytes: int, free_bytes: int, why: str) -> ArenaError:
        return ArenaError(
            f"GPU {self._driver.device_index} refused {asked_bytes} more bytes: it had "
            f"{free_bytes} free ({why}). The arena keeps its {self._committed_bytes}. Ask for "
            "fewer slots, or end other programs on the GPU.",
            asked_bytes=asked_bytes,
            available_bytes=free_bytes,
        )


class CudaCopier:
    """`SlotCopier` of a GPU, on a stream of its own."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._stream: Any = driver.new_stream()
        self._staging = ctypes.create_string_buffer(_STAGING_BYTES)

    def copy(self, ranges: Sequence[CopyRange]) -> None:
        """See `SlotCopier.copy`."""
        for one in ranges:
            self._driver.copy_on_device(
                one.to_address, one.from_address, one.length_bytes, self._stream
            )
        self._driver.synchronize(self._stream)

    def first_difference(
        self, device_address: int, host_address: int, length_bytes: int
    ) -> int | None:
        """See `SlotCopier.first_difference`."""
        staging = ctypes.addressof(self._staging)
        for offset_bytes in range(0, length_bytes, _STAGING_BYTES):
            piece_bytes = min(_STAGING_BYTES, length_bytes - offset_bytes)
            self._driver.copy_to_host(staging, device_address + offset_bytes, piece_bytes)
            found_bytes = _host.first_difference(staging, host_address + offset_bytes, piece_bytes)
            if found_bytes < piece_bytes:
                return offset_bytes + found_bytes
        return None

    def close(self) -> None:
        """End the stream."""
        self._driver.destroy_stream(self._stream)
