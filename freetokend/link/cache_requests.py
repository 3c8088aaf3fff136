"""Control's commands to the expert cache that wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from freetokend.core.errors import FreetokenError, UnavailableError
from freetokend.link.messages import (
    CacheAnswer,
    CacheCommand,
    CacheResized,
    CacheVerified,
    ResizeCache,
    VerifyCache,
)

_Answer = TypeVar("_Answer", CacheResized, CacheVerified)
_Send = Callable[[CacheCommand], None]


class CacheRequests:
    """Owner of the generations and of the waiting calls; lives in the event loop.

    Generations rise over the engine's restarts too. An answer that nobody waits for is dropped.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._resizes: dict[int, asyncio.Future[CacheResized]] = {}
        self._verifies: dict[str, asyncio.Future[CacheVerified]] = {}

    async def resize(self, send: _Send, slots_count: int, timeout_s: float) -> CacheResized:
        """Send a resize of a new generation and wait. Raises `UnavailableError` and the engine's
        refusal."""
        self._newest += 1
        command = ResizeCache(generation=self._newest, slots_count=slots_count)
        future = self._resizes[command.generation] = asyncio.get_running_loop().create_future()
        try:
            send(command)
            return await _answer(future, timeout_s)
        finally:
            del self._resizes[command.generation]

    async def verify(self, send: _Send, timeout_s: float) -> CacheVerified:
        """Send a comparison and wait. Raises as `resize` does."""
        self._newest += 1
        command = VerifyCache(request_id=f"verify-{self._newest}")
        future = self._verifies[command.request_id] = asyncio.get_running_loop().create_future()
        try:
            send(command)
            return await _answer(future, timeout_s)
        finally:
            del self._verifies[command.request_id]

    def answered(self, answer: CacheAnswer) -> None:
        """The engine has answered."""
        if isinstance(answer, CacheResized):
            _settle(self._resizes.get(answer.generation), answer)
        else:
            _settle(self._verifies.get(answer.request_id), answer)

    def fail_all(self, cause: str) -> None:
        """No answer will come any more: the engine is gone."""
        error = UnavailableError(f"{cause}; try again when it is ready")
        for resize in self._resizes.values():
            if not resize.done():
                resize.set_exception(error)
        for verify in self._verifies.values():
            if not verify.done():
                verify.set_exception(error)


def _settle(future: asyncio.Future[_Answer] | None, answer: _Answer) -> None:
    if future is not None and not future.done():
        future.set_result(answer)


async def _answer(future: asyncio.Future[_Answer], timeout_s: float) -> _Answer:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await future
    except TimeoutError:
        raise UnavailableError(
            f"the engine did not answer within {timeout_s:g} s: it may be in a long step; see "
            "`freetokenctl status` and try again"
        ) from None
    if answer.error_reason is not None:
        raise FreetokenError(answer.error_message, reason=answer.error_reason)
    return answer
