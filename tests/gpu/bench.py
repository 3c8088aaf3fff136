"""One model with its expert cache on a device, and the same model on the CPU beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from freetokend.device.arena import Arena
from freetokend.device.copier import HostCopier, SlotCopier
from freetokend.device.cuda_arena import CudaArena, CudaCopier
from freetokend.device.cuda_driver import CudaDriver
from freetokend.device.host_arena import HostArena
from freetokend.engine.graphs import CudaGraphBackend, GraphBackend, GraphedProgram, GraphSpec
from freetokend.enginehost.cuda_platform import SlotOps
from freetokend.experts.cpu import CpuExpertDispatch, bank_experts
from freetokend.experts.gpu.cpu_fork import CpuFork, HostBuffers, InlineFork, StreamFork
from freetokend.experts.gpu.dispatch import (
    BranchOps,
    CudaExpertDispatch,
    DispatchSpec,
    FillRecords,
    MergeBranches,
    SlotExpertsCall,
    padded_rows,
)
from freetokend.experts.gpu.fill_kernel import fill_records
from freetokend.experts.gpu.merge_kernel import merge_branches
from freetokend.experts.gpu.slot_experts import SlotExperts
from freetokend.experts.gpu.transfers import current_stream
from freetokend.experts.host_rates import BUCKET_TOKENS
from freetokend.experts.plan.contract import CachePlanner, PlanShape
from freetokend.experts.plan.native import NativePlanner
from freetokend.experts.residency import ResidencyState
from freetokend.experts.slot_pool import SlotPool
from freetokend.kvcache.batch import KvBatch, KvStore
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.kvcache.gpu.triton_store import TritonKvStore
from freetokend.native.cpu_branch import CpuBranch
from freetokend.native.executor import Executor
from freetokend.policy.eviction import default_order
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.program import Embed, Op, Route
from freetokend.tensor.protocols import ExpertDispatch, StepInput, StepRunner
from freetokend.tensor.state_dict_weights import StateDictWeights
from freetokend.tensor.torch_program import TorchProgram
from tests.experts.gpu.bf16_banks import bf16_bank, drawn_bank
from tests.experts.gpu.immediate import ImmediateDriver
from tests.experts.gpu.reference_ops import ReferenceOps
from tests.kvcache.gpu.contexts import SEQUENCES, Contexts
from tests.support.device_model import (
    DensePages,
    SmallShape,
    decode_batch,
    on_device,
    random_weights,
)
from tests.support.recorded_graphs import RepeatingBackend

ROWS_CAPACITY: Final = 4
BUCKETS: Final = len(BUCKET_TOKENS)
_PAGES: Final = 64
_PAGES_CAPACITY: Final = 8
_ATTENTION_PAGE_TOKENS: Final = 32

HOST_SHAPE: Final = SmallShape(layers=2, hidden=256, inter=256, experts=8, top_k=2)
# Layers of the shape of a Qwen3.6 model with 35B parameters. Two of its 40: their 512 experts are
# 3.2 GB of pinned memory and as much on the GPU, drawn in seconds, and sweeps have a layer to
# stream while another computes.
CUDA_SHAPE: Final = SmallShape(
    layers=2,
    hidden=2048,
    inter=512,
    experts=256,
    top_k=8,
    heads=16,
    kv_heads=2,
    head_size=256,
    vocab=8192,
    page_tokens=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a device is made of. kernels: whether those of a GPU compute, which `interpreted` says
    Triton's interpreter runs; otherwise what stands for them does. driver: of a GPU."""

    device: torch.device
    arena: Callable[[int], Arena]
    copier: SlotCopier
    planner: Callable[[ResidencyState, PlanShape], CachePlanner]
    backend: Callable[[], GraphBackend]
    driver: CudaDriver | None
    kernels: bool = False
    interpreted: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return str(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.driver is not None:
            torch.cuda.synchronize()


def host_kind(layers: int) -> Kind:
    """The host device."""
    return Kind(
        device=torch.device("cpu"),
        arena=HostArena,
        copier=HostCopier(),
        planner=lambda state, shape: NativePlanner(state, shape, default_order(layers)),
        backend=RepeatingBackend,
        driver=None,
    )


def cuda_kind(layers: int) -> Kind:
    """The first GPU. ResourceError where there is none."""
    from freetokend.experts.plan.triton_kernel import TritonPlanner

    driver = CudaDriver()
    return Kind(
        device=torch.device("cuda", 0),
        arena=partial(CudaArena, driver),
        copier=CudaCopier(driver),
        planner=lambda state, shape: TritonPlanner(state, shape, default_order(layers)),
        backend=CudaGraphBackend,
        driver=driver,
        kernels=True,
    )


def interpreted_kind(layers: int) -> Kind:
    """The host device with the kernels of a GPU, under Triton's interpreter."""
    from freetokend.experts.plan.triton_kernel import TritonPlanner

    return replace(
        host_kind(layers),
        planner=lambda state, shape: TritonPlanner(state, shape, default_order(layers)),
        kernels=True,
        interpreted=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A step as the CPU computes it: logits [rows, vocab]; margins [rows], the least difference
    in any layer between the last expert that was chosen and the first that was not."""

    logits: torch.Tensor
    margins: torch.Tensor


class MarginProbe:
    """An Observer that finds the margins of a step."""

    def __init__(self) -> None:
        self.margins = torch.empty(0)

    def __call__(self, op: Op, buffer: Callable[[int], torch.Tensor]) -> None:
        match op:
            case Embed():
                self.margins = torch.full((buffer(op.out).shape[0],), float("inf"))
            case Route():
                ordered = buffer(op.logits).sort(dim=-1, descending=True).values
                top_k = op.router.top_k
                found = ordered[:, top_k - 1] - ordered[:, top_k]
                self.margins = torch.minimum(self.margins, found)
            case _:
                pass


class Bench:
    """Everything of one run. `close` when done."""

    def __init__(self, kind: Kind, shape: SmallShape) -> None:
        self.kind, self.shape = kind, shape
        self._closing = ExitStack()
        make = drawn_bank if kind.driver is not None else bf16_bank
        self.bank = make(
            layers=shape.layers, experts=shape.experts, hidden=shape.hidden, inter=shape.inter
        )
        facts = self.facts = self.bank.mapped.bank
        self.arena = kind.arena(facts.experts_count * facts.record_bytes)
        self.pool = SlotPool(
            self.arena,
            kind.copier,
            record_bytes=facts.record_bytes,
            experts_count=facts.experts_count,
            slots_capacity=facts.experts_count,
            device=kind.device,
        )
        self._closing.callback(self.pool.close)
        self.executor = Executor(sorted(os.sched_getaffinity(0))[:8])
        self._closing.callback(self.executor.close)
        self.cpu_experts = CpuExpertDispatch(self.executor, self.bank.mapped)
        if kind.driver is not None:
            kind.driver.register_host(self.bank.mapped.region_address, self.bank.bytes.size)
            self._closing.callback(kind.driver.unregister_host, self.bank.mapped.region_address)
        self.fill = self._fill_op()
        self.fork = self._fork()
        self.dispatch = self._new_dispatch()
        self.weights = random_weights(shape.program())

    def close(self) -> None:
        """Give everything back."""
        self.kind.synchronize()
        self._closing.close()

    def slots_of(self, share: float) -> int:
        """Slots for this share of the experts; those of one token at least."""
        return max(self.shape.top_k, int(share * self.facts.experts_count))

    def split_misses(self, part: float) -> None:
        """Fill this part of every layer's misses, and leave the rest to the CPU."""
        self.split_by([[int(part * count) for count in range(self.shape.experts + 1)]] * BUCKETS)
        self.dispatch.set_fillable([part > 0] * self.shape.layers)

    def split_by(self, table: Sequence[Sequence[int]]) -> None:
        """Fill as many of every layer's misses as the table says: [buckets][misses + 1]."""
        for layer in range(self.shape.layers):
            self.dispatch.set_fill_counts(layer, table)
        self.dispatch.set_fillable([True] * self.shape.layers)

    def program(self, experts: ExpertDispatch | None = None) -> CudaProgram:
        """On the device, with the dispatch over its slots."""
        tensors = {name: one.to(self.kind.device) for name, one in self.weights.items()}
        return CudaProgram(
            self.shape.program(),
            StateDictWeights(tensors, torch.bfloat16),
            experts or self.dispatch,
            positions_count=256,
            device=self.kind.device,
        )

    def references(self, steps_count: int) -> list[Reference]:
        """The steps on the CPU, experts in place."""
        weights, probe = StateDictWeights(self.weights, torch.bfloat16), MarginProbe()
        program = TorchProgram(self.shape.program(), weights, self.cpu_experts, observer=probe)
        pages, found = self.dense_pages(), []
        for number in range(steps_count):
            step, batch = self.step(number)
            logits = program.forward(step, pages.view(batch))
            found.append(Reference(logits=logits, margins=probe.margins))
        return found

    def graphed(self, program: StepRunner, pages: KvStore) -> GraphedProgram:
        """The program of the device, by graphs."""
        return GraphedProgram(
            program,
            pages,
            self.kind.backend(),
            GraphSpec(
                rows_capacity=ROWS_CAPACITY, pages_capacity=_PAGES_CAPACITY, padding_page=_PAGES - 1
            ),
            begin_step=self.dispatch.begin_step,
            device=self.kind.device,
        )

    def pages(self) -> KvStore:
        """Keys and values of one run on the device."""
        if not self.kind.kernels:
            return self.dense_pages()
        shape = self.shape
        kv_shape = KvShape(
            layers_count=shape.layers,
            kv_heads_count=shape.kv_heads,
            head_size=shape.head_size,
            element_bytes=2,
            page_tokens=shape.page_tokens,
        )
        return TritonKvStore(
            DevicePages.take(kv_shape, _PAGES, self.kind.device),
            context_tokens=_PAGES_CAPACITY * shape.page_tokens,
            interpreted=self.kind.interpreted,
        )

    def dense_pages(self) -> DensePages:
        """Keys and values of one run on the CPU."""
        return DensePages(self.shape, _PAGES)

    def attention(self, contexts: Contexts) -> KvStore:
        """Room for these contexts on the device."""
        heads = contexts.heads
        if self.kind.driver is not None:
            pages = contexts.pages(_ATTENTION_PAGE_TOKENS, self.kind.device)
            return TritonKvStore(pages, context_tokens=contexts.context)
        shape = SmallShape(
            heads=heads.queries,
            kv_heads=heads.keys,
            head_size=heads.size,
            page_tokens=_ATTENTION_PAGE_TOKENS,
        )
        return DensePages(shape, SEQUENCES * -(-contexts.context // _ATTENTION_PAGE_TOKENS))

    @property
    def merge(self) -> MergeBranches:
        """The device's."""
        return merge_branches if self.kind.kernels else self._host_ops().merge

    def step(self, number: int, *, rows: int = 3) -> tuple[StepInput, KvBatch]:
        """The step of this number of sequences that grow by a token each, on the CPU."""
        lengths = [number + 1 + row for row in range(rows)]
        batch = decode_batch(lengths, page_tokens=self.shape.page_tokens)
        random = torch.Generator().manual_seed(number)
        return StepInput(
            token_ids=torch.randint(self.shape.vocab, (rows,), generator=random),
            positions=batch.positions.long(),
            logits_index=torch.arange(rows),
        ), batch

    def run(self, program: StepRunner, pages: KvStore, number: int) -> torch.Tensor:
        """Logits of a step on the device, on the CPU."""
        step, batch = self.step(number)
        device = self.kind.device
        if isinstance(program, CudaProgram):
            self.dispatch.begin_step(step.token_ids.shape[0])
            step = StepInput(
                token_ids=step.token_ids.to(device),
                positions=step.positions.to(device),
                logits_index=step.logits_index.to(device),
            )
        logits = program.forward(step, pages.view(on_device(batch, device))).cpu()
        self.dispatch.check()
        return logits

    def _fill_op(self) -> FillRecords:
        if not self.kind.kernels:
            return self._host_ops().fill
        address = self.bank.mapped.region_address + self.facts.offset_bytes
        return lambda fills, count: fill_records(
            fills, count, address, self.pool.base_address, self.facts.record_bytes
        )

    def _host_ops(self) -> ReferenceOps:
        return ReferenceOps(mapped=self.bank.mapped, pool=self.pool, executor=self.executor)

    def _new_dispatch(self) -> CudaExpertDispatch:
        shape = self.shape
        spec = DispatchSpec(
            moe_layers_count=shape.layers,
            experts_per_layer_count=shape.experts,
            hidden_size=shape.hidden,
            top_k=shape.top_k,
            tokens_capacity=ROWS_CAPACITY,
            buckets_count=BUCKETS,
            least_slots=shape.top_k,
        )
        ops = BranchOps(fill=self.fill, slots=self._slots(), merge=self.merge, fork=self.fork)
        planner = partial(self.kind.planner, self.pool.state)
        return CudaExpertDispatch(spec, ops, planner, self.kind.device)

    def slot_ops(self) -> SlotOps:
        """The device's kernels, as an engine's platform gives them."""
        return SlotOps(fill=self.fill, slots=self._slots(), merge=self.merge)

    def _slots(self) -> SlotExpertsCall:
        if not self.kind.kernels:
            return self._host_ops().slots
        slots = SlotExperts(
            self.facts,
            base_address=self.pool.base_address,
            slot_bytes=self.facts.record_bytes,
            slots_count=self.pool.state.slots_count,
            tokens_capacity=padded_rows(ROWS_CAPACITY),
            top_k=self.shape.top_k,
            interpreted=self.kind.interpreted,
        )
        return partial(slots.decode, keep_others=True)

    def _fork(self) -> CpuFork:
        driver = self.kind.driver
        buffers = HostBuffers.make(
            tokens_capacity=ROWS_CAPACITY,
            top_k=self.shape.top_k,
            hidden_size=self.shape.hidden,
            pinned=driver is not None,
        )
        branch = CpuBranch(
            self.executor,
            bank_experts(self.facts, self.bank.mapped.region_address),
            buffers.addresses(),
        )
        self.buffers, self.branch = buffers, branch
        self._closing.callback(branch.close)
        if driver is None and self.kind.interpreted:
            return StreamFork(ImmediateDriver(), branch, buffers, lambda: 0)
        if driver is None:
            return InlineFork(branch, buffers)
        fork = StreamFork(driver, branch, buffers, current_stream)
        self._closing.callback(fork.close)
        return fork
