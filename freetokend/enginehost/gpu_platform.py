"""An NVIDIA GPU as `CudaPlatform`. Imports Triton: only where there is one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch

from freetokend.core.errors import Reason, ResourceError
from freetokend.device.arena import Arena
from freetokend.device.copier import SlotCopier
from freetokend.device.cuda_arena import CudaArena, CudaCopier
from freetokend.device.cuda_driver import CudaDriver, CudaError, DeviceMemory
from freetokend.device.cuda_pinning import HostRegistration
from freetokend.engine.graphs import CudaGraphBackend, GraphBackend
from freetokend.enginehost.cpu_start import choose_start
from freetokend.enginehost.cuda_platform import (
    DECODE_ROWS,
    AttentionStore,
    ChosenFork,
    ClosableTransfers,
    KvNeeds,
    SlotOps,
)
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.cpu_fork import HostBuffers, StreamFork
from freetokend.experts.gpu.device_cache import Registration
from freetokend.experts.gpu.doorbells import TritonDoorbell
from freetokend.experts.gpu.fill_kernel import fill_records
from freetokend.experts.gpu.merge_kernel import merge_branches
from freetokend.experts.gpu.slot_experts import SlotExperts
from freetokend.experts.gpu.transfers import current_stream, queue_in, torch_transfers
from freetokend.experts.plan.contract import CachePlanner, PlanShape
from freetokend.experts.plan.triton_kernel import TritonPlanner
from freetokend.experts.residency import ResidencyState
from freetokend.experts.slot_pool import SlotPool
from freetokend.kvcache.gpu.elastic_pages import ElasticPages
from freetokend.kvcache.gpu.flashinfer_store import choose_attention
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.kvcache.gpu.triton_store import TritonKvStore
from freetokend.native.cpu_branch import CpuBranch
from freetokend.policy.eviction import default_order
from freetokend.policy.kernel_choice import Capability


class GpuPlatform:
    """The first GPU that the process sees."""

    def __init__(self) -> None:
        """ResourceError when torch or the driver cannot use it."""
        if not torch.cuda.is_available():
            raise ResourceError(
                f"torch {torch.__version__} cannot use a GPU: install a build of it for CUDA "
                "beside freetokend, or choose the cpu backend.",
                reason=Reason.DEVICE_UNUSABLE,
            )
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self._driver = CudaDriver(0)
        self.copier: SlotCopier = CudaCopier(self._driver)
        self.pins = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def uuid(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    @property
    def capability(self) -> Capability:
        return torch.cuda.get_device_capability(self.device)

    def memory(self) -> DeviceMemory:
        """As of `CudaPlatform`, here and below."""
        return self._driver.memory()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        gc.collect()  # graphs and tensors that refer to each other
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def new_arena(self, reserved_bytes: int) -> Arena:
        return CudaArena(self._driver, reserved_bytes)

    def new_planner(
        self, state: ResidencyState, layers_count: int
    ) -> Callable[[PlanShape], CachePlanner]:
        order = default_order(layers_count)
        return lambda shape: TritonPlanner(state, shape, order)

    def new_ops(
        self, mapped: MappedBank, pool: SlotPool, *, rows_capacity: int, top_k: int
    ) -> SlotOps:
        bank = mapped.bank
        experts = SlotExperts(
            bank,
            base_address=pool.base_address,
            slot_bytes=pool.record_bytes,
            slots_count=pool.state.slots_count,
            tokens_capacity=rows_capacity,
            top_k=top_k,
        )

        def slots(
            x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
        ) -> None:
            run = experts.decode if x.shape[0] <= DECODE_ROWS else experts.prefill
            run(x, physical, weights, y, keep_others=True)

        fill = partial(
            fill_records,
            bank_address=mapped.region_address + bank.offset_bytes,
            slots_address=pool.base_address,
            record_bytes=bank.record_bytes,
        )
        return SlotOps(fill=fill, slots=slots, merge=merge_branches)

    def new_fork(self, branch: CpuBranch, buffers: HostBuffers) -> ChosenFork:
        fork = StreamFork(self._driver, branch, buffers, current_stream)
        doorbell = TritonDoorbell(branch, buffers, self.device, queue_in=queue_in)
        try:
            reason = choose_start(
                fork, doorbell, buffers, self.new_backend(), self.device, self.synchronize
            )
        except BaseException:
            fork.close()
            raise
        return ChosenFork(fork=fork, reason=reason)

    def new_backend(self) -> GraphBackend:
        return CudaGraphBackend()

    def new_registration(self, address: int, length_bytes: int) -> Registration:
        return HostRegistration(self._driver, address, length_bytes)

    def new_transfers(self) -> ClosableTransfers:
        return torch_transfers(self._driver)

    def new_kv(self, needs: KvNeeds) -> AttentionStore:
        memory, pages, fixed = self._new_pages(needs)
        chosen = choose_attention(
            needs.asked,
            TritonKvStore(pages, context_tokens=needs.context_tokens),
            q_heads_count=needs.q_heads_count,
        )
        return AttentionStore(
            store=chosen.store, reason=f"{chosen.name}: {chosen.reason}{fixed}", memory=memory
        )

    def kv_granularity_bytes(self, layers_count: int) -> int:
        return 2 * layers_count * self._driver.granularity_bytes

    def _new_pages(self, needs: KvNeeds) -> tuple[ElasticPages | None, DevicePages, str]:
        """Pages that can be resized; where torch or the driver do not play along, pages of torch,
        and a clause that says why."""
        granule = self._driver.granularity_bytes
        try:
            elastic = ElasticPages(
                needs.shape,
                needs.pages_count,
                capacity_count=needs.capacity_count,
                new_arena=lambda size: CudaArena(self._driver, size, chunk_bytes=granule),
                tensor_at=self._tensor_at,
            )
        except (CudaError, RuntimeError, TypeError, ValueError) as error:
            pages = DevicePages.take(needs.shape, needs.pages_count, self.device)
            return None, pages, f"; KV pages are not resized: {error}"
        return elastic, elastic.pages, ""

    def _tensor_at(self, address: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.as_tensor(_DeviceArray(address, shape), device=self.device).view(
            torch.bfloat16
        )


class _DeviceArray:
    """Numbers of 16 bits at an address, as torch takes them from others without a copy."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<i2",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
