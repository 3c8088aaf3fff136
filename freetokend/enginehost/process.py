"""The life of an engine process: connect, attach, build, warm up, serve, end with a true cause."""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, cast

from freetokend.core.cache_stats import CacheCounters
from freetokend.core.errors import (
    CancelledRequestError,
    ConfigError,
    FreetokenError,
    InternalError,
    Reason,
    reaction,
)
from freetokend.core.host_facts import HostFiles, cpu_name, numa_nodes, read_host_memory
from freetokend.core.logs import EventLogger, logger, set_up_logging
from freetokend.enginehost.attach import AttachedPool, attach_pool
from freetokend.enginehost.backend import (
    BackendChoice,
    Device,
    choose_backend,
    choose_device,
    find_gpus,
)
from freetokend.enginehost.bandwidth_control import BandwidthCommands, BandwidthParts
from freetokend.enginehost.built import BuiltEngine, EngineBuilder
from freetokend.enginehost.cache_control import CacheCommands, CacheControl
from freetokend.enginehost.host_facts import CpuChoice, read_cpu_choice
from freetokend.enginehost.inbox import Inbox, Incoming
from freetokend.enginehost.loop import LoopCommands, StepLoop
from freetokend.enginehost.probe import TokenProbe
from freetokend.enginehost.sleeping import ElasticSleeper, asleep_bytes, fixed_bytes
from freetokend.enginehost.split_control import NoSplit, SplitFollower
from freetokend.enginehost.trace_control import (
    TraceCommands,
    Traced,
    no_experts,
    trace_source,
)
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.engine_side import EngineLinkClient, take_link_token
from freetokend.link.messages import (
    EngineDescription,
    EngineSettings,
    EngineStats,
    Failure,
    LoadProgress,
    LoadStage,
    Shutdown,
)
from freetokend.native.affinity import pinned_thread
from freetokend.native.lifeline import Lifeline, ReceivedPool, receive_pool
from freetokend.traces.trace import TraceShape

HANDOVER_TIMEOUT_S: Final = 30.0
PARTS_MODULE: Final = "freetokend.enginehost.bandwidth_parts"
BUILD_MODULE: Final = "freetokend.enginehost.build"


class BackgroundImport:
    """Imports torch and what needs it while the load waits for the disk."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="import", daemon=True)
        self._thread.start()

    def builder(self) -> EngineBuilder:
        """The module's `build_engine`.

        Raises ConfigError when torch or a native module is missing or damaged (a restart cannot
        help), otherwise what the import raised.
        """
        self._thread.join()
        if isinstance(self._error, ImportError):
            raise ConfigError(
                f"The engine's libraries cannot be loaded: {self._error}. Install freetokend with "
                "its engine extra (torch) again."
            ) from self._error
        if self._error is not None:
            raise self._error
        return cast("EngineBuilder", importlib.import_module(self._module).build_engine)

    def _run(self) -> None:
        try:
            importlib.import_module(self._module)
        except BaseException as error:  # told in the thread that waits
            self._error = error


class LiveStats:
    """What heartbeats tell: nothing while loading, then what the loop and the cache say. Pinning
    goes on while no step is computed."""

    def __init__(self) -> None:
        self.source: Callable[[], EngineStats] = EngineStats
        self.cache_source: Callable[[], CacheCounters | None] = lambda: None

    def __call__(self) -> EngineStats:
        return self.source()

    def cache(self) -> CacheCounters | None:
        """None without an expert cache."""
        return self.cache_source()


def run_engine(address: str, lifeline_fd: int, model_dir: Path) -> int:
    """The whole process; returns its exit code."""
    # Until control has said what is wanted: only what nobody may miss.
    set_up_logging("warning", "journal" if os.environ.get("JOURNAL_STREAM") else "text")
    log = logger(__name__)
    client: EngineLinkClient | None = None
    try:
        heavy = BackgroundImport(BUILD_MODULE)
        pool = _take_lifeline(lifeline_fd)
        live = LiveStats()
        client = EngineLinkClient(
            address, token=take_link_token(), kind="native", stats=live, cache=live.cache
        )
        settings = client.connect()
        set_up_logging(settings.log_level, settings.log_format)
        for number in (signal.SIGTERM, signal.SIGINT):
            # A queue that is safe to put to from a handler; the loop treats it as control's word.
            signal.signal(number, partial(_stop, client.inbox))
        return _Host(client, settings, heavy, live, log).run(pool, model_dir)
    except CancelledRequestError:
        log.info("stopped-while-loading")
        return 0
    except Exception as error:
        return _fail(error, client, log)
    finally:
        if client is not None:
            client.close()


def _stop(inbox: queue.SimpleQueue[Incoming], _number: int, _frame: FrameType | None) -> None:
    inbox.put(Shutdown(drain=False))


def _take_lifeline(fd: int) -> ReceivedPool:
    """The pool from control; from now on a native thread watches the socket."""
    with socket.socket(fileno=fd) as lifeline:
        lifeline.set_inheritable(False)
        lifeline.settimeout(HANDOVER_TIMEOUT_S)
        pool = receive_pool(lifeline)
        lifeline.settimeout(None)
        Lifeline.start(lifeline.detach())
    if pool is None:
        raise ConfigError("control handed over no pool, and an engine cannot serve without one.")
    return pool


def _fail(error: Exception, client: EngineLinkClient | None, log: EventLogger) -> int:
    """Tell control and the journal why, and pick the exit code."""
    if isinstance(error, FreetokenError):
        reason, message = error.reason, error.message
        log.error("engine-failed", reason=reason.value, cause=message)
    else:
        reason = Reason.HOST_MEMORY if isinstance(error, MemoryError) else Reason.INTERNAL
        message = f"{type(error).__name__}: {error}"
        log.exception("engine-failed", reason=reason.value)
    if client is not None:
        client.send(Failure(reason=reason, message=message))
    return reaction(reason).exit_code


class _Host:
    """Loading and serving of one connected engine process."""

    def __init__(
        self,
        client: EngineLinkClient,
        settings: EngineSettings,
        heavy: BackgroundImport,
        live: LiveStats,
        log: EventLogger,
    ) -> None:
        self._client = client
        self._live = live
        self._inbox = Inbox(client.inbox)
        self._settings = settings
        self._heavy = heavy
        self._log = log
        self._files = HostFiles()
        self._on_gpu = False

    def run(self, pool: ReceivedPool, model_dir: Path) -> int:
        """Load, build, warm up, tell control, serve; the exit code."""
        settings, client = self._settings, self._client
        client.set_busy(True)
        gpus = find_gpus()
        backend = None
        device = choose_device(settings, gpus)
        self._on_gpu = device is Device.CUDA and settings.backend != "cpu"
        if device is Device.NONE or settings.backend == "cpu":
            backend = choose_backend(settings, gpus)
        self._tell(LoadStage.ATTACH)
        directory = FtwDirectory(model_dir)
        cpus = read_cpu_choice(self._files, settings.threads_count)
        attached = attach_pool(
            pool,
            directory,
            read_host_memory(self._files),
            nodes=numa_nodes(self._files, cpus.cpus),
            progress=self._reading,
            cancel=self._inbox.stop,
        )
        self._tell(LoadStage.PREPARE)
        build = self._heavy.builder()
        built = build(
            directory,
            attached.mapping.region_address,
            settings,
            cpus.cpus,
            read_host_memory(self._files),
            gpus,
            client.progress,
        )
        backend = built.backend or backend
        if backend is None:
            raise InternalError("an engine was built without saying what computes")
        client.watch(built.finished_ops)
        self._log.info("kv-sized", split=built.kv_plan.split)
        self._tell(LoadStage.WARM_UP)
        probe = TokenProbe(built.engine, built.allocator, built.facts.bos_token_id or 0)
        first_token_s = probe.run()
        follower = _follower(built, self._log)
        parts = _parts(directory, attached, built, cpus, settings)
        loop = self._loop(directory, attached, built, probe, backend.backend, follower, parts)
        self._live.source = loop.stats
        if built.cache is not None:
            self._live.cache_source = _counters(built.cache, follower)
        client.set_busy(False)
        described = self._describe(directory, attached, built, backend, first_token_s, cpus)
        client.send(described)
        self._log.info(
            "engine-ready",
            backend=described.backend,
            kernel=described.kernel,
            numerics=described.numerics,
            expert_format=described.expert_format,
            dense_formats=",".join(described.dense_formats),
            cpus=",".join(str(cpu) for cpu in cpus.cpus),
            threads_reason=cpus.reason,
            pool_page_bytes=described.pool_page_bytes,
        )
        if settings.pin_pool:
            attached.mapping.pin()
        try:
            with pinned_thread(cpus.cpus[0]):  # the executor's first: this thread calls it
                return loop.run()
        finally:
            if built.cache is not None:
                built.cache.close()  # before the pool goes that it copies from
            if attached.mapping.pinning is not None:
                attached.mapping.pinning.abort()

    def _loop(
        self,
        directory: FtwDirectory,
        attached: AttachedPool,
        built: BuiltEngine,
        probe: TokenProbe,
        backend: str,
        follower: SplitFollower | None,
        parts: BandwidthParts,
    ) -> StepLoop:
        client = self._client
        return StepLoop(
            inbox=self._inbox,
            link=client,
            scheduler=built.scheduler,
            engine=built.engine,
            probe=probe.run,
            gauges=lambda stats: _with_gauges(stats, attached, built),
            log=self._log,
            commands=LoopCommands(
                cache=CacheCommands(
                    built.cache,
                    send=client.send,
                    log=self._log,
                    progress=client.progress,
                    experts_per_layer_count=directory.index.expert_bank.experts_per_layer_count,
                    backend=backend,
                    kv=built.kv,
                    sleeper=_sleeper(built, probe),
                ),
                traces=TraceCommands(
                    _traced(directory, built),
                    send=client.send,
                    waiting_bytes=client.traced_bytes,
                    log=self._log,
                ),
                beside=_pinning(built, self._log),
                split=follower or NoSplit(),
                bandwidth=BandwidthCommands(parts, send=client.send, log=self._log),
            ),
        )

    def _tell(self, stage: LoadStage, done_bytes: int = 0, total_bytes: int = 0) -> None:
        self._client.progress()
        self._client.send(
            LoadProgress(
                stage=stage,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                on_gpu=self._on_gpu and stage in (LoadStage.PREPARE, LoadStage.WARM_UP),
            )
        )

    def _reading(self, done_bytes: int, total_bytes: int) -> None:
        self._inbox.peek()  # a shutdown must not wait for the disk
        self._tell(LoadStage.READ, done_bytes, total_bytes)

    def _describe(
        self,
        directory: FtwDirectory,
        attached: AttachedPool,
        built: BuiltEngine,
        backend: BackendChoice,
        first_token_s: float,
        cpus: CpuChoice,
    ) -> EngineDescription:
        bank = directory.index.expert_bank
        return EngineDescription(
            model=self._settings.model,
            device="cpu" if built.cache is None else _device_text(built),
            device_name=built.device_name or cpu_name(self._files),
            backend=backend.backend,
            backend_reason=backend.reason,
            kernel=built.kernel,
            threads_count=built.threads_count,
            servable_context_tokens=built.kv_plan.servable_context_tokens,
            kv_bytes=built.kv_plan.kv_bytes,
            pool_bytes=directory.index.region_bytes,
            # as the kernel has mapped it by now: the warm-up token has touched the weights
            pool_page_bytes=attached.mapping.pages().page_bytes,
            pool_reattached=attached.reattached,
            attach_s=attached.attach_s,
            load_s=attached.load_s,
            load_bytes_per_s=attached.load_bytes_per_s,
            first_token_s=first_token_s,
            layers_count=built.facts.layers_count,
            moe_layers_count=bank.moe_layers_count,
            experts_per_layer_count=bank.experts_per_layer_count,
            bytes_per_expert=bank.record_bytes,
            max_running_count=self._settings.max_running_count,
            numerics=built.numerics,
            expert_format=bank.format if bank.experts_count else "",
            dense_formats=built.dense_formats,
            cpus=cpus.cpus,
            threads_reason=cpus.reason,
            notes=(*backend.notes, *attached.notes, *built.notes),
            cache=built.cache_description,
            device_uuid=_device_uuid(built, self._settings),
            memory=built.memory,
        )


def _device_text(built: BuiltEngine) -> str:
    return f"{built.device}:{built.device_uuid}" if built.device_uuid else built.device


def _device_uuid(built: BuiltEngine, settings: EngineSettings) -> str:
    """Of the GPU that is used, or that ordinary memory stands for as configured."""
    stands_for = built.cache is not None and settings.gpu.startswith("GPU-")
    return built.device_uuid or (settings.gpu if stands_for else "")


def _sleeper(built: BuiltEngine, probe: TokenProbe) -> ElasticSleeper | None:
    if built.cache is None or built.kv is None:
        return None
    return ElasticSleeper(built.cache, built.kv, built.scheduler, probe.run, built.trim)


def _parts(
    directory: FtwDirectory,
    attached: AttachedPool,
    built: BuiltEngine,
    cpus: CpuChoice,
    settings: EngineSettings,
) -> BandwidthParts:
    """What can be measured; torch is there by now."""
    parts = importlib.import_module(PARTS_MODULE)
    made: BandwidthParts = parts.bandwidth_parts(
        parts.machine_of(
            directory,
            attached.mapping.region_address,
            cpus.cpus,
            numerics=built.numerics,
            link_bytes_per_s=float(settings.link_bytes_per_s) or None,
            fills=built.cache is not None and built.device == Device.HOST.value,
        )
    )
    return made


def _follower(built: BuiltEngine, log: EventLogger) -> SplitFollower | None:
    return None if built.followed is None else SplitFollower(built.followed, log=log)


def _counters(cache: CacheControl, follower: SplitFollower | None) -> Callable[[], CacheCounters]:
    """The cache's, with how misses are split now."""
    if follower is None:
        return cache.counters
    return lambda: replace(cache.counters(), split=follower.counters())


def _pinning(built: BuiltEngine, log: EventLogger) -> Callable[[], bool]:
    """Pins a part of the pool, and says at the end what became of it."""
    pinning = built.pinning
    if pinning is None:
        return lambda: False

    def pin() -> bool:
        if pinning.pin():
            return True
        tell = log.warning if pinning.pin_note else log.info
        tell("pool-registered", pinned_bytes=pinning.pinned_bytes, cause=pinning.pin_note)
        return False

    return pin


def _traced(directory: FtwDirectory, built: BuiltEngine) -> Traced | FreetokenError:
    """What can be recorded, or why nothing can."""
    bank = directory.index.expert_bank
    if not bank.experts_count or built.taps is None:
        return no_experts()
    return Traced(
        taps=built.taps,
        shape=TraceShape(
            layers_count=bank.moe_layers_count,
            experts_per_layer=bank.experts_per_layer_count,
            experts_per_token=built.facts.experts_per_token_count,
        ),
        source=trace_source(directory.index),
    )


def _with_gauges(stats: EngineStats, attached: AttachedPool, built: BuiltEngine) -> EngineStats:
    """Statistics with what the loop does not know: the pool and the experts."""
    stats = replace(
        stats,
        pool_bytes=attached.mapping.region_bytes,
        expert_executions_count=built.expert_executions(),
    )
    if built.kv is not None:
        kv = built.kv
        stats = replace(
            stats, kv_pages_capacity_count=kv.capacity_count, kv_bytes=kv.committed_bytes
        )
    if built.memory is not None:
        held = asleep_bytes if stats.asleep else fixed_bytes
        stats = replace(stats, fixed_held_bytes=held(built.memory))
    if attached.mapping.pinning is not None:
        state = attached.mapping.pinning.state()
        stats = replace(
            stats,
            pool_pinned_bytes=state.pinned_bytes,
            pin_s=state.elapsed_s,
            pin_done=state.done,
            pin_note=state.note,
        )
    if built.pinning is not None and built.pinning.pin_note:
        # What a GPU cannot read is worse than what may be swapped out.
        stats = replace(
            stats,
            pool_pinned_bytes=built.pinning.pinned_bytes,
            pin_done=True,
            pin_note=built.pinning.pin_note.removesuffix("."),
        )
    return stats
