"""The CPU's part of a captured step over the fake driver: run as a module that finds it.

The fake launches a graph in any order that its waits allow, so a wait that is missing shows.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.device.cuda_arena import CudaArena
from freetokend.device.cuda_driver import CudaDriver, CudaError
from freetokend.experts.cpu import CpuExpertDispatch, bank_experts
from freetokend.experts.gpu.cpu_fork import DONE_WORD, RING_WORD, CpuWork, HostBuffers, StreamFork
from freetokend.ftw.layout import ExpertBank
from freetokend.native.cpu_branch import CpuBranch
from freetokend.native.executor import Executor
from freetokend.tensor.memory import tensor_at
from tests.device.scenarios_on_fake import run_scenarios
from tests.experts.gpu.bf16_banks import bf16_bank
from tests.fakes.libcuda import FakeLibcuda

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 4, 2, 3
HIDDEN, INTER = 64, 32
MODE_GLOBAL: Final = 0
_CALLBACK: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Forgetful(CudaDriver):
    """A driver that leaves out the nth call of one kind."""

    def __init__(self, kind: str, nth: int) -> None:
        super().__init__()
        self._kind, self._left = kind, nth

    def _counts(self, kind: str) -> bool:
        self._left -= kind == self._kind
        return self._left != 0 or kind != self._kind

    def wait(self, stream: Any, event: Any) -> None:
        if self._counts("wait"):
            super().wait(stream, event)

    def record(self, event: Any, stream: Any) -> None:
        if self._counts("record"):
            super().record(event, stream)


class QueuedBell:
    """A `Doorbell` whose kernels are functions on the host."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._words = bench.buffers.words

    def begin_step(self) -> None:
        self._bench.branch.begin_step()

    def call(self, moe_layer_index: int, stream: Any) -> None:
        self._bench.branch.begin_step()
        self._bench.queue(lambda: self._ring(moe_layer_index), stream)
        self._bench.queue(self._await, stream)

    def end_step(self) -> None:
        self._bench.branch.end_step()

    def _ring(self, moe_layer_index: int) -> None:
        self._words[RING_WORD + 1] = moe_layer_index
        self._words[RING_WORD] += 1

    def _await(self) -> None:
        while self._words[DONE_WORD] != self._words[RING_WORD]:
            time.sleep(0)


class Bench:
    """A step of two layers: a plan, the CPU's part beside that of the slots, a merge."""

    def __init__(self, driver: CudaDriver | None = None, *, rings: bool = False) -> None:
        self.fake = FakeLibcuda()
        self.fake.reset()
        self.driver = driver or CudaDriver()
        self.api: Any = importlib.import_module("cuda.bindings.driver")
        self.bank = bf16_bank(layers=LAYERS, experts=EXPERTS, hidden=HIDDEN, inter=INTER)
        self.executor = Executor(sorted(os.sched_getaffinity(0))[:2])
        self.buffers = HostBuffers.make(
            tokens_capacity=TOKENS, top_k=TOP_K, hidden_size=HIDDEN, pinned=False
        )
        bank: ExpertBank = self.bank.mapped.bank
        self.branch = CpuBranch(
            self.executor,
            bank_experts(bank, self.bank.mapped.region_address),
            self.buffers.addresses(),
        )
        self.main = self.driver.new_stream()
        self.fork = StreamFork(self.driver, self.branch, self.buffers, lambda: self.main)
        if rings:
            self.fork.doorbell = QueuedBell(self)
        self._make_device_memory()
        self._callbacks: list[Any] = []
        self.seed = 0
        self.results: list[torch.Tensor] = []

    def _make_device_memory(self) -> None:
        self.arena = CudaArena(self.driver, 2 << 20, chunk_bytes=2 << 20)
        self.arena.grow_to(2 << 20)
        base = self.arena.base_address
        self.work = CpuWork(
            x=tensor_at(base, (TOKENS, HIDDEN), torch.bfloat16),
            ids=tensor_at(base + 4096, (TOKENS, TOP_K), torch.int32),
            weights=tensor_at(base + 8192, (TOKENS, TOP_K), torch.float32),
            tokens=tensor_at(base + 12288, (1,), torch.int32),
        )
        self.y_cpu = tensor_at(base + 16384, (TOKENS, TOP_K, HIDDEN), torch.float32)
        self.y_gpu = tensor_at(base + 65536, (TOKENS, TOP_K, HIDDEN), torch.float32)

    def close(self) -> None:
        self.branch.close()
        self.executor.close()

    def inputs(self, layer: int) -> CpuWork:
        """What the plan of a layer leaves in this launch; every other pair is a slot's."""
        random = torch.Generator().manual_seed(10 * self.seed + layer)
        ids = torch.randint(EXPERTS, (TOKENS, TOP_K), generator=random).int()
        ids[:, layer % TOP_K] = -1
        return CpuWork(
            x=torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(),
            ids=ids,
            weights=torch.rand(TOKENS, TOP_K, generator=random),
            tokens=torch.tensor([TOKENS], dtype=torch.int32),
        )

    def queue(self, work: Callable[[], object], stream: Any = None) -> None:
        """A kernel of the main stream, or another."""
        callback = _CALLBACK(lambda _: work())
        self._callbacks.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        assert address is not None
        self.driver.launch_host_function(address, 0, self.main if stream is None else stream)

    def layer(self, layer: int) -> None:
        """As a dispatch queues it."""
        self.queue(lambda: self._plan(layer))
        self.fork.begin(layer, self.work, self.y_cpu)
        self.queue(lambda: self.y_gpu.fill_(layer + 1))
        self.fork.join()
        self.queue(self._merge)

    def _plan(self, layer: int) -> None:
        found = self.inputs(layer)
        for name in ("x", "ids", "weights", "tokens"):
            getattr(self.work, name).copy_(getattr(found, name))

    def _merge(self) -> None:
        on_cpu = (self.work.ids >= 0).unsqueeze(-1)
        self.results.append(torch.where(on_cpu, self.y_cpu, self.y_gpu).sum(1))

    def expected(self) -> list[torch.Tensor]:
        """Of both layers, in the launch of this seed."""
        cpu = CpuExpertDispatch(self.executor, self.bank.mapped)
        found = []
        for layer in range(LAYERS):
            given = self.inputs(layer)
            parts = cpu.dispatch(layer, given.x, given.ids, given.weights)
            found.append(parts + (layer + 1))
        return found

    def call(self, name: str, *arguments: object) -> Any:
        result, *values = getattr(self.api, name)(*arguments)
        if int(result):
            raise CudaError(name, int(result), str(result))
        return values[0] if values else None

    def capture(self) -> Any:
        """The step as a graph that can be launched."""
        self.call("cuStreamBeginCapture", self.main, self.api.CUstreamCaptureMode(MODE_GLOBAL))
        for layer in range(LAYERS):
            self.layer(layer)
        graph = self.call("cuStreamEndCapture", self.main)
        return self.call("cuGraphInstantiate", graph, 0)

    def is_right(self, executable: Any) -> bool:
        """Two launches in each order, of other inputs each."""
        for last_first in (False, True):
            self.fake.run_last_first(last_first)
            for _ in range(2):
                self.seed += 1
                self.results.clear()
                self.fork.begin_step()
                self.call("cuGraphLaunch", executable, self.main)
                self.fork.check()
                pairs = zip(self.results, self.expected(), strict=True)
                if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
                    return False
        return True


def a_captured_step_is_right_in_every_order() -> None:
    _is_right_in_every_order(rings=False)


def a_captured_step_with_doorbells_is_right_in_every_order() -> None:
    _is_right_in_every_order(rings=True)


def _is_right_in_every_order(*, rings: bool) -> None:
    bench = Bench(rings=rings)
    executable = bench.capture()
    assert bench.results == []
    assert bench.branch.executions_count == 0
    assert bench.is_right(executable)
    assert bench.branch.executions_count == 4 * LAYERS * TOKENS * (TOP_K - 1)
    bench.close()


def a_step_that_is_not_captured_is_right() -> None:
    bench = Bench()
    for layer in range(LAYERS):
        bench.layer(layer)
    assert all(map(torch.equal, bench.results, bench.expected()))
    bench.close()


def every_wait_and_record_is_needed() -> None:
    _every_wait_and_record_is_needed(rings=False)


def every_wait_and_record_is_needed_by_doorbells() -> None:
    _every_wait_and_record_is_needed(rings=True)


def _every_wait_and_record_is_needed(*, rings: bool) -> None:
    for kind in ("wait", "record"):
        for nth in range(1, 2 * LAYERS + 1):
            bench = Bench(Forgetful(kind, nth), rings=rings)
            try:
                right = bench.is_right(bench.capture())
            except CudaError as error:
                right = error.code != 904  # a fork that does not join
            assert not right, f"{kind} {nth} is not needed"
            bench.close()


def the_calls_are_those_and_in_this_order() -> None:
    bench = Bench()
    with bench.fake.recording() as calls:
        bench.fork.begin(1, bench.work, bench.y_cpu)
        bench.fork.join()
    names = [call.split()[0] for call in calls if "Ctx" not in call]
    assert names == [
        "cuEventRecord",
        "cuStreamWaitEvent",
        *["cuMemcpyDtoHAsync_v2"] * 4,
        "cuLaunchHostFunc",
        "cuMemcpyHtoDAsync_v2",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ]
    bench.close()


def a_doorbell_rings_behind_the_copies_and_is_answered_before_the_results_are_copied() -> None:
    bench = Bench(rings=True)
    bench.fork.begin_step()
    with bench.fake.recording() as calls:
        bench.fork.begin(1, bench.work, bench.y_cpu)
        bench.fork.join()
    names = [call.split()[0] for call in calls if "Ctx" not in call]
    assert names == [
        "cuEventRecord",
        "cuStreamWaitEvent",
        *["cuMemcpyDtoHAsync_v2"] * 4,
        *["cuLaunchHostFunc"] * 2,  # what rings, and what waits
        "cuMemcpyHtoDAsync_v2",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ]
    bench.fork.check()
    bench.close()


def faults_of_the_cpu_and_of_the_driver_are_told() -> None:
    bench = Bench()
    bench._plan(0)
    bench.work.ids[0, 1] = EXPERTS
    bench.fork.begin(0, bench.work, bench.y_cpu)
    bench.fork.join()
    with pytest.raises(InternalError, match="expert id"):
        bench.fork.check()
    too_many = CpuWork(
        x=torch.zeros(TOKENS + 1, HIDDEN, dtype=torch.bfloat16),
        ids=bench.work.ids,
        weights=bench.work.weights,
        tokens=bench.work.tokens,
    )
    with pytest.raises(InternalError, match="at most 3"):
        bench.fork.begin(0, too_many, bench.y_cpu)
    with (
        bench.fake.failing("cuLaunchHostFunc", code=700),
        pytest.raises(CudaError, match="cuLaunchHostFunc"),
    ):
        bench.fork.begin(0, bench.work, bench.y_cpu)
    bench.fork.close()
    with pytest.raises(CudaError, match="400"):
        bench.fork.begin(0, bench.work, bench.y_cpu)
    bench.close()


SCENARIOS: Final[dict[str, Callable[[], None]]] = {
    one.__name__: one
    for one in (
        a_captured_step_is_right_in_every_order,
        a_captured_step_with_doorbells_is_right_in_every_order,
        a_step_that_is_not_captured_is_right,
        every_wait_and_record_is_needed,
        every_wait_and_record_is_needed_by_doorbells,
        a_doorbell_rings_behind_the_copies_and_is_answered_before_the_results_are_copied,
        the_calls_are_those_and_in_this_order,
        faults_of_the_cpu_and_of_the_driver_are_told,
    )
}


if __name__ == "__main__":
    sys.exit(run_scenarios(SCENARIOS))
