"""What the Admin service asks of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from freetokend.control.traces import Recording
from freetokend.link.bandwidth_messages import BandwidthMeasured
from freetokend.link.messages import CacheResized, CacheVerified, SizeCommand
from freetokend.link.trace_messages import TraceStarted


class ServiceOperations(Protocol):
    """The daemon's verbs; each may raise a `FreetokenError`, which the caller is told."""

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones; returns how many still run."""
        ...

    def resume(self) -> None:
        """Accept requests again."""
        ...

    def request_stop(self, *, drain: bool) -> None:
        """Begin to stop the daemon, with or without a drain; returns at once."""
        ...

    async def resize_engine(self, command: SizeCommand) -> CacheResized:
        """Send the engine a command of a generation, and wait for its answer, whatever that says.
        Raises `UnavailableError` when none comes."""
        ...

    def refuse_waiting(self, message: str) -> int:
        """Answer every request of an engine that sleeps: not now, and why; returns how many."""
        ...

    async def verify_cache(self) -> CacheVerified:
        """Compare every resident slot of the expert cache with the pool."""
        ...

    async def record_trace(self) -> tuple[TraceStarted, Recording]:
        """Record which experts are chosen, until the recording is closed."""
        ...

    async def measure_bandwidth(
        self,
        *,
        parts: tuple[str, ...] = (),
        limit_s: float,
        progress: Callable[[str], None] = lambda part: None,
    ) -> BandwidthMeasured:
        """Measure bandwidths while nobody is served; progress: called with each part's name."""
        ...

    def set_log_level(self, level: str) -> str:
        """Set the level of daemon and engine; returns the former one."""
        ...
