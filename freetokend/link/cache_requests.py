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
    SizeCommand,
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
        self._resizes: dict[int, list[asyncio.Future[CacheResized]]] = {}
        self._verifies: dict[str, asyncio.Future[CacheVerified]] = {}

    @property
    def newest_generation(self) -> int:
        """The highest that was sent, to any engine."""
        return self._newest

    async def resize(
        self,
        send: _Send,
        slots_count: int,
        timeout_s: float,
        *,
        kv_pages_count: int | None = None,
        urgent: bool = False,
    ) -> CacheResized:
        """Send a resize of a new generation and wait. Raises `UnavailableError` and the engine's
        refusal."""
        command = ResizeCache(
            generation=self._newest + 1,
            slots_count=slots_count,
            kv_pages_count=kv_pages_count,
            urgent=urgent,
        )
        return _accepted(await self.carry_out(send, command, timeout_s))

    async def carry_out(self, send: _Send, command: SizeCommand, timeout_s: float) -> CacheResized:
        """Send a command of a generation that the caller has chosen, or once more, and wait. Also
        a refusal is an answer. Raises `UnavailableError`."""
        self._newest = max(self._newest, command.generation)
        future: asyncio.Future[CacheResized] = asyncio.get_running_loop().create_future()
        waiting = self._resizes.setdefault(command.generation, [])
        waiting.append(future)
        try:
            send(command)
            return await _answer(future, timeout_s)
        finally:
            waiting.remove(future)
            if not waiting:
                self._resizes.pop(command.generation, None)

    async def verify(self, send: _Send, timeout_s: float) -> CacheVerified:
        """Send a comparison and wait. Raises as `resize` does."""
        self._newest += 1
        command = VerifyCache(request_id=f"verify-{self._newest}")
        future: asyncio.Future[CacheVerified] = asyncio.get_running_loop().create_future()
        self._verifies[command.request_id] = future
        try:
            send(command)
            answer = await _answer(future, timeout_s)
        finally:
            del self._verifies[command.request_id]
        return _accepted(answer)

    def answered(self, answer: CacheAnswer) -> None:
        """The engine has answered."""
        if isinstance(answer, CacheResized):
            for future in self._resizes.get(answer.generation, ()):
                _settle(future, answer)
        else:
            _settle(self._verifies.get(answer.request_id), answer)

    def fail_all(self, cause: str) -> None:
        """No answer will come any more: the engine is gone."""
        error = UnavailableError(f"{cause}; try again when it is ready")
        for resize in (one for waiting in self._resizes.values() for one in waiting):
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
        answer: _Answer = await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        raise UnavailableError(
            f"the engine did not answer within {timeout_s:g} s: it may be in a long step; see "
            "`freetokenctl status` and try again"
        ) from None
    return answer


def _accepted(answer: _Answer) -> _Answer:
    if answer.error_reason is not None:
        raise FreetokenError(answer.error_message, reason=answer.error_reason)
    return answer
