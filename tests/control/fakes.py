"""A gateway and operations under the test's hand, and the configuration they run with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from freetokend.core import logs
from freetokend.core.cache_stats import Bandwidth, CacheCounters, LayerCounters, SplitCounters
from freetokend.core.config import (
    EnvironmentFacts,
    ResolvedConfig,
    gather_facts,
    load_config,
    resolve,
)
from freetokend.core.errors import FreetokenError
from freetokend.link.bandwidth_messages import BandwidthMeasured
from freetokend.link.messages import (
    CacheDescription,
    CacheResized,
    CacheVerified,
    EngineDescription,
    EngineSnapshot,
    EngineState,
    EngineStats,
    GenerateRequest,
    LayerRun,
    ResizeCache,
    ResizeOutcome,
    SequenceUpdate,
    SizeCommand,
    SleepEngine,
    WakeEngine,
)
from freetokend.link.trace_messages import RoutedRows, TracedStep, TraceEnded, TraceStarted
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.vram_budget import VramFacts

DESCRIPTION = EngineDescription(
    model="demo",
    device="cpu",
    device_name="Some CPU",
    backend="cpu",
    backend_reason="no NVIDIA GPU is present",
    kernel="avx2",
    threads_count=4,
    servable_context_tokens=32768,
    kv_bytes=1 << 30,
    pool_bytes=10 << 30,
    pool_page_bytes=2 << 20,
    pool_reattached=True,
    attach_s=0.02,
    load_s=7.5,
    load_bytes_per_s=1.5e9,
    first_token_s=0.4,
    layers_count=30,
    moe_layers_count=28,
    experts_per_layer_count=8,
    bytes_per_expert=5 << 20,
    max_running_count=64,
    numerics="fast",
    expert_format="mxfp4",
    dense_formats=("int8_g32_f16", "bf16"),
    cpus=(0, 1, 2, 3),
    threads_reason="one per physical core",
)
PINNED = EngineStats(pool_pinned_bytes=10 << 30, pool_bytes=10 << 30, pin_done=True)


MEMORY = VramFacts(
    free_bytes=None,
    own_bytes=0,
    dense_bytes=1 << 30,
    workspace_bytes=256 << 20,
    state_bytes=0,
    graph_bytes=0,
    record_bytes=5 << 20,
    experts_count=24,
    experts_per_layer_count=8,
    top_k=2,
    kv_page_bytes=1 << 20,
    kv_page_tokens=32,
    model_context_tokens=32768,
    max_running_count=64,
    on_host=True,
    cushion_bytes=0,
)


# Of an engine with a cache, which the fake gateway's is not until a test sets these.
CACHED = replace(
    DESCRIPTION,
    device="host",
    device_name="ordinary memory",
    backend="hybrid",
    backend_reason='engine.backend = "hybrid"',
    moe_layers_count=3,
    cache=CacheDescription(
        slots_count=8,
        slots_capacity=24,
        layer_runs=(
            LayerRun(layers_count=2, branch=LayerBranch.SPLIT, reason="split by the rates"),
            LayerRun(layers_count=1, branch=LayerBranch.CPU, reason="set for this layer"),
        ),
        fill_rate_source="measured at the start",
    ),
    memory=MEMORY,
)
CACHE = CacheCounters(
    slots_count=12,
    slots_capacity=24,
    resident_count=10,
    slot_bytes=5 << 20,
    committed_bytes=60 << 20,
    generation=2,
    layers=(
        LayerCounters(hits_count=75, misses_count=25, fills_count=10, cpu_count=15),
        LayerCounters(hits_count=50, misses_count=50, fills_count=50, evictions_count=7),
        LayerCounters(),
    ),
    fill_counts=((0, 1, 1, 1, 1, 2), (0, 1, 2, 2, 3, 3)),
    fills_count=100,
    fill_bytes=500 << 20,
    fill_busy_s=0.5,
    streamed_count=40,
    split=SplitCounters(
        branch="split",
        bandwidths=(
            Bandwidth(link="fill", beside=True, bytes_per_s=11e9, source="passive", age_s=0.5),
            Bandwidth(link="cpu", beside=False, bytes_per_s=47e9, source="profile", age_s=90.0),
        ),
        fill_fixed_s=5e-6,
        cpu_fixed_s=4e-6,
        regret_ratio=0.01,
        trials_count=9,
        fallbacks_count=1,
        tables_count=3,
    ),
)

GRANULE = 2 << 20
# As a heartbeat tells them of an engine that is CACHED.
CACHED_STATS = replace(
    PINNED, kv_pages_total_count=1024, kv_pages_capacity_count=2048, kv_bytes=1 << 30
)


class FakeStream:
    """A generator's updates, as a gateway's stream."""

    def __init__(self, updates: AsyncGenerator[SequenceUpdate, None]) -> None:
        self._updates = updates

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> SequenceUpdate:
        return await anext(self._updates)

    async def aclose(self) -> None:
        await self._updates.aclose()

    async def finish(self) -> None:
        await self._updates.aclose()


class FakeGateway:
    """An `EngineGateway` whose snapshot and answers the test sets."""

    def __init__(self, state: EngineState = EngineState.READY) -> None:
        ready = state is EngineState.READY
        self._snapshot = EngineSnapshot(
            state=state,
            state_since_s=0.0,
            model="demo",
            pid=4711 if ready else None,
            description=DESCRIPTION if ready else None,
            stats=PINNED if ready else EngineStats(),
        )
        self._generation = 1
        self._change = asyncio.Event()
        self.answer: list[SequenceUpdate | FreetokenError] = []
        self.refusal: FreetokenError | None = None
        self.closed_count = 0

    def set(self, **changes: Any) -> None:
        """Change fields of the snapshot and tell those who wait."""
        self._snapshot = replace(self._snapshot, **changes)
        self._generation += 1
        change, self._change = self._change, asyncio.Event()
        change.set()

    def set_stats(self, **changes: Any) -> None:
        """Change fields of the snapshot's statistics."""
        self.set(stats=replace(self._snapshot.stats, **changes))

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    async def changed(self, generation: int) -> int:
        while self._generation <= generation:
            await self._change.wait()
        return self._generation

    def check_admission(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def generate(self, request: GenerateRequest) -> FakeStream:
        self.check_admission()
        return FakeStream(self._updates())

    async def _updates(self) -> AsyncGenerator[SequenceUpdate, None]:
        try:
            for item in self.answer:
                if isinstance(item, FreetokenError):
                    raise item
                yield item
        finally:
            self.closed_count += 1


class FakeRecording:
    """Steps that are there at once, then the end, or a wait for ever."""

    def __init__(self) -> None:
        self.items: list[TracedStep | TraceEnded] = []
        self.closed = asyncio.Event()

    async def next(self) -> TracedStep | TraceEnded:
        if self.items:
            return self.items.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    def close(self) -> None:
        self.closed.set()


def traced_step(*parts: tuple[bool, list[list[list[int]]]]) -> TracedStep:
    """Parts: whether a prompt is read, and ids [layers][rows][k]."""
    return TracedStep(
        trace_id="t",
        parts=tuple(
            RoutedRows(
                is_prefill=is_prefill,
                rows_count=len(ids[0]),
                expert_ids=np.array(ids, dtype="<u2").tobytes(),
            )
            for is_prefill, ids in parts
        ),
    )


class FakeOperations:
    """`ServiceOperations` that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.commands: list[SizeCommand] = []
        self.sizes = (CACHE.slots_count, CACHED_STATS.kv_pages_total_count)
        self.command_error: FreetokenError | None = None
        # Control asks by itself too.
        self.measured_parts: list[tuple[str, ...]] = []
        self.measured = BandwidthMeasured(run_id="r", interrupted="a request came")
        self.outcome = ResizeOutcome.DONE
        self.note = ""
        self.still_running_count = 0
        self.error: Exception | None = None
        self.verified = CacheVerified(request_id="v", compared_count=10, compared_bytes=1 << 20)
        self.started = TraceStarted(
            trace_id="t",
            layers_count=2,
            experts_per_layer_count=8,
            experts_per_token_count=2,
            source="made up",
        )
        self.recording = FakeRecording()
        self.stop_requested = asyncio.Event()

    async def drain(self, timeout_s: float) -> int:
        self.calls.append(("drain", timeout_s))
        if self.error is not None:
            raise self.error
        return self.still_running_count

    def resume(self) -> None:
        self.calls.append(("resume", None))

    def request_stop(self, *, drain: bool) -> None:
        self.calls.append(("stop", drain))
        self.stop_requested.set()

    async def resize_engine(self, command: SizeCommand) -> CacheResized:
        """Does it at once, unless `outcome` says otherwise; `command_error` is raised instead."""
        self.commands.append(command)
        if self.command_error is not None:
            raise self.command_error
        if self.outcome in (ResizeOutcome.DONE, ResizeOutcome.UNCHANGED):
            match command:
                case ResizeCache() | WakeEngine():
                    pages_count = command.kv_pages_count
                    self.sizes = (
                        command.slots_count,
                        self.sizes[1] if pages_count is None else pages_count,
                    )
                case SleepEngine():
                    self.sizes = (0, 0)
        slots_count, pages_count = self.sizes
        return CacheResized(
            generation=command.generation,
            outcome=self.outcome,
            slots_count=slots_count,
            committed_bytes=-(-slots_count * CACHE.slot_bytes // GRANULE) * GRANULE,
            kv_pages_count=pages_count,
            kv_bytes=pages_count * MEMORY.kv_page_bytes,
            stall_s=0.0125,
            safe_point_wait_s=0.25,
            note=self.note,
        )

    def refuse_waiting(self, message: str) -> int:
        self.calls.append(("refuse-waiting", message))
        return 0

    async def measure_bandwidth(
        self,
        *,
        parts: tuple[str, ...] = (),
        limit_s: float,
        progress: Callable[[str], None] = lambda part: None,
    ) -> BandwidthMeasured:
        self.measured_parts.append(parts)
        if self.error is not None:
            raise self.error
        for part in parts or ("memory", "cpu"):
            progress(part)
        return self.measured

    async def verify_cache(self) -> CacheVerified:
        self.calls.append(("verify-cache", None))
        if self.error is not None:
            raise self.error
        return self.verified

    async def record_trace(self) -> tuple[TraceStarted, FakeRecording]:
        self.calls.append(("record-trace", None))
        if self.error is not None:
            raise self.error
        return self.started, self.recording

    def set_log_level(self, level: str) -> str:
        self.calls.append(("log-level", level))
        return logs.set_log_level(level)


def facts() -> EnvironmentFacts:
    """This machine's facts, as if it had no GPU."""
    return replace(gather_facts(), nvidia_driver="", nvidia_cards=())


def config(runtime_dir: Path, **overrides: object) -> ResolvedConfig:
    """A configuration whose sockets lie in `runtime_dir`; `http__port` stands for http.port."""
    asked: dict[str, object] = {
        "model.path": "/models/demo",
        "service.runtime_dir": str(runtime_dir),
        "service.state_dir": str(runtime_dir / "state"),
    }
    asked |= {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve(
        load_config(
            overrides=asked,
            vendor_file=Path("/nonexistent"),
            system_file=Path("/nonexistent/freetokend.toml"),
        ),
        facts(),
    )
