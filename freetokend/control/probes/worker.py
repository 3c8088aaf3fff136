"""Calls that may block, kept away from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from freetokend.control.probes.ports import ProbeError

T = TypeVar("T")


class DeadlineWorker:
    """One thread that makes one call at a time, each with a deadline.

    A call that outlives its deadline is given up, not ended: nothing ends a thread that hangs in
    the driver. Until it returns no other is begun, so that there is never a second hanging thread,
    and the process can exit without it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned yet, within its deadline or beyond."""
        return self._is_busy

    async def call(self, function: Callable[[], T], deadline_s: float) -> T:
        """The function's result or exception. Raises `ProbeError` at the deadline, and at once
        while an earlier call hangs. Called by one task at a time."""
        text = f"no answer within {deadline_s:g} s; it is asked again once it has answered"
        if self._is_busy:
            raise ProbeError(text, is_new=False)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        self._is_busy = True

        def run() -> None:
            value: Any = None
            error: Exception | None = None
            try:
                value = function()
            except Exception as caught:  # the caller's to see, whatever it is
                error = caught
            # A loop that is closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._returned, result, value, error)

        self._start().put(run)
        try:
            async with asyncio.timeout(deadline_s):
                return await result
        except TimeoutError:
            raise ProbeError(text) from None

    def close(self) -> None:
        """Let the thread end once it is free; idempotent."""
        self._calls.put(None)
        self._thread = None

    def _start(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        if self._thread is None:
            # A daemon: the interpreter's exit does not wait for a call that hangs.
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        return self._calls

    def _returned(self, result: asyncio.Future[T], value: T, error: Exception | None) -> None:
        self._is_busy = False
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)


def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
