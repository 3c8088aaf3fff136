"""Bandwidths measured unasked and on request, and what is known of them: the keeper of profiles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from freetokend.control.profiles import ProfileStore, StoredProfiles
from freetokend.core import logs
from freetokend.core.errors import FreetokenError
from freetokend.link.bandwidth_messages import BandwidthMeasured
from freetokend.link.messages import EngineSnapshot, EngineState
from freetokend.policy.bandwidth_profile import (
    Measurement,
    ProfileEntry,
    ProfileKey,
    ProfileSource,
    entry_of,
)
from freetokend.policy.profiling import LIMIT_S, Profiling, ProfilingRun, due_run, looked, ran

_LOOK_S: Final = 0.5

_log = logs.logger(__name__)


class Measuring(Protocol):
    """The daemon's verb."""

    async def measure_bandwidth(
        self,
        *,
        parts: tuple[str, ...] = (),
        limit_s: float,
        progress: Callable[[str], None] = lambda part: None,
    ) -> BandwidthMeasured:
        """Measure while nobody is served. Raises `FreetokenError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledMachine:
    """What a profile is of, now; driver_version: empty without a GPU."""

    snapshot: Callable[[], EngineSnapshot]
    driver_version: Callable[[], str]
    version: str


class BandwidthKeeper:
    """Owner of the profiles, and of when they are renewed. Lives in the event loop; the disk is
    used in a thread."""

    def __init__(
        self,
        machine: ProfiledMachine,
        measuring: Measuring,
        store: ProfileStore,
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """interval_s: between two measurements that nobody asked for; 0: only at the start."""
        self._machine = machine
        self._measuring = measuring
        self._store = store
        self._interval_s = interval_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._profiling = Profiling()
        self._of: tuple[int | None, ProfileKey] | None = None
        self._stored = StoredProfiles()
        self._write = asyncio.Lock()

    @property
    def stored(self) -> StoredProfiles:
        """Of the present GPU, or of none; what is on disk."""
        return self._stored

    def wall_s(self) -> float:
        """The Unix time now."""
        return self._wall_clock()

    def key(self) -> ProfileKey | None:
        """Of what is served now; None without an engine."""
        engine = self._machine.snapshot().description
        if engine is None:
            return None
        on_gpu = bool(engine.device_uuid)
        return ProfileKey(
            weight_format=engine.expert_format,
            expert_bytes=engine.bytes_per_expert,
            driver_version=self._machine.driver_version() if on_gpu else "",
            kernel_build=f"{engine.kernel} {self._machine.version}",
        )

    def entry(self) -> ProfileEntry | None:
        """What is known of what is served now."""
        key = self.key()
        return None if key is None else entry_of(self._stored.entries, key)

    async def run(self) -> None:
        """Measure when it is due, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except FreetokenError as error:
                _log.warning("bandwidth-failed", cause=error.message)
            except Exception:  # a profile decides how fast something is, never whether it runs
                _log.exception("bandwidth-failed")

    async def look(self) -> None:
        """One look at the engine, and a measurement if one is due."""
        snapshot, now_s = self._machine.snapshot(), self._clock()
        key = self.key()
        if snapshot.state is not EngineState.READY or key is None:
            self._of = None
            return
        if (snapshot.pid, key) != self._of:
            self._profiling = Profiling()
            self._of = (snapshot.pid, key)
            self._stored = await asyncio.to_thread(self._store.read, self._gpu_uuid())
            known = entry_of(self._stored.entries, key) is not None
            self._profiling = Profiling(known=known, ended_at_s=now_s)
        self._profiling = looked(self._profiling, quiet=_is_quiet(snapshot), now_s=now_s)
        run = due_run(self._profiling, now_s=now_s, interval_s=self._interval_s)
        if run is not None:
            await self._carry_out(run)

    async def measure(
        self,
        source: ProfileSource,
        *,
        parts: tuple[str, ...] = (),
        limit_s: float = LIMIT_S,
        progress: Callable[[str], None] = lambda part: None,
    ) -> BandwidthMeasured:
        """Measure now and keep what comes of it. Raises `FreetokenError`, also when it cannot be
        kept."""
        measured = await self._measuring.measure_bandwidth(
            parts=parts, limit_s=limit_s, progress=progress
        )
        key = self.key()
        if key is not None and measured.figures:
            measurement = Measurement(
                at_s=self._wall_clock(), source=source, figures=measured.figures
            )
            async with self._write:
                self._stored = await asyncio.to_thread(
                    self._store.add, self._gpu_uuid(), key, measurement
                )
        return measured

    async def _carry_out(self, run: ProfilingRun) -> None:
        parts_left: tuple[str, ...] = ()
        failed = True
        try:
            measured = await self.measure(run.source, parts=run.parts)
            parts_left, failed = measured.parts_left, False
        finally:
            self._profiling = ran(
                self._profiling, run, parts_left=parts_left, failed=failed, now_s=self._clock()
            )

    def _gpu_uuid(self) -> str:
        engine = self._machine.snapshot().description
        return "" if engine is None else engine.device_uuid


def _is_quiet(snapshot: EngineSnapshot) -> bool:
    stats = snapshot.stats
    served = snapshot.busy or stats.running_count or stats.waiting_count
    return not served and not stats.asleep
