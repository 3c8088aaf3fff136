"""Falling asleep and waking: all memory of the device given back, and taken again. Torch-free.

The pool stays. Requests that come meanwhile wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from freetokend.enginehost.cache_control import CacheControl
from freetokend.enginehost.kv_control import KvControl
from freetokend.policy.vram_budget import VramFacts
from freetokend.scheduler.scheduler import Scheduler


def fixed_bytes(memory: VramFacts) -> int:
    """Of the device, what is neither slots nor KV nor left to others, while the engine serves."""
    return memory.workspace_bytes + asleep_bytes(memory)


def asleep_bytes(memory: VramFacts) -> int:
    """What of it stays while the engine sleeps."""
    return memory.dense_bytes + memory.state_bytes + memory.graph_bytes


class ElasticSleeper:
    """Gives slots, KV pages and unused memory of steps back; dense weights and graphs stay."""

    def __init__(
        self,
        cache: CacheControl,
        kv: KvControl,
        scheduler: Scheduler,
        compute_token: Callable[[], object],
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        """compute_token: raises when the engine cannot; trim: gives unused memory back."""
        self._cache = cache
        self._kv = kv
        self._scheduler = scheduler
        self._compute_token = compute_token
        self._trim = trim

    def why_not(self) -> str:
        """See `Sleeper.why_not`."""
        counts = self._scheduler.counts()
        if counts.running_count:
            return f"{counts.running_count} requests run; the engine sleeps when none does."
        return ""

    def release(self) -> None:
        """See `Sleeper.release`."""
        try:
            self._cache.empty()
        finally:
            self._kv.release()
            self._trim()

    def acquire(self, slots_count: int, kv_pages_count: int) -> None:
        """See `Sleeper.acquire`. The token needs a page, and both branches if there are slots."""
        self._kv.check_count(kv_pages_count)
        try:
            self._cache.resize(slots_count)
            self._kv.grow(kv_pages_count)
            self._compute_token()
        except Exception:
            with suppress(Exception):  # what went wrong first is what is told
                self.release()
            raise
        self._kv.refuse_what_does_not_fit()
