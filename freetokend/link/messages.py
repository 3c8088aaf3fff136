"""Typed values that cross between `serving`/`control` and the engine; no protobuf above `link`."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, Self

from freetokend.core.cache_stats import CacheCounters
from freetokend.core.errors import Reason
from freetokend.link.bandwidth_messages import BandwidthMessage, MeasureBandwidth
from freetokend.link.engine_settings import EngineSettings as EngineSettings  # noqa: PLC0414
from freetokend.link.trace_messages import TraceCommand, TraceMessage
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.vram_budget import VramFacts

LINK_VERSION: Final = 4
"""Rises with every incompatible change of link.proto; both ends must say the same."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings; the defaults change nothing. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate, already validated and tokenized."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUpdate:
    """New tokens of one sequence and, on the last update, how it ended and what it used.

    `token_ids` never contains the stop token; `completion_tokens` counts it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error_reason: Reason | None = None
    error_message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class LoadStage(StrEnum):
    """The stages of `LoadProgress`, in order."""

    ATTACH = "attach"
    READ = "read"
    PREPARE = "prepare"
    WARM_UP = "warm_up"


class EngineState(StrEnum):
    """The life of the engine as control sees it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"  # the restart budget is spent, or a restart cannot help
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far the engine has come before it is ready. `stage` is a value of `LoadStage`.

    `on_gpu`: it uses a GPU, or tries to.
    """

    stage: str
    done_bytes: int
    total_bytes: int
    on_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """What `layers_count` neighbouring MoE layers do with their misses, and why."""

    layers_count: int
    branch: LayerBranch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDescription:
    """The expert cache of an engine that has one.

    `slots_count`: at the start; `slots_capacity`: the most there can be. `layer_runs`: all MoE
    layers in their order. `fill_rate_source`: where the rates of the fill table come from, in
    words.
    """

    slots_count: int
    slots_capacity: int
    layer_runs: tuple[LayerRun, ...] = ()
    fill_rate_source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What a ready engine says of itself (proto `Ready`).

    `device` is what holds the slots ("host", "cuda:GPU-..."), or "cpu" without a cache.

    `numerics` is what is really computed, "exact" or "fast"; formats are names of weight formats,
    `expert_format` "" without experts; `threads_reason` says why it is these `cpus`.

    `device_uuid`: of the GPU that is used, or "". `memory`: what its memory is divided by, without
    what changes (free, own, cushion); None when nothing is on a device.
    """

    model: str
    device: str
    device_name: str
    backend: str
    backend_reason: str
    kernel: str
    threads_count: int
    servable_context_tokens: int
    kv_bytes: int
    pool_bytes: int
    pool_page_bytes: int
    pool_reattached: bool
    attach_s: float
    load_s: float
    load_bytes_per_s: float
    first_token_s: float
    layers_count: int
    moe_layers_count: int
    experts_per_layer_count: int
    bytes_per_expert: int
    max_running_count: int
    numerics: str
    expert_format: str
    dense_formats: tuple[str, ...]
    cpus: tuple[int, ...]
    threads_reason: str
    notes: tuple[str, ...] = ()
    cache: CacheDescription | None = None
    device_uuid: str = ""
    memory: VramFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters and gauges of the engine (proto `EngineStats`).

    `kv_pages_capacity_count` 0: KV pages are not resized. `generation`: the highest that came.
    """

    running_count: int = 0
    waiting_count: int = 0
    kv_pages_used_count: int = 0
    kv_pages_total_count: int = 0
    steps_count: int = 0
    prefill_tokens_count: int = 0
    decode_tokens_count: int = 0
    step_s: float = 0.0
    pool_pinned_bytes: int = 0
    pool_bytes: int = 0
    pin_s: float = 0.0
    pin_done: bool = False
    pin_note: str = ""
    expert_executions_count: int = 0
    preemptions_count: int = 0
    sweeps_count: int = 0
    prefill_pending_tokens_count: int = 0
    prefill_tokens_per_s: float = 0.0
    kv_pages_capacity_count: int = 0
    kv_bytes: int = 0
    servable_context_tokens: int = 0
    longest_context_tokens: int = 0
    waiting_prompt_tokens: int = 0
    asleep: bool = False
    fixed_held_bytes: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The engine's first message: the secret of its spawn and what it is."""

    token: str
    link_version: int
    pid: int
    kind: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one engine step (or several, when control reads slowly) brought."""

    step_index: int
    outputs: tuple[SequenceUpdate, ...] = ()
    stats: EngineStats = EngineStats()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent every second by a thread of its own; `progress_count` moves while work advances.

    `cache`: None without an expert cache.
    """

    progress_count: int
    busy: bool
    stats: EngineStats = EngineStats()
    cache: CacheCounters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The engine's last words: why it is about to exit."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Drop this request; it is answered with `FinishReason.CANCELLED` if it still ran."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Exit; with `drain`, finish the accepted requests first."""

    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLogLevel:
    """Change the engine's log level."""

    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeCache:
    """Have this many slots and KV pages at the next safe point; `kv_pages_count` None: leave them.

    Idempotent: a command of a generation that was done is only answered again, one that is older
    than another the engine has seen is not done.
    """

    generation: int
    slots_count: int
    kv_pages_count: int | None = None
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepEngine:
    """Give all memory of the device back and keep the pool. Idempotent as `ResizeCache`."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeEngine:
    """Take memory of the device again. Idempotent as `ResizeCache`."""

    generation: int
    slots_count: int
    kv_pages_count: int


class ResizeOutcome(StrEnum):
    """What became of a resize, of falling asleep or of waking."""

    DONE = "done"
    UNCHANGED = "unchanged"
    DEFERRED = "deferred"  # not now; the same command may be sent again
    SUPERSEDED = "superseded"  # a newer command had come
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResized:
    """The answer to a `SizeCommand`. Sizes are those that hold now, and those before.

    `stall_s`: no step was computed for so long; `safe_point_wait_s`: how long it waited for that.
    `note`: why it is deferred. `error_reason` is set with FAILED only.
    """

    generation: int
    outcome: ResizeOutcome
    slots_count: int = 0
    slots_before_count: int = 0
    committed_bytes: int = 0
    committed_before_bytes: int = 0
    kv_pages_count: int = 0
    kv_pages_before_count: int = 0
    kv_bytes: int = 0
    kv_before_bytes: int = 0
    moved_count: int = 0
    dropped_count: int = 0
    stall_s: float = 0.0
    safe_point_wait_s: float = 0.0
    note: str = ""
    error_reason: Reason | None = None
    error_message: str = ""

    @property
    def sentence(self) -> str:
        """Why it was not done; empty when it was."""
        return self.error_message or self.note


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCache:
    """Compare every resident slot with the pool between two steps."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDifference:
    """A slot that does not hold its expert's record; `offset_bytes`: where it first differs."""

    layer_index: int
    expert_index: int
    slot_index: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheVerified:
    """The answer to `VerifyCache`; `error_reason` is None when the comparison could be made."""

    request_id: str
    compared_count: int = 0
    compared_bytes: int = 0
    differences: tuple[SlotDifference, ...] = ()
    duration_s: float = 0.0
    error_reason: Reason | None = None
    error_message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """Engine side only, never on the wire: the stream to control is gone, and why."""

    cause: str


SizeCommand = ResizeCache | SleepEngine | WakeEngine
CacheCommand = SizeCommand | VerifyCache
"""What control asks of the device's memory; each is answered exactly once. A `SizeCommand` has a
generation and is answered by a `CacheResized`."""

CacheAnswer = CacheResized | CacheVerified
"""The engine's answers to `CacheCommand`s."""

EngineMessage = (
    Hello
    | LoadProgress
    | EngineDescription
    | StepReport
    | Heartbeat
    | Failure
    | CacheAnswer
    | TraceMessage
    | BandwidthMessage
)
"""What the engine sends."""

ControlMessage = (
    EngineSettings
    | GenerateRequest
    | Cancel
    | Shutdown
    | SetLogLevel
    | CacheCommand
    | TraceCommand
    | MeasureBandwidth
)
"""What control sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Everything control knows of the engine at one instant; immutable, cheap to take.

    `last_progress_s` and `state_since_s` are `time.monotonic()` values. `cause` says why the last
    engine died (empty: it never did). `cache`: as of the last heartbeat.

    `gpu_faults_count`: engines that a GPU ended, since control started; `gpu_fault`: why the GPU is
    not used now, "" where nothing is wrong with it; `gpu_retry_s`: when it is tried again.
    """

    state: EngineState
    state_since_s: float
    model: str
    pid: int | None = None
    description: EngineDescription | None = None
    stats: EngineStats = EngineStats()
    cache: CacheCounters | None = None
    load: LoadProgress | None = None
    busy: bool = False
    last_progress_s: float = 0.0
    restarts_count: int = 0
    cause: str = ""
    next_restart_s: float | None = None
    gpu_faults_count: int = 0
    gpu_fault: str = ""
    gpu_retry_s: float | None = None


class SequenceStream(Protocol):
    """The updates of one request: an async iterator that can be closed, as generators are."""

    def __aiter__(self) -> Self:
        """Itself."""
        ...

    def __anext__(self) -> Awaitable[SequenceUpdate]:
        """The next update; StopAsyncIteration after the one with a `finish_reason`."""
        ...

    def aclose(self) -> Awaitable[None]:
        """Cancel unless the last update was read. Idempotent."""
        ...

    def finish(self) -> Awaitable[None]:
        """As `aclose`, by a reader that has all it wants: the sequence counts as stopped."""
        ...


class EngineGateway(Protocol):
    """What `serving` and `control` see of the engine. Owned by the control process's event loop."""

    def snapshot(self) -> EngineSnapshot:
        """The present state; never blocks."""
        ...

    def check_admission(self) -> None:
        """Raises what `generate` would raise now, to be asked before any work on a request.

        The one place that words a refusal: `UnavailableError` (loading, draining, engine
        unavailable, queue full) with a short cause, fit for clients.
        """
        ...

    def generate(self, request: GenerateRequest) -> SequenceStream:
        """Submit and stream updates; the last one has `finish_reason`.

        Raises as `check_admission` does, before anything was submitted. Engine death ends the
        stream with a `finish_reason` ERROR update of reason ENGINE_FAILED. Closing the iterator
        (`aclose`) cancels within one step.
        """
        ...

    async def changed(self, generation: int) -> int:
        """Wait until the snapshot's generation exceeds `generation`; returns the new one."""
        ...
