"""A torch-free engine that follows a script over the real link. Development and tests only."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn, assert_never

from freetokend.core.errors import Reason, reaction
from freetokend.link.bandwidth_messages import BandwidthMeasured, MeasureBandwidth
from freetokend.link.engine_side import EngineLinkClient
from freetokend.link.messages import (
    CacheDescription,
    Cancel,
    ControlMessage,
    Disconnected,
    EngineDescription,
    EngineSettings,
    EngineStats,
    Failure,
    FinishReason,
    GenerateRequest,
    LoadProgress,
    LoadStage,
    ResizeCache,
    SequenceUpdate,
    SetLogLevel,
    Shutdown,
    SleepEngine,
    StepReport,
    VerifyCache,
    WakeEngine,
)
from freetokend.link.trace_messages import (
    StartTrace,
    StopTrace,
    TraceStarted,
)
from freetokend.policy.health import GPU_NOT_USED
from freetokend.scripted.cache import ScriptedCache, carried_out, verified
from freetokend.scripted.script import Fault, FaultAction, FaultPoint, Script, TokenKind

_CONTEXT_TOKENS: Final = 8192


@dataclass(slots=True)
class _Running:
    """One accepted request: `planned_count` tokens, taken from `source` over and over."""

    request: GenerateRequest
    source: tuple[int, ...]
    planned_count: int
    prefill_left_count: int
    done_count: int = 0


class ScriptedEngine:
    """Plays `script` over `client` until told to stop; `run` returns the exit code."""

    def __init__(
        self,
        script: Script,
        client: EngineLinkClient,
        script_path: Path,
        pool_bytes: int = 0,
        cache: ScriptedCache | None = None,
    ) -> None:
        """`cache` None: an engine without an expert cache."""
        self._script = script
        self._cache = cache
        self._client = client
        self._script_path = script_path
        self._pool_bytes = pool_bytes
        self._settings = EngineSettings(model="")
        self._running: dict[str, _Running] = {}
        self._waiting: deque[GenerateRequest] = deque()
        self._stats = EngineStats()
        self._ending: Shutdown | None = None
        self._gate_fd = os.open(script.gate, os.O_RDWR) if script.gate else -1

    def run(self) -> int:
        """Connect, load, serve. Raises the errors of `EngineLinkClient.connect`."""
        self._strike(FaultPoint.START)
        self._settings = self._client.connect()
        self._client.set_busy(True)
        self._load()
        self._client.set_busy(False)
        if self._ending is None:
            self._client.send(self._describe())
            self._note_load()
            self._report()
        while not self._finished():
            self._take_messages(wait=not self._running or self._is_asleep)
            if self._running and self._ending_lets_work() and not self._is_asleep:
                self._step()
        return 0

    def _load(self) -> None:
        load = self._script.load
        self._client.send(LoadProgress(stage=LoadStage.ATTACH, done_bytes=0, total_bytes=0))
        for index in range(load.chunks_count):
            if index == load.chunks_count // 2:
                self._strike(FaultPoint.LOAD)
            time.sleep(load.chunk_s)
            self._client.progress()
            self._take_messages(wait=False)
            if self._ending is not None:
                return
            done_bytes = load.total_bytes * (index + 1) // load.chunks_count
            self._client.send(
                LoadProgress(
                    stage=LoadStage.READ,
                    done_bytes=done_bytes,
                    total_bytes=load.total_bytes,
                    on_gpu=self._is_on_gpu,
                )
            )
        for stage in (LoadStage.PREPARE, LoadStage.WARM_UP):
            self._client.send(LoadProgress(stage=stage, done_bytes=0, total_bytes=0))

    def _describe(self) -> EngineDescription:
        settings, setup = self._settings, self._script.cache
        described = EngineDescription(
            model=self._script.model or settings.model,
            device="scripted",
            device_name="scripted engine",
            backend="scripted",
            backend_reason="a script was given",
            kernel="none",
            threads_count=1,
            servable_context_tokens=settings.max_context_tokens or _CONTEXT_TOKENS,
            kv_bytes=settings.kv_bytes,
            pool_bytes=self._pool_bytes or self._script.load.total_bytes,
            pool_page_bytes=4096,
            pool_reattached=False,
            attach_s=0.0,
            load_s=self._script.load.chunk_s * self._script.load.chunks_count,
            load_bytes_per_s=0.0,
            first_token_s=0.0,
            layers_count=1,
            moe_layers_count=1 if setup is None else setup.layers_count,
            experts_per_layer_count=1,
            bytes_per_expert=4096,
            max_running_count=settings.max_running_count,
            numerics=settings.numerics,
            expert_format="",
            dense_formats=(),
            cpus=(),
            threads_reason="",
            notes=("this engine is scripted: it computes nothing",),
            cache=self._describe_cache(),
        )
        described = replace(described, **self._script.description)
        if self._has_gpu and settings.gpu_fault:
            why = f"{GPU_NOT_USED}: the last engine that used it {settings.gpu_fault}."
            return replace(described, device="cpu", notes=(*described.notes, why))
        return described

    @property
    def _has_gpu(self) -> bool:
        return str(self._script.description.get("device", "")).startswith("cuda")

    @property
    def _is_on_gpu(self) -> bool:
        return self._has_gpu and not self._settings.gpu_fault

    def _describe_cache(self) -> CacheDescription | None:
        return None if self._cache is None else self._cache.description()

    @property
    def _is_asleep(self) -> bool:
        return self._cache is not None and self._cache.is_asleep

    def _finished(self) -> bool:
        works = self._running and not self._is_asleep
        return self._ending is not None and not (self._ending_lets_work() and works)

    def _ending_lets_work(self) -> bool:
        return self._ending is None or self._ending.drain

    def _take_messages(self, *, wait: bool) -> None:
        """Everything that has arrived; with `wait`, at least one message."""
        try:
            while True:
                self._take(self._client.inbox.get(block=wait))
                wait = False
        except queue.Empty:
            return

    def _take(self, message: ControlMessage | Disconnected) -> None:
        match message:
            case GenerateRequest():
                self._accept(message)
            case Cancel():
                self._cancel(message.request_id)
            case Shutdown():
                self._ending = message
            case Disconnected():
                self._ending = Shutdown(drain=False)
            case SetLogLevel() | EngineSettings() | StopTrace():
                pass
            case ResizeCache() | SleepEngine() | WakeEngine():
                self._client.send(carried_out(self._cache, message))
                self._note_load()
                self._report()
            case VerifyCache():
                self._client.send(verified(self._cache, message))
            case MeasureBandwidth():
                self._client.send(
                    BandwidthMeasured(
                        run_id=message.run_id,
                        error_reason=Reason.MODEL_UNSUPPORTED,
                        error_message="this engine is scripted and has nothing to measure",
                    )
                )
            case StartTrace():
                self._client.send(
                    TraceStarted(
                        trace_id=message.trace_id,
                        error_reason=Reason.MODEL_UNSUPPORTED,
                        error_message="this engine is scripted and has no experts to choose",
                    )
                )
            case _:
                assert_never(message)

    def _accept(self, request: GenerateRequest) -> None:
        if len(self._running) < self._settings.max_running_count:
            self._start(request)
        elif len(self._waiting) < self._settings.max_waiting_count:
            self._waiting.append(request)
        else:
            self._report(
                SequenceUpdate(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error_reason=Reason.QUEUE_FULL,
                    error_message="the engine's queue is full",
                )
            )
        self._note_load()

    def _start(self, request: GenerateRequest) -> None:
        tokens = self._script.tokens
        source = request.prompt_token_ids if tokens.kind is TokenKind.ECHO else tokens.token_ids
        endless = tokens.kind is TokenKind.CYCLE or request.ignore_eos
        self._running[request.request_id] = _Running(
            request=request,
            source=source,
            planned_count=request.max_new_tokens if endless and source else len(source),
            prefill_left_count=self._script.prefill_steps_count,
        )

    def _cancel(self, request_id: str) -> None:
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._note_load()
                self._report(
                    SequenceUpdate(request_id=request_id, finish_reason=FinishReason.CANCELLED)
                )
                return
        running = self._running.pop(request_id, None)
        if running is not None:
            self._admit_waiting()
            self._report(_end(running, FinishReason.CANCELLED, ()))

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._running) < self._settings.max_running_count:
            self._start(self._waiting.popleft())
        self._note_load()

    def _note_load(self) -> None:
        self._client.set_busy(bool(self._running) and not self._is_asleep)
        running, waiting = len(self._running), len(self._waiting)
        if self._is_asleep:
            running, waiting = 0, running + waiting
        self._stats = replace(self._stats, running_count=running, waiting_count=waiting)
        if self._cache is not None:
            self._stats = self._cache.stats(self._stats)

    def _step(self) -> None:
        """One token for every running request, in one report."""
        if self._gate_fd >= 0:
            os.read(self._gate_fd, 1)
            self._take_messages(wait=False)
            if not self._running or self._is_asleep:
                return  # what the step was for has gone while it waited
        started_s = time.monotonic()
        self._stats = replace(self._stats, steps_count=self._stats.steps_count + 1)
        if self._cache is not None:
            self._cache.step()
        self._strike(FaultPoint.STEP)
        if self._script.step_s > 0:
            time.sleep(self._script.step_s)
        updates = [
            update
            for running in list(self._running.values())
            if (update := self._advance(running)) is not None
        ]
        self._admit_waiting()
        self._stats = replace(self._stats, step_s=time.monotonic() - started_s)
        self._client.progress()
        self._report(*updates)

    def _advance(self, running: _Running) -> SequenceUpdate | None:
        """The next token of one request; None while its prefill lasts."""
        request = running.request
        if running.done_count == 0 and running.prefill_left_count > 0:
            running.prefill_left_count -= 1
            return None
        if running.done_count == 0:
            self._count(prefill_tokens=len(request.prompt_token_ids))
        if running.planned_count == 0:
            return self._finish(running, FinishReason.STOP, ())
        token_id = running.source[running.done_count % len(running.source)]
        running.done_count += 1
        self._count(decode_tokens=1)
        if token_id in request.stop_token_ids and not request.ignore_eos:
            return self._finish(running, FinishReason.STOP, ())
        if running.done_count >= request.max_new_tokens:
            return self._finish(running, FinishReason.LENGTH, (token_id,))
        if running.done_count >= running.planned_count:
            return self._finish(running, FinishReason.STOP, (token_id,))
        return SequenceUpdate(request_id=request.request_id, token_ids=(token_id,))

    def _count(self, *, prefill_tokens: int = 0, decode_tokens: int = 0) -> None:
        self._stats = replace(
            self._stats,
            prefill_tokens_count=self._stats.prefill_tokens_count + prefill_tokens,
            decode_tokens_count=self._stats.decode_tokens_count + decode_tokens,
        )

    def _finish(
        self, running: _Running, reason: FinishReason, token_ids: tuple[int, ...]
    ) -> SequenceUpdate:
        del self._running[running.request.request_id]
        return _end(running, reason, token_ids)

    def _report(self, *updates: SequenceUpdate) -> None:
        self._client.send(
            StepReport(step_index=self._stats.steps_count, outputs=updates, stats=self._stats)
        )

    def _strike(self, point: FaultPoint) -> None:
        for index, fault in enumerate(self._script.faults):
            if fault.at is not point:
                continue
            if point is FaultPoint.STEP and fault.step_index != self._stats.steps_count:
                continue
            if fault.on_gpu and not self._is_on_gpu:
                continue
            if fault.once and not self._first_time(index):
                continue
            self._suffer(fault)

    def _first_time(self, index: int) -> bool:
        marker = self._script_path.with_name(f"{self._script_path.name}.fault-{index}.done")
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _suffer(self, fault: Fault) -> None:
        match fault.action:
            case FaultAction.SIGNAL:
                os.kill(os.getpid(), fault.signal)
            case FaultAction.EXIT:
                os._exit(fault.exit_code)
            case FaultAction.FAIL:
                self._client.send(Failure(reason=fault.reason, message=fault.message))
                self._client.close()
                raise SystemExit(reaction(fault.reason).exit_code)
            case FaultAction.HANG:
                _hang()
            case _:
                assert_never(fault.action)


def _hang() -> NoReturn:
    while True:
        threading.Event().wait()


def _end(running: _Running, reason: FinishReason, token_ids: tuple[int, ...]) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=running.request.request_id,
        token_ids=token_ids,
        finish_reason=reason,
        prompt_tokens=len(running.request.prompt_token_ids),
        completion_tokens=running.done_count,
    )
