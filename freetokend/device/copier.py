"""What a cache needs of a device besides memory: copies of slots and comparisons with the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from freetokend.native import _host


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRange:
    """`length_bytes` from one device address to another."""

    from_address: int
    to_address: int
    length_bytes: int


class SlotCopier(Protocol):
    """Copies within a device's memory."""

    def copy(self, ranges: Sequence[CopyRange]) -> None:
        """Copy every range; complete at return. No range overlaps another."""
        ...

    def first_difference(
        self, device_address: int, host_address: int, length_bytes: int
    ) -> int | None:
        """Offset of the first byte of device memory that differs from host memory, or None."""
        ...


class HostCopier:
    """`SlotCopier` of the host device."""

    def copy(self, ranges: Sequence[CopyRange]) -> None:
        """See `SlotCopier.copy`."""
        _host.copy_ranges([(one.from_address, one.to_address, one.length_bytes) for one in ranges])

    def first_difference(
        self, device_address: int, host_address: int, length_bytes: int
    ) -> int | None:
        """See `SlotCopier.first_difference`."""
        offset_bytes = _host.first_difference(device_address, host_address, length_bytes)
        return offset_bytes if offset_bytes < length_bytes else None
