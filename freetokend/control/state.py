"""The state of the whole service at one instant, and the one who keeps it current."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from freetokend.control.elastic.status import ElasticStatus
from freetokend.control.probes import MachineReadings
from freetokend.control.rates import RateWindow, TokenRates
from freetokend.core import logs
from freetokend.core.config.resolved import ResolvedConfig
from freetokend.link.messages import EngineGateway, EngineSnapshot
from freetokend.policy.health import (
    Health,
    HealthInputs,
    HealthState,
    HealthWarning,
    Severity,
    assess,
)

# Health also changes by the mere passing of time (a stall): look at least this often.
_TICK_S: Final = 1.0

_log = logs.logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTotals:
    """Requests that ended since the daemon started."""

    finished_count: int = 0
    failed_count: int = 0
    cancelled_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedWarning:
    """A warning of the health registry and the Unix time since when it stands."""

    warning: HealthWarning
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """Everything that status and metrics show; durations are seconds up to this instant, which is
    `now_s` of the monotonic clock."""

    now_s: float
    version: str
    pid: int
    uptime_s: float
    snapshot: EngineSnapshot
    state_for_s: float
    progress_age_s: float
    next_restart_s: float | None
    health: Health
    warnings: tuple[RaisedWarning, ...]
    rates: TokenRates
    requests: RequestTotals
    machine: MachineReadings
    elastic: ElasticStatus
    http_address: str
    log_level: str
    generation: int


class StateKeeper:
    """Follows the engine's gateway and answers with the present `ServiceState`.

    Owned by the event loop. Owns the generation number, the rate window and the times at which
    warnings were raised; each warning is logged when it appears and when it goes.
    """

    def __init__(
        self,
        *,
        gateway: EngineGateway,
        config: ResolvedConfig,
        version: str,
        pid: int,
        totals: Callable[[], RequestTotals],
        machine: Callable[[], MachineReadings] = MachineReadings,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._gateway = gateway
        self._config = config
        self._version = version
        self._pid = pid
        self._totals = totals
        self._machine = machine
        self._elastic: Callable[[], ElasticStatus] = ElasticStatus
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_s = clock()
        self._window = RateWindow()
        self._raised_s: dict[str, float] = {}
        self._ready_pid: int | None = None
        self._ready_since_s = 0.0
        self._http_address = ""
        self._generation = 1
        self._change = asyncio.Event()

    def set_http_address(self, address: str) -> None:
        """The URL at which HTTP now listens."""
        self._http_address = address
        self.touch()

    def follow_elastic(self, status: Callable[[], ElasticStatus]) -> None:
        """Show what the controller says of itself."""
        self._elastic = status

    def touch(self) -> None:
        """Something that the state shows has changed: wake the watchers."""
        self._generation += 1
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def changed(self, generation: int) -> int:
        """Wait until the state is newer than `generation`; returns its generation."""
        while self._generation <= generation:
            await self._change.wait()
        return self._generation

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        seen = 0
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: on Python 3.11 it can swallow a cancellation that comes together
                # with the change.
                async with asyncio.timeout(_TICK_S):
                    newest = await self._gateway.changed(seen)
                if newest != seen:
                    seen = newest
                    self.touch()
            self.state()

    def state(self) -> ServiceState:
        """The state now; cheap, never blocks."""
        now_s = self._clock()
        snapshot = self._gateway.snapshot()
        self._window.observe(
            now_s,
            prefill_tokens_count=snapshot.stats.prefill_tokens_count,
            decode_tokens_count=snapshot.stats.decode_tokens_count,
        )
        restart_s = snapshot.next_restart_s
        next_restart_s = None if restart_s is None else max(0.0, restart_s - now_s)
        progress_age_s = max(0.0, now_s - snapshot.last_progress_s) if snapshot.busy else 0.0
        health = assess(self._health_inputs(snapshot, progress_age_s, next_restart_s))
        return ServiceState(
            now_s=now_s,
            version=self._version,
            pid=self._pid,
            uptime_s=max(0.0, now_s - self._started_s),
            snapshot=snapshot,
            state_for_s=max(0.0, now_s - snapshot.state_since_s),
            progress_age_s=progress_age_s,
            next_restart_s=next_restart_s,
            health=health,
            warnings=self._note_warnings(health),
            rates=self._window.rates(now_s),
            requests=self._totals(),
            machine=self._machine(),
            elastic=self._elastic(),
            http_address=self._http_address,
            log_level=logs.log_level(),
            generation=self._generation,
        )

    def _note_warnings(self, health: Health) -> tuple[RaisedWarning, ...]:
        codes = {warning.code for warning in health.warnings}
        gone = [code for code in self._raised_s if code not in codes]
        for code in gone:
            del self._raised_s[code]
            _log.info("health-warning-cleared", code=code)
        new = codes - self._raised_s.keys()
        for warning in health.warnings:
            if warning.code in new:
                self._raised_s[warning.code] = self._wall_clock()
                _log_raised(warning)
        if gone or new:
            self.touch()
        return tuple(
            RaisedWarning(warning=warning, since_s=self._raised_s[warning.code])
            for warning in health.warnings
        )

    def _healthy_for_s(self, snapshot: EngineSnapshot) -> float:
        """How long the present engine has been ready; a drain does not start it anew."""
        if snapshot.description is None:
            self._ready_pid = None
            return 0.0
        if snapshot.pid != self._ready_pid:
            self._ready_pid = snapshot.pid
            self._ready_since_s = self._clock()
        return max(0.0, self._clock() - self._ready_since_s)

    def _health_inputs(
        self, snapshot: EngineSnapshot, progress_age_s: float, next_restart_s: float | None
    ) -> HealthInputs:
        stats, engine, load = snapshot.stats, self._config.engine, snapshot.load
        seen = snapshot.description
        return HealthInputs(
            state=HealthState(snapshot.state.value),
            cause=snapshot.cause,
            restarts_count=snapshot.restarts_count,
            next_restart_s=next_restart_s,
            busy=snapshot.busy,
            progress_age_s=progress_age_s,
            running_count=stats.running_count,
            waiting_count=stats.waiting_count,
            max_waiting_count=engine.max_waiting_count,
            http_host=self._config.http.host,
            healthy_for_s=self._healthy_for_s(snapshot),
            asked_context_tokens=engine.max_context_tokens,
            load_stage="" if load is None else load.stage,
            load_done_bytes=0 if load is None else load.done_bytes,
            load_total_bytes=0 if load is None else load.total_bytes,
            served=seen is not None,
            device="" if seen is None else seen.device,
            backend="" if seen is None else seen.backend,
            notes=() if seen is None else seen.notes,
            servable_context_tokens=0 if seen is None else seen.servable_context_tokens,
            pool_bytes=0 if seen is None else seen.pool_bytes,
            pool_page_bytes=0 if seen is None else seen.pool_page_bytes,
            pinned_bytes=stats.pool_pinned_bytes,
            pin_wanted=engine.pin_pool,
            pin_done=stats.pin_done,
            pin_note=stats.pin_note,
            kv_pages_used_count=stats.kv_pages_used_count,
            kv_pages_total_count=stats.kv_pages_total_count,
        )


def _log_raised(warning: HealthWarning) -> None:
    match warning.severity:
        case Severity.ERROR:
            log = _log.error
        case Severity.WARNING:
            log = _log.warning
        case Severity.INFO:
            log = _log.info
    log("health-warning-raised", code=warning.code, text=warning.text)
