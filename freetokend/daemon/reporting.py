"""Follows the engine and tells the service manager: STATUS, READY, more time, the watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final, Protocol, assert_never

from freetokend.core.units import format_bytes
from freetokend.link.messages import EngineGateway, EngineSnapshot, EngineState

# While loading: how much more time is asked for, and how often at most. Far apart, so that one
# late message does not end a start that advances.
_EXTENSION_S: Final = 60.0
_EXTEND_EVERY_S: Final = 5.0
_STATUS_EVERY_S: Final = 1.0


class Notifications(Protocol):
    """The part of `ServiceManager` that is used here."""

    def ready(self) -> None:
        """Start-up is over."""
        ...

    def status(self, text: str) -> None:
        """One line for people."""
        ...

    def extend_timeout(self, timeout_s: float) -> None:
        """More time for the start."""
        ...

    def watchdog(self) -> None:
        """The service is well."""
        ...


def status_text(snapshot: EngineSnapshot) -> str:
    """The state in one line, with bytes while loading."""
    model = snapshot.model
    match snapshot.state:
        case EngineState.STARTING:
            return f"Starting the engine for {model}"
        case EngineState.LOADING:
            load = snapshot.load
            if load is None or load.total_bytes == 0:
                return f"Loading {model}" + (f": {load.stage}" if load else "")
            done, total = format_bytes(load.done_bytes), format_bytes(load.total_bytes)
            return f"Loading {model}: {load.stage} {done} of {total}"
        case EngineState.READY:
            stats = snapshot.stats
            return f"Serving {model}: {stats.running_count} running, {stats.waiting_count} waiting"
        case EngineState.DRAINING:
            return f"Draining {model}: {snapshot.stats.running_count} requests still run"
        case EngineState.RESTARTING:
            return f"Restarting the engine: it {snapshot.cause or 'ended'}"
        case EngineState.FAILED:
            return f"The engine has failed: it {snapshot.cause}"
        case EngineState.STOPPED:
            return "Stopped"
        case _:
            assert_never(snapshot.state)


class ManagerReporter:
    """Runs until cancelled. `ready_at_once`: READY=1 as soon as it starts ("listening")."""

    def __init__(
        self,
        gateway: EngineGateway,
        manager: Notifications,
        *,
        ready_at_once: bool,
        watchdog_s: float | None,
    ) -> None:
        self._gateway = gateway
        self._manager = manager
        self._watchdog_s = watchdog_s
        self._ready_at_once = ready_at_once
        self._ready = False
        self._last_text = ""
        self._last_status_s = float("-inf")
        self._last_extension_s = float("-inf")
        self._last_progress_s = float("-inf")

    async def run(self) -> None:
        """Follow the gateway's changes and the watchdog's period together."""
        if self._ready_at_once:
            self._tell_ready()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            if self._watchdog_s is not None:
                tasks.create_task(self._feed(self._watchdog_s / 4))

    async def _follow(self) -> None:
        generation = 0
        while True:
            # A status held back by the rate limit must still go out when nothing else happens.
            # (asyncio.timeout and not wait_for, which can swallow a cancel that comes just then.)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_EVERY_S):
                    generation = await self._gateway.changed(generation)
            self.observe(self._gateway.snapshot(), time.monotonic())

    def observe(self, snapshot: EngineSnapshot, now_s: float) -> None:
        """Tell what is new in `snapshot`."""
        if snapshot.state is EngineState.READY and not self._ready:
            self._tell_ready()
        text = status_text(snapshot)
        waited = now_s - self._last_status_s >= _STATUS_EVERY_S
        state_changed = text.split(":")[0] != self._last_text.split(":")[0]
        if text != self._last_text and (waited or state_changed):
            self._manager.status(text)
            self._last_text, self._last_status_s = text, now_s
        if not self._ready:
            self._ask_for_time(snapshot, now_s)

    def _ask_for_time(self, snapshot: EngineSnapshot, now_s: float) -> None:
        """A start that advances is given more time; one that does not runs into its limit."""
        advanced = snapshot.last_progress_s > self._last_progress_s
        if advanced and now_s - self._last_extension_s >= _EXTEND_EVERY_S:
            self._manager.extend_timeout(_EXTENSION_S)
            self._last_extension_s = now_s
            self._last_progress_s = snapshot.last_progress_s

    def _tell_ready(self) -> None:
        self._ready = True
        self._manager.ready()

    async def _feed(self, period_s: float) -> None:
        """WATCHDOG=1 while this loop runs and the engine is well or can come good.

        A stuck engine is killed and replaced by the supervisor, which spends the restart budget;
        only when that is gone does the service manager have to act.
        """
        while True:
            if self._gateway.snapshot().state is not EngineState.FAILED:
                self._manager.watchdog()
            await asyncio.sleep(period_s)
