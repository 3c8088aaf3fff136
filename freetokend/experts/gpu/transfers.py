"""Copies into slots that run beside the steps of a GPU: a stream of their own, ordered by events.

A transfer reads what the stream of the steps has queued before it, its list above all, and whoever
reads what it brings joins it first. Nothing here waits on the host but `finish` and `pace`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

# A transfer whose event is used again is joined with a later one, which is right and only later.
_EVENTS_COUNT: Final = 4


class Transfers(Protocol):
    """One transfer after the other; each has a ticket."""

    def begin(self, copy: Callable[[], None]) -> int:
        """Queue a transfer behind everything that steps have queued so far; its ticket. copy:
        queues it, and is called once."""
        ...

    def join(self, ticket: int) -> None:
        """What steps queue from now on finds what this transfer and those before it brought."""
        ...

    def is_done(self, ticket: int) -> bool:
        """Whether `finish` would return at once."""
        ...

    def finish(self, ticket: int) -> None:
        """Wait on the host until this transfer and those before it are done."""
        ...

    def pace(self) -> None:
        """Wait on the host until the device has done what steps had queued before the call of this
        before, so that it is never more than that behind."""
        ...


class TransferDriver(Protocol):
    """What of `device.cuda_driver.CudaDriver` transfers need."""

    def new_stream(self) -> Any: ...

    def destroy_stream(self, stream: Any) -> None: ...

    def new_event(self) -> Any: ...

    def destroy_event(self, event: Any) -> None: ...

    def record(self, event: Any, stream: Any) -> None: ...

    def wait(self, stream: Any, event: Any) -> None: ...

    def is_done(self, event: Any) -> bool: ...

    def wait_on_host(self, event: Any) -> None: ...


class StreamTransfers:
    """`Transfers` of a GPU.

    `main_stream` tells the stream that steps are queued in now; `queue_in` makes a stream the one
    that kernels are launched in while the context lasts.
    """

    def __init__(
        self,
        driver: TransferDriver,
        *,
        main_stream: Callable[[], Any],
        queue_in: Callable[[Any], AbstractContextManager[object]],
    ) -> None:
        self._driver = driver
        self._main_stream = main_stream
        self._queue_in = queue_in
        self._side = driver.new_stream()
        self._ready = driver.new_event()
        self._done = [driver.new_event() for _ in range(_EVENTS_COUNT)]
        self._passed = [driver.new_event() for _ in range(2)]
        self._begun_count = self._paced_count = 0

    def begin(self, copy: Callable[[], None]) -> int:
        """See `Transfers.begin`."""
        driver, ticket = self._driver, self._begun_count
        driver.record(self._ready, self._main_stream())
        driver.wait(self._side, self._ready)
        with self._queue_in(self._side):
            copy()
        driver.record(self._event(ticket), self._side)
        self._begun_count += 1
        return ticket

    def join(self, ticket: int) -> None:
        """See `Transfers.join`."""
        self._driver.wait(self._main_stream(), self._event(ticket))

    def is_done(self, ticket: int) -> bool:
        """See `Transfers.is_done`."""
        return self._driver.is_done(self._event(ticket))

    def finish(self, ticket: int) -> None:
        """See `Transfers.finish`."""
        self._driver.wait_on_host(self._event(ticket))

    def pace(self) -> None:
        """See `Transfers.pace`."""
        now = self._paced_count % 2
        self._driver.record(self._passed[now], self._main_stream())
        if self._paced_count:
            self._driver.wait_on_host(self._passed[1 - now])
        self._paced_count += 1

    def close(self) -> None:
        """End stream and events; the device has been waited for."""
        self._driver.destroy_stream(self._side)
        for event in (self._ready, *self._done, *self._passed):
            self._driver.destroy_event(event)

    def _event(self, ticket: int) -> Any:
        return self._done[ticket % _EVENTS_COUNT]


def torch_transfers(driver: TransferDriver) -> StreamTransfers:
    """Beside what torch and Triton launch in the first GPU's current stream."""
    return StreamTransfers(driver, main_stream=current_stream, queue_in=queue_in)


def current_stream() -> int:
    """That of the steps: the one that torch launches in now, for the driver."""
    return torch.cuda.current_stream().cuda_stream


def queue_in(stream: Any) -> AbstractContextManager[object]:
    """What torch and Triton launch inside goes into this stream of the driver."""
    external: Any = torch.cuda.ExternalStream  # it has no types
    return torch.cuda.stream(external(int(stream)))
