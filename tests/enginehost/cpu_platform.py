"""A `CudaPlatform` in ordinary memory: what stands for a GPU's kernels computes on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from freetokend.device.arena import Arena
from freetokend.device.copier import HostCopier, SlotCopier
from freetokend.device.cuda_driver import DeviceMemory
from freetokend.device.host_arena import HostArena
from freetokend.engine.graphs import GraphBackend
from freetokend.enginehost.backend import GpuPresence
from freetokend.enginehost.build import build_engine_on
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.cuda_platform import (
    AttentionStore,
    ChosenFork,
    CudaPlatform,
    KvNeeds,
    SlotOps,
)
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.cpu_fork import HostBuffers, InlineFork
from freetokend.experts.gpu.device_cache import Registration
from freetokend.experts.plan.contract import CachePlanner, PlanShape
from freetokend.experts.plan.native import NativePlanner
from freetokend.experts.residency import ResidencyState
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import EngineSettings
from freetokend.native.cpu_branch import CpuBranch
from freetokend.native.executor import Executor
from freetokend.policy.eviction import default_order
from freetokend.policy.kernel_choice import Capability
from tests.enginehost.local_engine import PLENTY, attach, new_pool
from tests.experts.gpu.reference_ops import ReferenceOps
from tests.support.device_model import DensePages, SmallShape
from tests.support.late_transfers import LateTransfers
from tests.support.recorded_graphs import RepeatingBackend

ONE_GPU: Final = GpuPresence(names=("no GPU at all",))


class PinnedPart:
    """A registration that stops after a part of what it is asked for."""

    def __init__(self, length_bytes: int, share: float) -> None:
        self._limit_bytes = int(share * length_bytes)
        self._note = "" if share >= 1 else "the rest stays pageable"
        self.registered_bytes = 0
        self.closed = False

    @property
    def note(self) -> str:
        return self._note if self.registered_bytes >= self._limit_bytes else ""

    def step(self) -> bool:
        self.registered_bytes = min(self.registered_bytes + 65536, self._limit_bytes)
        return self.registered_bytes < self._limit_bytes

    def close(self) -> None:
        self.closed = True


class CountedPages:
    """Memory of KV pages that is only counted."""

    def __init__(self, page_bytes: int, pages_count: int) -> None:
        self._page_bytes = page_bytes
        self.pages_count = pages_count

    @property
    def committed_bytes(self) -> int:
        return self.pages_count * self._page_bytes

    def claimed_bytes(self) -> int:
        return self.committed_bytes

    def grow_to(self, pages_count: int) -> None:
        self.pages_count = max(self.pages_count, pages_count)

    def shrink_to(self, pages_count: int) -> None:
        self.pages_count = min(self.pages_count, pages_count)

    def close(self) -> None:
        self.pages_count = 0


class CpuPlatform:
    """pinned_share: of the pool, what can be registered. Notes what was made."""

    name = "no GPU at all"
    uuid = ""
    capability: Capability = (8, 6)
    pins = False

    def __init__(self, *, free_bytes: int = 4 << 30, pinned_share: float = 1.0) -> None:
        self.device = torch.device("cpu")
        self.copier: SlotCopier = HostCopier()
        self.backend = RepeatingBackend()
        self.transfers = LateTransfers()
        self.registration: PinnedPart | None = None
        self.kv_memory: CountedPages | None = None
        self.asked_attention = ""
        self.is_released = False
        self._free_bytes, self._pinned_share = free_bytes, pinned_share
        self._executor = Executor(sorted(os.sched_getaffinity(0))[:1])

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free_bytes=self._free_bytes, total_bytes=self._free_bytes)

    def synchronize(self) -> None:
        """Nothing is queued but transfers."""
        self.transfers.synchronize()

    def release(self) -> None:
        self.is_released = True

    def new_arena(self, reserved_bytes: int) -> Arena:
        return HostArena(reserved_bytes)

    def new_planner(
        self, state: ResidencyState, layers_count: int
    ) -> Callable[[PlanShape], CachePlanner]:
        return lambda shape: NativePlanner(state, shape, default_order(layers_count))

    def new_ops(
        self, mapped: MappedBank, pool: SlotPool, *, rows_capacity: int, top_k: int
    ) -> SlotOps:
        ops = ReferenceOps(mapped=mapped, pool=pool, executor=self._executor)
        return SlotOps(fill=ops.fill, slots=ops.slots, merge=ops.merge)

    def new_fork(self, branch: CpuBranch, buffers: HostBuffers) -> ChosenFork:
        return ChosenFork(fork=InlineFork(branch, buffers), reason="a call")

    def new_transfers(self) -> LateTransfers:
        return self.transfers

    def new_kv(self, needs: KvNeeds) -> AttentionStore:
        self.asked_attention = needs.asked
        shape = SmallShape(
            layers=needs.shape.layers_count,
            heads=needs.q_heads_count,
            kv_heads=needs.shape.kv_heads_count,
            head_size=needs.shape.head_size,
            page_tokens=needs.shape.page_tokens,
        )
        self.kv_memory = CountedPages(needs.shape.page_bytes, needs.pages_count)
        return AttentionStore(
            store=DensePages(shape, needs.capacity_count),
            reason="dense pages",
            memory=self.kv_memory,
        )

    def kv_granularity_bytes(self, layers_count: int) -> int:
        return 2 << 20

    def new_backend(self) -> GraphBackend:
        return self.backend

    def new_registration(self, address: int, length_bytes: int) -> Registration:
        self.registration = PinnedPart(length_bytes, self._pinned_share)
        return self.registration

    def close(self) -> None:
        self._executor.close()


@contextmanager
def engine_on(
    platform: CudaPlatform | Callable[[], CudaPlatform],
    directory: FtwDirectory,
    *,
    late: bool = False,
    gpus: GpuPresence = ONE_GPU,
    progress: Callable[[], None] = lambda: None,
    **settings: int | str,
) -> Iterator[BuiltEngine]:
    """An engine as on a GPU, over a pool of its own. platform: or what makes it. late: what is
    pinned while it serves is not pinned yet."""
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    with new_pool(directory) as pool:
        attached = attach(pool, directory)
        with attached.mapping as mapping:
            built = build_engine_on(
                platform if callable(platform) else lambda: platform,
                directory,
                mapping.region_address,
                EngineSettings(model="tiny", **{"device": "cuda", **settings}),  # type: ignore[arg-type]
                cpus,
                PLENTY,
                gpus=gpus,
                progress=progress,
            )
            try:
                while not late and built.pinning is not None and built.pinning.pin():
                    pass
                yield built
            finally:
                if built.cache is not None:
                    built.cache.close()
    if isinstance(platform, CpuPlatform):
        platform.close()
