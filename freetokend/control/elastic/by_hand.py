"""Resizes at the operator's word: checked, made a wish, and followed until there is an outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from freetokend.control.checks import check_range
from freetokend.control.elastic.events import CacheSizes
from freetokend.control.elastic.loop import ElasticLoop, ResizeResult, actual_sizes, result_text
from freetokend.control.elastic.wants import Wish
from freetokend.core.errors import FreetokenError, InvalidInputError, Reason, UnavailableError
from freetokend.link.messages import ResizeOutcome
from freetokend.policy.controller import EngineFacts, Trigger
from freetokend.policy.controller.budget import fixed_bytes
from freetokend.policy.controller.division import floor_sizes
from freetokend.policy.kv_sizing import pages_for
from freetokend.policy.vram_budget import Preset, VramWishes

_MOST_VRAM_BYTES: Final = 1 << 44
_WAIT_S: Final = 120.0
# A decision needs one look; a machine under load may take its time for it.
_DECISION_S: Final = 10.0


class HandOutcome(StrEnum):
    """What became of a resize by hand."""

    DONE = "done"
    UNCHANGED = "unchanged"  # it was so already
    STARTED = "started"  # decided and sent; nobody waited for the answer
    PENDING = "pending"  # it cannot be done now; the wish stands
    DEFERRED = "deferred"  # KV pages in use are in the way; the rest follows
    SUPERSEDED = "superseded"  # what others took came first; the wish stands
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandResize:
    """The truth about one. `after`: what holds at the answer; `target`: what was decided.

    `generation`: 0 where nothing was commanded. `code`, `text`: why.
    """

    outcome: HandOutcome
    before: CacheSizes
    target: CacheSizes
    after: CacheSizes
    generation: int
    stall_s: float
    wait_s: float
    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Exactly one of these is not None. `param` of a refusal is the field's name."""

    slots_count: int | None = None
    slots_ratio: float | None = None
    vram_bytes: int | None = None
    kv_tokens: int | None = None
    preset: str | None = None


def wish_of(asked: Asked, engine: EngineFacts, present: VramWishes, floor_bytes: int) -> Wish:
    """The wish that replaces the present ones. InvalidInputError names field and range.

    `floor_bytes`: the bytes of slots and KV that the cache never goes below.
    """
    shape = engine.shape
    capacity = engine.slots_capacity_count
    if asked.slots_count is not None:
        check_range("slots_count", asked.slots_count, (1, capacity))
        return Wish(wishes=replace(present, slots_count=asked.slots_count))
    if asked.slots_ratio is not None:
        check_range("slots_ratio", asked.slots_ratio, (1 / capacity, 1.0))
        count = max(int(asked.slots_ratio * capacity), 1)
        return Wish(wishes=replace(present, slots_count=count))
    if asked.vram_bytes is not None:
        if asked.vram_bytes == 0:
            return Wish(vram_limit_bytes=0)
        least_bytes = fixed_bytes(shape) + floor_bytes
        check_range("vram_bytes", asked.vram_bytes, (least_bytes, _MOST_VRAM_BYTES))
        return Wish(wishes=replace(present, slots_count=None), vram_limit_bytes=asked.vram_bytes)
    if asked.kv_tokens is not None:
        most = engine.kv_pages_capacity_count * shape.kv_page_tokens
        check_range("kv_tokens", asked.kv_tokens, (shape.kv_page_tokens, most))
        pages = pages_for(asked.kv_tokens, shape.kv_page_tokens)
        return Wish(wishes=replace(present, kv_bytes=pages * shape.kv_page_bytes))
    if asked.preset is not None:
        names = [preset.value for preset in Preset]
        if asked.preset not in names:
            raise InvalidInputError(
                f'preset = "{asked.preset}" is unknown; it must be one of {", ".join(names)}',
                param="preset",
            )
        context = present.max_context_tokens
        return Wish(wishes=VramWishes(preset=Preset(asked.preset), max_context_tokens=context))
    raise InvalidInputError(
        "nothing was asked for; name slots_count, slots_ratio, vram_bytes, kv_tokens or preset",
        param="size",
    )


class HandResizes:
    """One at a time: a second waits for the first, and both are told what really happened."""

    def __init__(self, loop: ElasticLoop) -> None:
        self._loop = loop
        self._one = asyncio.Lock()

    async def resize(self, asked: Asked, *, wait: bool, wait_s: float = _WAIT_S) -> HandResize:
        """Ask, and tell what came of it: at once when it was decided, or with `wait` when it was
        done.

        Raises InvalidInputError for what no engine could do, UnavailableError while there is none,
        FreetokenError (DEVICE_UNUSABLE) where it has no cache.
        """
        async with self._one:
            engine = await self._present()
            spec = self._loop.wants.spec(None, follows=True)
            floor_bytes = floor_sizes(engine, spec.floor).size_bytes
            wish = wish_of(asked, engine, self._loop.wants.wishes, floor_bytes)
            before = actual_sizes(engine)
            revision = self._loop.wants.ask(wish)
            try:
                async with asyncio.timeout(wait_s if wait else _DECISION_S):
                    generation = await self._decided(revision, wait=wait)
                    if generation is None:
                        return self._told(HandOutcome.PENDING, before)
                    if not generation:
                        return self._told(HandOutcome.UNCHANGED, before)
                    if not wait:
                        return self._told(HandOutcome.STARTED, before, generation)
                    return self._of(await self._done(generation), before)
            except TimeoutError:
                return self._told(HandOutcome.PENDING, before)

    async def sleep(self, *, wait_s: float = _WAIT_S) -> bool:
        """Ask for sleep; whether the engine sleeps, which takes until no request runs or waits.
        Raises as `resize` does where there is nothing to give back."""
        async with self._one:
            await self._present()
            if not self._loop.is_asleep:
                self._loop.wants.ask_to_sleep()
                await self._until(lambda: self._loop.is_asleep, wait_s)
            return self._loop.is_asleep

    async def wake(self, *, wait_s: float = _WAIT_S) -> bool:
        """Ask for waking; whether the engine is awake. A busy card refuses at once."""
        async with self._one:
            await self._present()
            if self._loop.is_asleep:
                ticket = self._loop.wants.ask_to_wake()
                await self._until(lambda: self._is_over(ticket), wait_s)
            return not self._loop.is_asleep

    def _is_over(self, wake_ticket: int) -> bool:
        """Whether the engine is awake, or the wish to wake it came to nothing."""
        state = self._loop.state
        decided = state.wake_ticket == wake_ticket and state.in_flight is None
        return decided or not self._loop.is_asleep

    async def _until(self, holds: Callable[[], bool], wait_s: float) -> None:
        self._loop.poke()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not holds():
                    await self._loop.next_tick()

    async def _present(self) -> EngineFacts:
        """The engine; what it says may be a tick away."""
        self._loop.poke()
        async with asyncio.timeout(_DECISION_S):
            await self._loop.next_tick()
        engine = self._loop.engine
        if engine is not None:
            return engine
        if self._loop.has_no_cache:
            raise FreetokenError(
                "this engine has no expert cache, so there is nothing to resize; see "
                "`freetokenctl status`",
                reason=Reason.DEVICE_UNUSABLE,
            )
        raise UnavailableError(
            "the engine is not ready, so there is no expert cache now; see `freetokenctl status` "
            "and try again"
        )

    async def _decided(self, revision: int, *, wait: bool) -> int | None:
        """The generation that was commanded for the wish, 0 where it is so already; None where it
        has to wait and the caller does not."""
        self._loop.poke()
        while True:
            await self._loop.next_tick()
            state = self._loop.state
            if state.revision == revision:
                in_flight = state.in_flight
                if in_flight is None or in_flight.trigger is not Trigger.OPERATOR:
                    return 0
                return in_flight.command.generation
            if not wait:
                return None

    async def _done(self, generation: int) -> ResizeResult | None:
        """The answer to it; None when it was given up or others came first."""
        while True:
            result = self._loop.result(generation)
            if result is not None and result.outcome is not ResizeOutcome.FAILED:
                return result
            in_flight = self._loop.state.in_flight
            if in_flight is None or in_flight.command.generation != generation:
                return result
            await self._loop.next_tick()

    def _of(self, result: ResizeResult | None, before: CacheSizes) -> HandResize:
        if result is None:
            return self._told(HandOutcome.SUPERSEDED, before)
        outcome = HandOutcome(result.outcome.value)
        told = self._told(outcome, result.before, result.command.generation)
        return replace(
            told,
            after=result.after,
            stall_s=result.stall_s,
            wait_s=result.wait_s,
            code=result.command.reason.code.value,
            text=result_text(result),
        )

    def _told(self, outcome: HandOutcome, before: CacheSizes, generation: int = 0) -> HandResize:
        status = self._loop.status()
        return HandResize(
            outcome=outcome,
            before=before,
            target=status.target or before,
            after=status.actual or before,
            generation=generation,
            stall_s=0.0,
            wait_s=0.0,
            code=status.standing.code.value,
            text=status.standing.text,
        )
