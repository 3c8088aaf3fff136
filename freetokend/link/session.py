"""One engine from its spawn to its end: the process, its stream, and the verdict on both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, assert_never

from freetokend.core.cache_stats import CacheCounters
from freetokend.core.errors import ConfigError, Reason, reaction
from freetokend.core.logs import is_routine
from freetokend.link.bandwidth_messages import (
    BandwidthMeasured,
    BandwidthMessage,
    BandwidthProgress,
)
from freetokend.link.handover import PoolHandover
from freetokend.link.liveness import Liveness, LivenessLimits
from freetokend.link.messages import (
    CacheAnswer,
    CacheResized,
    CacheVerified,
    ControlMessage,
    EngineDescription,
    EngineMessage,
    EngineSettings,
    EngineState,
    EngineStats,
    Failure,
    Heartbeat,
    Hello,
    LoadProgress,
    SequenceUpdate,
    StepReport,
)
from freetokend.link.process import EngineProcess, pass_to_stderr, signal_of
from freetokend.link.server import Attachment, LinkServer
from freetokend.link.trace_messages import (
    TracedStep,
    TraceEnded,
    TraceMessage,
    TraceStarted,
)

# Between the first sign of the end (stream or process) and the second: enough for the last
# messages and the exit code to arrive, well inside the 2 s that running requests may wait.
_LAST_WORDS_S: Final = 0.5
# An interpreter with a tensor library takes its time to exit; a killed one tells no exit code.
_EXIT_S: Final = 3.0
_CAUSE_LINES: Final = 3
_GPU_DEVICE: Final = "cuda"

RESTART_CANNOT_HELP: Final = frozenset(
    {Reason.CONFIG_INVALID, Reason.MODEL_INVALID, Reason.MODEL_UNSUPPORTED}
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """How to start an engine: the same for every spawn, the pool's fd included."""

    argv: tuple[str, ...]
    settings: EngineSettings
    environment: Mapping[str, str] = field(default_factory=dict)
    pool: PoolHandover | None = None
    line_sink: Callable[[str], None] = pass_to_stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """How one engine ended. `cause` is for people, `reason` decides whether to start another.

    `last_output` (the newest lines it printed, when nothing better explains the end) is for status
    and journal; clients get `cause` only. `on_gpu`: it used a GPU, or tried to; `signal`: its name,
    "" when the engine exited by itself; `stuck`: it was replaced because it did nothing any more.
    """

    cause: str
    reason: Reason
    was_ready: bool
    last_output: str = ""
    on_gpu: bool = False
    signal: str = ""
    stuck: bool = False

    @property
    def full_cause(self) -> str:
        """Cause and last output in one sentence."""
        return (
            f"{self.cause}; its last output: {self.last_output}" if self.last_output else self.cause
        )

    @property
    def restart_can_help(self) -> bool:
        """False when only a changed configuration or model can."""
        return self.reason not in RESTART_CANNOT_HELP


class SessionEvents(Protocol):
    """What the supervisor hears of the running session."""

    def session_changed(self) -> None:
        """State, description, loading or statistics are new."""
        ...

    def session_updates(self, updates: tuple[SequenceUpdate, ...]) -> None:
        """Tokens and ends of sequences."""
        ...

    def session_cache_answer(self, answer: CacheAnswer) -> None:
        """The expert cache was resized or compared."""
        ...

    def session_bandwidth(self, message: BandwidthMessage) -> None:
        """A measurement goes on, or has ended."""
        ...

    def session_traced(self, message: TraceMessage) -> None:
        """A recording goes on, or has ended."""
        ...

    def session_lost(self, cause: str) -> None:
        """Nothing more will come; the engine `cause`, as far as that is known yet."""
        ...


class EngineSession:
    """One spawn. Implements `LinkListener`; owned by the event loop."""

    def __init__(
        self,
        launch: EngineLaunch,
        server: LinkServer,
        events: SessionEvents,
        *,
        limits: LivenessLimits,
        clock: Callable[[], float],
    ) -> None:
        self.state = EngineState.STARTING
        self.pid: int | None = None
        self.description: EngineDescription | None = None
        self.stats = EngineStats()
        self.cache: CacheCounters | None = None
        self.load: LoadProgress | None = None
        self.cause = ""  # why it ends, as soon as it does
        self.liveness = Liveness(limits, clock())
        self._launch = launch
        self._server = server
        self._events = events
        self._limits = limits
        self._clock = clock
        self._attachment: Attachment | None = None
        self._process: EngineProcess | None = None
        self._detached = asyncio.Event()
        self._failure: Failure | None = None
        self._verdict = ""  # why we killed it
        self._stuck = False
        self._on_gpu = False

    async def run(self) -> EngineEnd:
        """Spawn, serve until the end, and say how it ended. Cancelling kills the engine."""
        attachment = self._server.expect(self._launch.settings, self)
        self._attachment = attachment
        try:
            process = EngineProcess.spawn(
                self._launch.argv,
                address=self._server.address,
                token=attachment.token,
                environment=self._launch.environment,
                pool=self._launch.pool,
                line_sink=self._launch.line_sink,
            )
        except ConfigError as error:
            self._server.revoke(attachment)
            return EngineEnd(cause=error.message, reason=error.reason, was_ready=False)
        self._process = process
        self.pid = process.pid
        _log.info("engine-started", extra={"engine_pid": process.pid})
        self._events.session_changed()
        try:
            exit_text = await self._until_end(process)
        finally:
            self._server.revoke(attachment)
            process.kill()
            await process.wait()
        return self._describe_end(exit_text, process.last_lines)

    def send(self, message: ControlMessage) -> None:
        """Queue a message for the engine."""
        if self._attachment is not None:
            self._attachment.send(message)

    def withdraw(self, request_id: str) -> bool:
        """Take back a request that has not been written to the engine yet."""
        return self._attachment is not None and self._attachment.withdraw(request_id)

    def kill(self, verdict: str) -> None:
        """SIGKILL; `verdict` becomes the cause."""
        if not self._verdict:
            self._verdict = verdict
        if self._process is not None:
            self._process.kill()

    def attached(self, hello: Hello) -> None:
        """`LinkListener`: the engine is there and loads."""
        self.liveness.attached(self._clock())
        self._enter(EngineState.LOADING)

    def refused(self, text: str) -> None:
        """`LinkListener`: an engine of another build; no restart mends that."""
        self._failure = Failure(reason=Reason.CONFIG_INVALID, message=text)

    def detached(self, cause: str) -> None:
        """`LinkListener`: the stream is over."""
        self._detached.set()

    def received(self, message: EngineMessage) -> None:
        """`LinkListener`: one message."""
        now_s = self._clock()
        match message:
            case StepReport():
                self.stats = message.stats
                self.liveness.worked(now_s)
                self._events.session_updates(message.outputs)
            case Heartbeat():
                self.stats = message.stats
                self.cache = message.cache
                self.liveness.heartbeat(
                    now_s, progress_count=message.progress_count, busy=message.busy
                )
                self._events.session_changed()
            case LoadProgress():
                self.load = message
                self._on_gpu = message.on_gpu
                self.liveness.worked(now_s)
                self._events.session_changed()
            case EngineDescription():
                self.description = message
                self._on_gpu = message.device.startswith(_GPU_DEVICE)
                self.load = None
                self.liveness.worked(now_s)
                self.liveness.busy = False
                self._enter(EngineState.READY)
                _log.info("engine-ready", extra={"engine_pid": self.pid})
            case Failure():
                self._failure = message
            case CacheResized() | CacheVerified():
                self.liveness.worked(now_s)
                self._events.session_cache_answer(message)
            case TraceStarted() | TracedStep() | TraceEnded():
                self.liveness.worked(now_s)
                self._events.session_traced(message)
            case BandwidthProgress() | BandwidthMeasured():
                self.liveness.worked(now_s)
                self._events.session_bandwidth(message)
            case Hello():
                self.kill("it said Hello twice")
            case _:
                assert_never(message)

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._events.session_changed()

    async def _until_end(self, process: EngineProcess) -> str:
        exited = asyncio.create_task(process.wait(), name="engine-exit")
        detached = asyncio.create_task(self._detached.wait(), name="engine-detached")
        watch = asyncio.create_task(self._watch(), name="engine-watch")
        try:
            await asyncio.wait({exited, detached}, return_when=asyncio.FIRST_COMPLETED)
            self.cause = self._cause(exited.result() if exited.done() else "")
            self._enter(EngineState.RESTARTING)  # no request may be given to it any more
            expected = {exited, detached} if self._was_attached() else {exited}
            await asyncio.wait(expected, timeout=_LAST_WORDS_S)
            self.cause = self._cause(exited.result() if exited.done() else "")
            self._events.session_lost(self.cause)
            await asyncio.wait({exited}, timeout=_EXIT_S)
            if not exited.done():
                self.kill("it ended its stream but did not exit")
            return await exited
        finally:
            for task in (exited, detached, watch):
                task.cancel()

    def _was_attached(self) -> bool:
        return self._attachment is not None and self._attachment.attached

    async def _watch(self) -> None:
        """Kill the engine when it is stuck; our own pauses are not held against it."""
        period_s = min(1.0, self._limits.stuck_s / 4, self._limits.connect_s / 4)
        last_s = self._clock()
        while True:
            await asyncio.sleep(period_s)
            now_s = self._clock()
            late_s = now_s - last_s - period_s
            if late_s > period_s:
                self.liveness.forgive(late_s)
            last_s = now_s
            fault = self.liveness.fault(now_s)
            if fault:
                self._stuck = not self._verdict
                self.kill(f"stuck, {fault}")

    def _describe_end(self, exit_text: str, last_lines: tuple[str, ...]) -> EngineEnd:
        was_ready = self.description is not None
        cause = self._cause(exit_text)
        how = EngineEnd(
            cause=cause,
            reason=_reason_of_exit(exit_text),
            was_ready=was_ready,
            on_gpu=self._on_gpu,
            signal="" if self._verdict else signal_of(exit_text),
            stuck=self._stuck,
        )
        if self._failure is not None:
            return replace(how, reason=self._failure.reason)
        # That all went well until then explains no end.
        telling = [line for line in last_lines if line.strip() and not is_routine(line)]
        lines = [] if self._verdict else telling
        return replace(how, last_output=" | ".join(lines[-_CAUSE_LINES:]))

    def _cause(self, exit_text: str) -> str:
        """Why it ended, in words that follow "the engine"; `exit_text` "" while it still exits."""
        in_brackets = f" ({exit_text})" if exit_text else ""
        if self._failure is not None:
            return f"failed: {self._failure.message}{in_brackets}"
        if self._verdict:
            return f"was replaced: {self._verdict}{in_brackets}"
        return f"died with {exit_text}" if exit_text else "closed its link"


def _reason_of_exit(exit_text: str) -> Reason:
    """An engine that could not send its Failure still says by its exit code what it was."""
    for reason in sorted(RESTART_CANNOT_HELP):
        if exit_text == f"exit code {reaction(reason).exit_code}":
            return reason
    return Reason.ENGINE_FAILED
