"""Transfers without a GPU that bring nothing before they are joined."""

from __future__ import annotations

from collections.abc import Callable


class LateTransfers:
    """`Transfers` that run when somebody joins them, in order: as late as a stream of copies may.

    Who reads a slot and has not joined its transfer finds what lay there before.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._begun_count = 0
        self.is_closed = False

    @property
    def begun_count(self) -> int:
        return self._begun_count

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def begin(self, copy: Callable[[], None]) -> int:
        """See `Transfers.begin`."""
        self._waiting.append((self._begun_count, copy))
        self._begun_count += 1
        return self._begun_count - 1

    def join(self, ticket: int) -> None:
        """See `Transfers.join`."""
        while self._waiting and self._waiting[0][0] <= ticket:
            self._waiting.pop(0)[1]()

    def is_done(self, ticket: int) -> bool:
        """See `Transfers.is_done`; nobody waits long."""
        self.join(ticket)
        return True

    def finish(self, ticket: int) -> None:
        """See `Transfers.finish`."""
        self.join(ticket)

    def pace(self) -> None:
        """See `Transfers.pace`; nothing is queued but transfers."""

    def synchronize(self) -> None:
        """All of them."""
        self.join(self._begun_count)

    def close(self) -> None:
        assert not self._waiting
        self.is_closed = True
