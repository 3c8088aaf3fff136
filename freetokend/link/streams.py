"""The requests in flight, seen from control: one coalescing buffer each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from freetokend.core.errors import InternalError, Reason
from freetokend.link.messages import FinishReason, SequenceUpdate


class _Buffer:
    """What has arrived of one request and was not read yet: one merged update."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended = False  # the finishing update has arrived
        self._wake = asyncio.Event()
        self._token_ids: list[int] = []
        self._newest: SequenceUpdate | None = None

    def put(self, update: SequenceUpdate) -> None:
        """Merge an update into what waits; ignored after the finishing one."""
        if self.ended:
            return
        self._token_ids.extend(update.token_ids)
        self._newest = update
        self.ended = update.finish_reason is not None
        self._wake.set()

    async def take(self) -> SequenceUpdate:
        """Everything that has arrived since the last call, as one update; waits for some."""
        while self._newest is None:
            self._wake.clear()
            await self._wake.wait()
        newest, self._newest = self._newest, None
        token_ids = tuple(self._token_ids)
        self._token_ids.clear()
        return newest if token_ids == newest.token_ids else replace(newest, token_ids=token_ids)


class UpdateStream:
    """The updates of one request, as an async iterator that ends after the finishing one.

    Never blocks the link: what a slow reader has not taken yet is one merged update, bounded by
    the request's own token limit. `aclose` before the end cancels, and so does dropping the
    stream (a reader task that died): the engine must not go on for nobody.
    """

    def __init__(self, buffer: _Buffer, cancel: Callable[[str], None]) -> None:
        self._buffer = buffer
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._over = False  # the reader has the finishing update, or has gone

    @property
    def request_id(self) -> str:
        """The id under which it was submitted."""
        return self._buffer.request_id

    def __aiter__(self) -> UpdateStream:
        return self

    async def __anext__(self) -> SequenceUpdate:
        if self._over:
            raise StopAsyncIteration
        update = await self._buffer.take()
        self._over = update.finish_reason is not None
        return update

    async def aclose(self) -> None:
        """The reader goes: cancels the request unless it has ended. Idempotent."""
        if not self._over:
            self._over = True
            if not self._buffer.ended:
                self._cancel(self.request_id)

    async def finish(self) -> None:
        """As `aclose`: for the engine there is no difference."""
        await self.aclose()

    def __del__(self) -> None:
        if not self._over and not self._buffer.ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, self.request_id)


class RequestTable:
    """The requests that have been submitted and not finished. Owned by the event loop."""

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._buffers)

    def ids(self) -> tuple[str, ...]:
        """Of all of them."""
        return tuple(self._buffers)

    def open(self, request_id: str, cancel: Callable[[str], None]) -> UpdateStream:
        """A stream for a new request. Raises `InternalError` when the id is in use."""
        if request_id in self._buffers:
            raise InternalError(f"request id {request_id} is already in flight")
        buffer = _Buffer(request_id)
        self._buffers[request_id] = buffer
        self._empty.clear()
        return UpdateStream(buffer, cancel)

    def deliver(self, update: SequenceUpdate) -> None:
        """Route an update; those of cancelled requests are expected and dropped."""
        buffer = self._buffers.get(update.request_id)
        if buffer is None:
            return
        buffer.put(update)
        if update.finish_reason is not None:
            self.forget(update.request_id)

    def forget(self, request_id: str) -> bool:
        """The request is over; False when it already was."""
        known = self._buffers.pop(request_id, None) is not None
        if not self._buffers:
            self._empty.set()
        return known

    def fail_all(self, reason: Reason, message: str) -> int:
        """End every stream with an error update; returns how many."""
        buffers = list(self._buffers.values())
        self._buffers.clear()
        self._empty.set()
        for buffer in buffers:
            buffer.put(
                SequenceUpdate(
                    request_id=buffer.request_id,
                    finish_reason=FinishReason.ERROR,
                    error_reason=reason,
                    error_message=message,
                )
            )
        return len(buffers)

    async def wait_empty(self) -> None:
        """Wait until no request is in flight."""
        await self._empty.wait()
