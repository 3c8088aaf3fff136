"""The arena: address space reserved once, memory committed and released at its end.

Nothing that holds an address of an arena has to be told of a change of size: the base stays, so
graphs that were captured over it stay valid, and a resize copies nothing.
"""

from __future__ import annotations

from typing import Protocol

from freetokend.core.errors import InternalError, Reason, ResourceError


class ArenaError(ResourceError):
    """The device has not the memory that was asked for; the arena is what it was before.

    asked_bytes: what the growth needed; available_bytes: what there was.
    """

    default_reason = Reason.DEVICE_MEMORY

    def __init__(self, message: str, *, asked_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.available_bytes = available_bytes


class Arena(Protocol):
    """Memory [base_address, base_address + committed_bytes) of a device.

    Sizes that are asked for are rounded up to `granularity_bytes`. One thread uses an arena; what
    works on its memory has to be done before memory is released.
    """

    @property
    def base_address(self) -> int:
        """Address of the first byte; never changes."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Length of the address space: the most that can ever be committed."""
        ...

    @property
    def granularity_bytes(self) -> int:
        """Memory comes and goes in multiples of this."""
        ...

    @property
    def committed_bytes(self) -> int:
        """What can be used now, by the arena's own account."""
        ...

    def claimed_bytes(self) -> int:
        """What the arena holds as the driver or the kernel shows it, not as it believes."""
        ...

    def grow_to(self, length_bytes: int) -> None:
        """Commit memory up to this length; less than is committed changes nothing.

        Either all of it is there afterwards or nothing has changed. Raises `ArenaError`;
        `InternalError` beyond the reserved length.
        """
        ...

    def shrink_to(self, length_bytes: int) -> None:
        """Release what lies behind this length; more than is committed changes nothing.

        Raises `ResourceError` when the driver refuses; `committed_bytes` then says what is left.
        """
        ...

    def close(self) -> None:
        """Give memory and address space back. May be called twice."""
        ...


def rounded_up(length_bytes: int, granularity_bytes: int) -> int:
    """`length_bytes` up to a multiple."""
    return -(-length_bytes // granularity_bytes) * granularity_bytes


def checked_length(length_bytes: int, granularity_bytes: int, reserved_bytes: int) -> int:
    """The rounded length; InternalError where it does not fit the reserved address space."""
    rounded_bytes = rounded_up(length_bytes, granularity_bytes)
    if not 0 <= rounded_bytes <= reserved_bytes:
        raise InternalError(
            f"an arena of {reserved_bytes} reserved bytes was asked to hold {length_bytes}"
        )
    return rounded_bytes
