"""Runs the choices of one HTTP request at once and merges what they say, in the order it comes.

Closing a `ChoiceStreams` cancels every sequence that still runs: that is how a client that hangs
up frees the engine, whether it was queued, in prefill or in decode.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from freetokend.link.messages import EngineGateway
from freetokend.serving.admission import Admitted
from freetokend.serving.generation import TextUpdate, Usage, generate_text
from freetokend.serving.model_text import ModelText

# Updates that wait for a slow client; beyond it the sequence's task waits, the gateway coalesces.
_QUEUE_UPDATES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceUpdate:
    """New text of one choice, its end, or both."""

    index: int
    text: str
    finish_reason: str | None


class ChoiceStreams:
    """All sequences of a request, from its admission on. Owner of their tasks, until `close`."""

    def __init__(self, gateway: EngineGateway, text: ModelText, admitted: Admitted) -> None:
        """Submits the sequences with the event loop's next turn."""
        self._gateway = gateway
        self._text = text
        self._admitted = admitted
        self._queue: asyncio.Queue[ChoiceUpdate | Exception] = asyncio.Queue(_QUEUE_UPDATES)
        self._usages = [Usage()] * self.choices_count
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(self.choices_count)]

    @property
    def choices_count(self) -> int:
        """How many choices there are."""
        return len(self._admitted.requests)

    def usage(self) -> Usage:
        """What all choices have used so far; a prompt counts once, however many continue it."""
        usages, size = self._usages, self._admitted.choices_per_prompt_count
        prompts = [usages[start : start + size] for start in range(0, len(usages), size)]
        return Usage(
            prompt_tokens=sum(max(u.prompt_tokens for u in choices) for choices in prompts),
            cached_tokens=sum(min(u.cached_tokens for u in choices) for choices in prompts),
            completion_tokens=sum(u.completion_tokens for u in usages),
        )

    async def next_update(self, timeout_s: float | None) -> ChoiceUpdate | None:
        """The next update of any choice; None when `timeout_s` passed without one.

        Raises the error that ended a choice.
        """
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Cancel what still runs. Idempotent.

        Does not wait, as it may be called in a cancelled scope, where every await is cut short;
        the tasks clean up after themselves.
        """
        for task in self._tasks:
            task.cancel()

    async def _run(self, index: int) -> None:
        request, stop = self._admitted.requests[index], self._admitted.stop
        try:
            async with aclosing(generate_text(self._gateway, self._text, request, stop)) as updates:
                async for update in updates:
                    self._usages[index] = update.usage
                    if update.text or update.finish_reason is not None:
                        await self._queue.put(_choice_update(index, update))
        except Exception as error:  # raised again where the updates are read
            await self._queue.put(error)


def _choice_update(index: int, update: TextUpdate) -> ChoiceUpdate:
    return ChoiceUpdate(index=index, text=update.text, finish_reason=update.finish_reason)
