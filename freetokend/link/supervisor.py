"""Keeps one engine running and is its gateway: the `EngineGateway` of `serving` and `control`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from freetokend.core.errors import Reason, UnavailableError
from freetokend.link.bandwidth_messages import BandwidthMeasured, BandwidthMessage
from freetokend.link.bandwidth_requests import BandwidthRequests
from freetokend.link.cache_requests import CacheRequests
from freetokend.link.gpu_life import GpuLife
from freetokend.link.liveness import LivenessLimits
from freetokend.link.messages import (
    CacheAnswer,
    CacheResized,
    CacheVerified,
    Cancel,
    EngineDescription,
    EngineSnapshot,
    EngineState,
    GenerateRequest,
    SequenceUpdate,
    SetLogLevel,
    Shutdown,
    SizeCommand,
)
from freetokend.link.server import LinkServer
from freetokend.link.session import EngineEnd, EngineLaunch, EngineSession
from freetokend.link.streams import RequestTable, UpdateStream
from freetokend.link.trace_messages import (
    TraceMessage,
    TraceStarted,
)
from freetokend.link.trace_requests import TraceRecording, TraceRequests
from freetokend.policy.gpu_faults import GpuPatience
from freetokend.policy.restart import GiveUp, RestartBudget, RestartHistory, after_death

CACHE_ANSWER_TIMEOUT_S: Final = 120.0

_LOADING_RETRY_S: Final = 5.0
_QUEUE_RETRY_S: Final = 1.0
_FAILED_RETRY_S: Final = 60.0

_log = logging.getLogger(__name__)


class EngineSupervisor:
    """Starts an engine, restarts it within a budget, routes requests and their updates.

    Implements `EngineGateway` and `SessionEvents`. Everything runs in the event loop that called
    `start`; every method is called there.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        server: LinkServer,
        *,
        budget: RestartBudget | None = None,
        limits: LivenessLimits | None = None,
        gpu_patience: GpuPatience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = GpuLife(
            launch.settings, GpuPatience() if gpu_patience is None else gpu_patience, clock
        )
        self._launch = launch
        self._server = server
        self._budget = RestartBudget() if budget is None else budget
        self._limits = LivenessLimits() if limits is None else limits
        self._clock = clock
        self._requests = RequestTable()
        self._cache_requests = CacheRequests()
        self._trace_requests = TraceRequests()
        self._bandwidth_requests = BandwidthRequests()
        self._session: EngineSession | None = None
        self._runner: asyncio.Task[None] | None = None
        self._idle_state = EngineState.STARTING  # the state while no session runs
        self._draining = False
        self._stopping = asyncio.Event()
        self._last_end: EngineEnd | None = None
        self._restarts_count = 0
        self._next_restart_s: float | None = None
        self._generation = 1
        self._change = asyncio.Event()
        self._seen_state = EngineState.STARTING
        self._state_since_s = clock()

    def start(self) -> None:
        """Spawn the first engine; returns at once."""
        self._runner = asyncio.create_task(self._run(), name="engine-supervisor")

    @property
    def last_end(self) -> EngineEnd | None:
        """How the last engine ended; None while none did."""
        return self._last_end

    @property
    def in_flight_count(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._requests)

    def snapshot(self) -> EngineSnapshot:
        """See `EngineGateway`."""
        session = self._session
        common = EngineSnapshot(
            state=self._seen_state,
            state_since_s=self._state_since_s,
            model=self._launch.settings.model,
            busy=len(self._requests) > 0,
            restarts_count=self._restarts_count,
            cause="" if self._last_end is None else self._last_end.full_cause,
            next_restart_s=self._next_restart_s,
            gpu_faults_count=self._gpu.state.faults_count,
            gpu_fault=self._gpu.state.fault,
            gpu_retry_s=self._gpu.state.retry_s,
        )
        if session is None:
            return common
        return replace(
            common,
            pid=session.pid,
            description=_described_now(session),
            stats=session.stats,
            cache=session.cache,
            load=session.load,
            busy=common.busy or session.liveness.busy,
            last_progress_s=session.liveness.progress_s,
            cause=session.cause or common.cause,
        )

    async def changed(self, generation: int) -> int:
        """See `EngineGateway`."""
        while self._generation <= generation:
            await self._change.wait()
        return self._generation

    def check_admission(self) -> None:
        """See `EngineGateway`. What the engine printed is for status and journal, not told here."""
        if self._draining:
            raise UnavailableError(
                "the service is draining and takes no new requests",
                reason=Reason.DRAINING,
                retry_after_s=_LOADING_RETRY_S,
            )
        state = self._seen_state
        known = "" if self._last_end is None else self._last_end.cause
        if self._session is not None and self._session.cause:
            known = self._session.cause
        cause = f": the engine {known}" if known else ""
        if self._gpu.is_retrying:
            raise UnavailableError(
                "the engine is being restarted to try the GPU again",
                retry_after_s=_LOADING_RETRY_S,
            )
        if state is EngineState.FAILED:
            raise UnavailableError(
                f"the engine has failed and is not restarted{cause}",
                retry_after_s=_FAILED_RETRY_S,
            )
        if state is not EngineState.READY:
            if self._last_end is not None or state is EngineState.RESTARTING:
                raise UnavailableError(
                    f"the engine is being restarted{cause}", retry_after_s=self._retry_after_s()
                )
            raise UnavailableError(
                "the model is being loaded", reason=Reason.LOADING, retry_after_s=_LOADING_RETRY_S
            )
        settings = self._launch.settings
        limit_count = settings.max_running_count + settings.max_waiting_count
        if len(self._requests) >= limit_count:
            raise UnavailableError(
                f"{len(self._requests)} requests are running or waiting, which is the limit "
                "([engine] max_running_count + max_waiting_count)",
                reason=Reason.QUEUE_FULL,
                retry_after_s=_QUEUE_RETRY_S,
            )

    def generate(self, request: GenerateRequest) -> UpdateStream:
        """See `EngineGateway`. The refusal is raised by this call itself, before any iteration."""
        session = self._session
        self.check_admission()
        stream = self._requests.open(request.request_id, self._cancel)
        if session is not None:
            session.send(request)
        return stream

    def set_log_level(self, level: str) -> None:
        """Tell the running engine and those to come."""
        settings = replace(self._launch.settings, log_level=level)
        self._launch = replace(self._launch, settings=settings)
        if self._session is not None:
            self._session.send(SetLogLevel(level=level))

    async def resize_cache(
        self,
        slots_count: int,
        *,
        kv_pages_count: int | None = None,
        urgent: bool = False,
        timeout_s: float = CACHE_ANSWER_TIMEOUT_S,
    ) -> CacheResized:
        """Have so many slots and KV pages (None: leave them) while requests run; what became of it.

        A DEFERRED one may be tried again; SUPERSEDED: another call came later and counts.
        Raises `UnavailableError` (no engine is ready, it ended or does not answer) and the
        engine's refusal as `FreetokenError` of its reason.
        """
        session = self._ready_session("there is no expert cache now")
        return await self._cache_requests.resize(
            session.send,
            slots_count,
            timeout_s,
            kv_pages_count=kv_pages_count,
            urgent=urgent,
        )

    @property
    def newest_generation(self) -> int:
        """The highest of a command that was sent to any engine."""
        return self._cache_requests.newest_generation

    async def carry_out(
        self, command: SizeCommand, *, timeout_s: float = CACHE_ANSWER_TIMEOUT_S
    ) -> CacheResized:
        """Send a command of the caller's generation, which may be sent again, and wait.

        Whatever the engine answers is returned, FAILED too. Raises `UnavailableError`.
        """
        session = self._ready_session("it cannot be resized now")
        return await self._cache_requests.carry_out(session.send, command, timeout_s)

    def refuse_waiting(self, message: str) -> int:
        """Answer every request of an engine that sleeps: not now, and why; returns how many."""
        session = self._session
        for request_id in self._requests.ids():
            if session is not None and not session.withdraw(request_id):
                session.send(Cancel(request_id=request_id))
        refused_count = self._requests.fail_all(Reason.ENGINE_UNAVAILABLE, message)
        self._refresh()
        return refused_count

    async def verify_cache(self, *, timeout_s: float = CACHE_ANSWER_TIMEOUT_S) -> CacheVerified:
        """Compare every resident slot with the pool. Raises as `resize_cache` does."""
        session = self._ready_session("there is no expert cache now")
        return await self._cache_requests.verify(session.send, timeout_s)

    async def record_trace(
        self, *, timeout_s: float = CACHE_ANSWER_TIMEOUT_S
    ) -> tuple[TraceStarted, TraceRecording]:
        """Record which experts are chosen until the recording is closed; it ends with the engine.

        Raises as `resize_cache` does, and `UnavailableError` while another recording goes on.
        """
        session = self._ready_session("nothing can be recorded now")
        return await self._trace_requests.start(session.send, timeout_s)

    async def measure_bandwidth(
        self,
        *,
        parts: tuple[str, ...] = (),
        limit_s: float,
        progress: Callable[[str], None] = lambda part: None,
    ) -> BandwidthMeasured:
        """Measure bandwidths while nobody is served; progress: called with each part's name. A
        request ends it early, which the answer says. Raises as `resize_cache` does."""
        session = self._ready_session("nothing can be measured now")
        return await self._bandwidth_requests.measure(
            session.send, parts=parts, limit_s=limit_s, progress=progress
        )

    def _ready_session(self, without: str) -> EngineSession:
        """The session of an engine that is ready, draining or not."""
        if self._session is None or self._session.state is not EngineState.READY:
            raise UnavailableError(
                f"the engine is not ready, so {without}; see `freetokenctl status` and try again",
                retry_after_s=_LOADING_RETRY_S,
            )
        return self._session

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones; returns how many still run.

        The health changes before anything else. `resume` ends it.
        """
        self._draining = True
        self._refresh()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._requests.wait_empty()
        return len(self._requests)

    def resume(self) -> None:
        """Accept requests again, unless the service is stopping."""
        if not self._stopping.is_set():
            self._draining = False
            self._refresh()

    async def stop(self, *, drain_timeout_s: float, exit_timeout_s: float = 5.0) -> None:
        """Drain, end what still runs with an error, end the engine. Call again to hurry."""
        self._draining = True
        self._refresh()
        if drain_timeout_s > 0:
            await self.drain(drain_timeout_s)
        self._stopping.set()
        self._requests.fail_all(
            Reason.DRAINING, "the service is stopping; the request was not finished in time"
        )
        self._trace_requests.fail(Reason.DRAINING, "the service is stopping")
        self._bandwidth_requests.fail("the service is stopping")
        if self._session is not None:
            self._session.send(Shutdown(drain=False))
        if self._runner is not None:
            done, _ = await asyncio.wait({self._runner}, timeout=exit_timeout_s)
            if not done:
                self._runner.cancel()
                await asyncio.wait({self._runner})
        self._session = None
        self._idle_state = EngineState.STOPPED
        self._refresh()

    def session_changed(self) -> None:
        """`SessionEvents`: something that the snapshot shows is new."""
        self._refresh()

    def session_updates(self, updates: tuple[SequenceUpdate, ...]) -> None:
        """`SessionEvents`: route tokens to their streams."""
        for update in updates:
            self._requests.deliver(update)

    def session_cache_answer(self, answer: CacheAnswer) -> None:
        """`SessionEvents`: wake who waits for it."""
        self._cache_requests.answered(answer)
        self._refresh()

    def session_traced(self, message: TraceMessage) -> None:
        """`SessionEvents`: pass it to the recording."""
        self._trace_requests.told(message)

    def session_bandwidth(self, message: BandwidthMessage) -> None:
        """`SessionEvents`: pass it to who measures."""
        self._bandwidth_requests.told(message)

    def session_lost(self, cause: str) -> None:
        """`SessionEvents`: end every request in flight, now."""
        self._trace_requests.fail(Reason.ENGINE_FAILED, f"the engine {cause}")
        self._bandwidth_requests.fail(f"the engine {cause} while bandwidths were measured")
        self._cache_requests.fail_all(f"the engine {cause} while its cache was at work")
        self._requests.fail_all(
            Reason.ENGINE_FAILED, f"the engine {cause}; the request is lost, send it again"
        )

    def _retry_after_s(self) -> float:
        until_s = 0.0 if self._next_restart_s is None else self._next_restart_s - self._clock()
        return max(until_s, 0.0) + 1.0

    def _cancel(self, request_id: str) -> None:
        session = self._session
        if not self._requests.forget(request_id) or session is None:
            return
        if not session.withdraw(request_id):
            session.send(Cancel(request_id=request_id))

    def _refresh(self) -> None:
        """Recompute the visible state, then wake those who wait for a change."""
        state = self._idle_state if self._session is None else self._session.state
        if self._draining and state is EngineState.READY:
            state = EngineState.DRAINING
        if self._stopping.is_set() and state is EngineState.RESTARTING:
            state = EngineState.DRAINING  # it ends because it was asked to
        if state is not self._seen_state:
            self._seen_state = state
            self._state_since_s = self._clock()
        self._generation += 1
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def _run(self) -> None:
        history = RestartHistory()
        while not self._stopping.is_set():
            self._gpu.engine_starts()
            end = await self._run_session()
            if self._stopping.is_set():
                return
            if self._gpu.is_retrying:
                self._idle_state = EngineState.RESTARTING
                self.session_lost("was restarted to try the GPU again")
                self._restarts_count += 1
                continue
            if self._gpu.engine_ended(end):
                _log.error("gpu-given-up", extra={"cause": end.full_cause})
            self._last_end = end
            self.session_lost(end.cause)
            history, decision = after_death(
                self._budget,
                history,
                now_s=self._clock(),
                restart_can_help=end.restart_can_help,
            )
            _log.error("engine-died", extra={"cause": end.full_cause, "reason": str(end.reason)})
            if isinstance(decision, GiveUp):
                self._idle_state = EngineState.FAILED
                _log.error("engine-given-up", extra={"why": decision.text})
                self._refresh()
                return
            self._idle_state = EngineState.RESTARTING
            self._next_restart_s = self._clock() + decision.delay_s
            self._refresh()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(decision.delay_s):
                    await self._stopping.wait()
            self._next_restart_s = None
            self._restarts_count += 1

    async def _run_session(self) -> EngineEnd:
        settings = replace(self._launch.settings, gpu_fault=self._gpu.state.fault)
        launch = replace(self._launch, settings=settings)
        session = EngineSession(launch, self._server, self, limits=self._limits, clock=self._clock)
        self._session = session
        self._refresh()
        retry = asyncio.create_task(self._retry_gpu(session), name="gpu-retry")
        try:
            return await session.run()
        finally:
            retry.cancel()
            self._session = None

    async def _retry_gpu(self, session: EngineSession) -> None:
        """End an engine that does without the GPU when its time is over and nobody uses it."""
        await self._gpu.wait_due()
        while session.state is not EngineState.READY or len(self._requests):
            seen = self._generation
            await self._requests.wait_empty()
            if session.state is not EngineState.READY:
                await self.changed(seen)
        self._gpu.is_retrying = True
        _log.info("gpu-tried-again", extra={"cause": self._gpu.state.fault})
        session.send(Shutdown(drain=True))


def _described_now(session: EngineSession) -> EngineDescription | None:
    """What it said of itself when it was ready, with what resizes have made of it since."""
    described, tokens = session.description, session.stats.servable_context_tokens
    if described is None or tokens in (0, described.servable_context_tokens):
        return described
    return replace(described, servable_context_tokens=tokens)
