"""What an engine on a GPU is made of, so that it can be put together without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from freetokend.device.arena import Arena
from freetokend.device.copier import SlotCopier
from freetokend.device.cuda_driver import DeviceMemory
from freetokend.engine.graphs import GraphBackend
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.cpu_fork import CpuFork, HostBuffers
from freetokend.experts.gpu.device_cache import Registration
from freetokend.experts.gpu.dispatch import FillRecords, MergeBranches, SlotExpertsCall
from freetokend.experts.gpu.transfers import Transfers
from freetokend.experts.plan.contract import CachePlanner, PlanShape
from freetokend.experts.residency import ResidencyState
from freetokend.experts.slot_pool import SlotPool
from freetokend.kvcache.arena import KvMemory
from freetokend.kvcache.batch import KvStore
from freetokend.native.cpu_branch import CpuBranch
from freetokend.policy.kernel_choice import Capability
from freetokend.policy.kv_sizing import KvShape

# Up to so many rows every pair reads its expert's weights by itself.
DECODE_ROWS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOps:
    """The device's kernels over a pool of slots."""

    fill: FillRecords
    slots: SlotExpertsCall
    merge: MergeBranches


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNeeds:
    """asked: whose attention, as of `engine.attention`; context_tokens: the most of a sequence.
    capacity_count: the most pages there can be."""

    asked: str
    shape: KvShape
    pages_count: int
    capacity_count: int
    q_heads_count: int
    context_tokens: int


class ClosableKvMemory(KvMemory, Protocol):
    """Closed when the device has been waited for."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStore:
    """reason: why this one, for people. memory: None where the number of pages is fixed."""

    store: KvStore
    reason: str
    memory: ClosableKvMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenFork:
    """reason: how it starts the CPU and why so, for people."""

    fork: CpuFork
    reason: str


class ClosableTransfers(Transfers, Protocol):
    """Closed when the device has been waited for."""

    def close(self) -> None: ...


class CudaPlatform(Protocol):
    """A device. Everything that it makes is closed before it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """Of the device, for people."""
        ...

    @property
    def uuid(self) -> str:
        """As the driver's other tools write it; empty where it is not known."""
        ...

    @property
    def capability(self) -> Capability:
        """As kernels are chosen by."""
        ...

    @property
    def copier(self) -> SlotCopier: ...

    @property
    def pins(self) -> bool:
        """Whether memory shared with it has to be pinned."""
        ...

    def memory(self) -> DeviceMemory: ...

    def synchronize(self) -> None: ...

    def release(self) -> None:
        """Give back what is kept to be used again and not in use: between two steps, or when
        everything that it made was closed and nobody will use it any more."""
        ...

    def new_arena(self, reserved_bytes: int) -> Arena: ...

    def new_planner(
        self, state: ResidencyState, layers_count: int
    ) -> Callable[[PlanShape], CachePlanner]: ...

    def new_ops(
        self, mapped: MappedBank, pool: SlotPool, *, rows_capacity: int, top_k: int
    ) -> SlotOps: ...

    def new_fork(self, branch: CpuBranch, buffers: HostBuffers) -> ChosenFork: ...

    def new_transfers(self) -> ClosableTransfers: ...

    def new_kv(self, needs: KvNeeds) -> AttentionStore: ...

    def kv_granularity_bytes(self, layers_count: int) -> int:
        """In which memory of the pages of all layers comes and goes."""
        ...

    def new_backend(self) -> GraphBackend: ...

    def new_registration(self, address: int, length_bytes: int) -> Registration: ...
