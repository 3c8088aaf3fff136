"""What building an engine gives, without torch in sight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import ModelFacts
from freetokend.engine.work import StepEngine
from freetokend.enginehost.backend import NO_GPUS, BackendChoice, GpuPresence
from freetokend.enginehost.cache_control import CacheControl
from freetokend.enginehost.kv_control import KvControl
from freetokend.enginehost.split_control import FollowedSplit
from freetokend.enginehost.trace_control import RoutingTaps
from freetokend.ftw.reader import FtwDirectory
from freetokend.kvcache.allocator import PageAllocator
from freetokend.link.messages import CacheDescription, EngineSettings
from freetokend.native.executor import Numerics
from freetokend.policy.kv_sizing import KvPlan
from freetokend.policy.vram_budget import VramFacts
from freetokend.scheduler.scheduler import Scheduler


class LatePinning(Protocol):
    """The pool, registered with a device part by part while it is served from already."""

    @property
    def pinned_bytes(self) -> int:
        """From any thread."""
        ...

    @property
    def pin_note(self) -> str:
        """Why the rest stays pageable; empty while all is well. From any thread."""
        ...

    def pin(self) -> bool:
        """Between two steps: the next part; False when nothing is left to do."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """Everything that serves, and the numbers it was made with.

    `numerics` is what is computed, whatever was asked; `dense_formats`: the weight formats of all
    matrices but the experts', the one with most bytes first.
    `backend`: the choice that took measurements, None where none were needed.
    `finished_ops` counts what the engine has computed and grows during a step; from any thread.
    `cache`, `cache_description`: of the expert cache; None without one. `device`: what holds its
    slots; `device_name`: empty for the CPU's own.
    `taps`: where the choice of experts is seen; None where it is not. `pinning`: of a GPU; None
    without one. `followed`: how misses are split at first; None where nothing can be followed.
    `kv`: None where KV pages are not resized. `memory`: what the device's memory is divided by;
    None when nothing is on a device. `trim`: gives back what is kept to be used again.
    """

    engine: StepEngine
    scheduler: Scheduler
    allocator: PageAllocator
    facts: ModelFacts
    kv_plan: KvPlan
    kernel: str
    numerics: Numerics
    dense_formats: tuple[str, ...]
    threads_count: int
    expert_executions: Callable[[], int]
    finished_ops: Callable[[], int]
    notes: tuple[str, ...]
    backend: BackendChoice | None = None
    cache: CacheControl | None = None
    cache_description: CacheDescription | None = None
    device: str = "host"
    device_name: str = ""
    taps: RoutingTaps | None = None
    pinning: LatePinning | None = None
    kv: KvControl | None = None
    memory: VramFacts | None = None
    trim: Callable[[], None] = lambda: None
    device_uuid: str = ""
    followed: FollowedSplit | None = None


class EngineBuilder(Protocol):
    """Builds an engine over a filled pool.

    `memory` is what is left with the pool in place; `gpus`: what can be seen of them;
    `progress`: called after each part. Raises ModelDataError, ConfigError and ResourceError.
    """

    def __call__(
        self,
        directory: FtwDirectory,
        region_address: int,
        settings: EngineSettings,
        cpus: tuple[int, ...],
        memory: HostMemory,
        gpus: GpuPresence = NO_GPUS,
        progress: Callable[[], None] = lambda: None,
    ) -> BuiltEngine: ...
