"""Sweeps over the fake driver: run as a module that finds it.

A sweep with steps between its layers is captured, and launched in any order that its waits allow:
copies before their list is there, layers before their records are. What plans, copies and computes
are functions of the host that do at the launch what the kernels would.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import pytest
import torch

from freetokend.device.cuda_arena import CudaArena
from freetokend.device.cuda_driver import CudaDriver, CudaError
from freetokend.experts.gpu.dispatch import CudaExpertDispatch, DispatchSpec
from freetokend.experts.gpu.sweeps import SlotSweeps
from freetokend.experts.gpu.transfers import StreamTransfers
from freetokend.experts.plan.contract import CachePlanner, PlanInputs, PlanOutputs, PlanShape
from freetokend.experts.plan.native import NativePlanner
from freetokend.experts.residency import EMPTY, NOT_RESIDENT, ResidencyState
from freetokend.policy.eviction import default_order
from tests.device.scenarios_on_fake import run_scenarios
from tests.experts.gpu.bf16_banks import bf16_bank
from tests.experts.gpu.fork_scenarios import MODE_GLOBAL, Forgetful
from tests.fakes.libcuda import FakeLibcuda

LAYERS, EXPERTS, TOP_K, TOKENS = 5, 4, 2, 3
SLOTS: Final = 2 * EXPERTS + TOP_K
SEEDS: Final = range(25)
_CALLBACK: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Bench:
    """Slots in the fake's memory, and the streams of steps and of copies."""

    def __init__(self, driver: CudaDriver | None = None) -> None:
        self.fake = FakeLibcuda()
        self.fake.reset()
        self.driver = driver or CudaDriver()
        self.api: Any = importlib.import_module("cuda.bindings.driver")
        self.bank = bf16_bank(layers=LAYERS, experts=EXPERTS, hidden=32, inter=32)
        self.facts = self.bank.mapped.bank
        self.arena = CudaArena(self.driver, 4 << 20, chunk_bytes=2 << 20)
        self.arena.grow_to(SLOTS * self.facts.record_bytes)
        self.state = ResidencyState.empty(
            experts_count=self.facts.experts_count, slots_capacity=SLOTS, device="cpu"
        )
        self.state.slots_count.fill_(SLOTS)
        self.main = self.now = self.driver.new_stream()
        self.transfers = StreamTransfers(
            self.driver, main_stream=lambda: self.main, queue_in=self._queue_in
        )
        self.steps = Steps(self)
        self.sweeps = SlotSweeps(
            cast("CudaExpertDispatch", self.steps),
            self.state,
            self.fill,
            self.transfers,
            lambda shape: QueuedPlanner(self, shape),
        )
        self.sweeps.set_slots(SLOTS)
        self.wrong: list[str] = []
        self.computed_count = 0
        self._callbacks: list[Any] = []

    @contextmanager
    def _queue_in(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def queue(self, work: Callable[[], object]) -> None:
        """A kernel of the stream that is launched in now."""
        callback = _CALLBACK(lambda _: work())
        self._callbacks.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        assert address is not None
        self.driver.launch_host_function(address, 0, self.now)

    def fill(self, fills: torch.Tensor, fills_count: torch.Tensor) -> None:
        def copies() -> None:
            for expert, slot in fills[: int(fills_count)].tolist():
                ctypes.memmove(self._slot(slot), self._record(expert), self.facts.record_bytes)

        self.queue(copies)

    def read(self, experts: set[int], who: str) -> None:
        """What a kernel that executes these experts, all in slots, finds there."""
        self.computed_count += 1
        for expert in experts:
            slot = int(self.state.slot_of_expert[expert])
            if slot < 0:
                self.wrong.append(f"{who}: expert {expert} has no slot")
                continue
            length = self.facts.record_bytes
            found = ctypes.string_at(self._slot(slot), length)
            if found != ctypes.string_at(self._record(expert), length):
                self.wrong.append(f"{who}: expert {expert} is not in its slot {slot}")

    def _slot(self, slot: int) -> int:
        return self.arena.base_address + slot * self.facts.record_bytes

    def _record(self, expert: int) -> int:
        return self.bank.mapped.region_address + self.facts.record_offset_bytes(expert)

    def sweep(self, *, with_steps: bool) -> None:
        """As an engine queues it."""
        x, weights = torch.zeros(TOKENS, 32, dtype=torch.bfloat16), torch.ones(TOKENS, TOP_K)
        self.sweeps.prefetch(0)
        for layer in range(LAYERS):
            if with_steps:
                self.sweeps.join()
                self.queue(self.steps.one)
            draw = torch.Generator().manual_seed(layer)
            ids = torch.randint(EXPERTS, (TOKENS, TOP_K), generator=draw).int()
            self.sweeps.dispatch(layer, x, ids, weights)

    def empty(self) -> None:
        """No slot holds anything."""
        self.state.slot_of_expert.fill_(NOT_RESIDENT)
        self.state.expert_of_slot.fill_(EMPTY)
        self.state.slot_key.zero_()
        ctypes.memset(self.arena.base_address, 0, SLOTS * self.facts.record_bytes)

    def call(self, name: str, *arguments: object) -> Any:
        result, *values = getattr(self.api, name)(*arguments)
        if int(result):
            raise CudaError(name, int(result), str(result))
        return values[0] if values else None

    def capture(self, *, with_steps: bool) -> Any:
        """The sweep as a graph that can be launched."""
        self.call("cuStreamBeginCapture", self.main, self.api.CUstreamCaptureMode(MODE_GLOBAL))
        self.sweep(with_steps=with_steps)
        graph = self.call("cuStreamEndCapture", self.main)
        return self.call("cuGraphInstantiate", graph, 0)

    def is_right(self, executable: Any) -> bool:
        """Launches in many orders, with nothing resident or over what the one before has left."""
        self.fake.run_last_first(True)  # but for the seeds above 0
        for seed in SEEDS:
            self.fake.shuffle(seed)
            if seed % 4 != 1:
                self.empty()
            self.call("cuGraphLaunch", executable, self.main)
            if self.wrong:
                return False
        return self.computed_count >= LAYERS * len(SEEDS)


class Steps:
    """What sweeps need of a `CudaExpertDispatch`; and steps of one token."""

    has_cpu = False

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._draw = random.Random(1)
        self.spec = DispatchSpec(
            moe_layers_count=LAYERS,
            experts_per_layer_count=EXPERTS,
            hidden_size=32,
            top_k=TOP_K,
            tokens_capacity=TOKENS,
            buckets_count=1,
            least_slots=TOP_K,
        )
        self.fillable_layers = (True,) * LAYERS
        self.fillable = torch.ones(LAYERS, dtype=torch.int32)
        self.fill_counts = torch.zeros(LAYERS, 1, EXPERTS + 1, dtype=torch.int32)
        shape = self.spec.plan_shape(1, cpu_kernel=False)
        self._planner = NativePlanner(bench.state, shape, default_order(LAYERS))
        self._outputs = PlanOutputs.empty(shape)

    def dispatch_placed(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        experts = {moe_layer_index * EXPERTS + one for one in expert_ids.flatten().tolist()}
        self._bench.queue(lambda: self._bench.read(experts, f"layer {moe_layer_index}"))
        return torch.zeros(x.shape)

    def one(self) -> None:
        """Through all layers: what is missing is filled, evicting what is not held."""
        bench = self._bench
        for layer in range(LAYERS):
            chosen = self._draw.sample(range(EXPERTS), TOP_K)
            self._planner.plan(
                layer,
                PlanInputs(
                    routed=torch.tensor([chosen], dtype=torch.int32),
                    valid_tokens=torch.ones(1, dtype=torch.int32),
                    fillable=self.fillable,
                    fill_count=self.fill_counts.select(0, layer),
                ),
                self._outputs,
            )
            for expert, slot in self._outputs.fills[: int(self._outputs.fills_count)].tolist():
                ctypes.memmove(bench._slot(slot), bench._record(expert), bench.facts.record_bytes)
            bench.read({layer * EXPERTS + one for one in chosen}, f"a step in layer {layer}")


class QueuedPlanner:
    """A planner whose calls are kernels."""

    def __init__(self, bench: Bench, shape: PlanShape) -> None:
        self._bench = bench
        self._planner: CachePlanner = NativePlanner(bench.state, shape, default_order(LAYERS))

    def plan(self, moe_layer_index: int, inputs: PlanInputs, outputs: PlanOutputs) -> None:
        raise AssertionError("sweeps plan no steps")

    def reserve(
        self,
        moe_layer_index: int,
        inputs: PlanInputs,
        outputs: PlanOutputs,
        *,
        wanted: torch.Tensor | None = None,
    ) -> None:
        assert wanted is None
        self._bench.queue(lambda: self._planner.reserve(moe_layer_index, inputs, outputs))

    def release(
        self, moe_layer_index: int, uses: torch.Tensor, *, tokens_count: int, kept_count: int
    ) -> None:
        counted = uses.clone()
        self._bench.queue(
            lambda: self._planner.release(
                moe_layer_index, counted, tokens_count=tokens_count, kept_count=kept_count
            )
        )


def a_sweep_is_right_in_every_order() -> None:
    for with_steps in (False, True):
        bench = Bench()
        executable = bench.capture(with_steps=with_steps)
        assert bench.computed_count == 0
        assert bench.is_right(executable), bench.wrong


def a_sweep_that_is_not_captured_is_right() -> None:
    bench = Bench()
    for _ in range(3):
        bench.sweep(with_steps=True)
        bench.transfers.pace()
    assert not bench.wrong
    assert bench.computed_count > 0
    bench.transfers.close()


def every_wait_and_record_is_needed() -> None:
    """One of each to begin a transfer, and one wait to join it."""
    for with_steps in (False, True):
        for kind in ("wait", "record"):
            for nth in range(1, 2 * LAYERS + 1):
                bench = Bench(Forgetful(kind, nth))
                try:
                    right = bench.is_right(bench.capture(with_steps=with_steps))
                except CudaError as error:
                    right = error.code != 904  # a fork that does not join
                assert not right, f"{kind} {nth} is not needed, steps between: {with_steps}"


def the_next_layer_is_on_its_way_before_this_one_is_waited_for() -> None:
    bench = Bench()
    bench.sweeps.prefetch(0)
    with bench.fake.recording() as calls:
        x, ids = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(1, TOP_K).int()
        bench.sweeps.dispatch(0, x, ids, torch.ones(1, TOP_K))
    names = [call.split()[0] for call in calls if "Ctx" not in call]
    assert names == [
        "cuLaunchHostFunc",  # slots for layer 1
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuLaunchHostFunc",  # its copies
        "cuEventRecord",
        "cuStreamWaitEvent",  # for those of layer 0
        "cuLaunchHostFunc",  # which is computed
        "cuLaunchHostFunc",  # and released
    ]


def the_host_waits_for_the_range_before_the_last() -> None:
    bench = Bench()
    with bench.fake.recording() as calls:
        for _ in range(3):
            bench.transfers.pace()
    names = [call.split()[0] for call in calls if "Ctx" not in call]
    assert names == ["cuEventRecord", *["cuEventRecord", "cuEventSynchronize"] * 2]
    ticket = bench.transfers.begin(lambda: None)
    assert bench.transfers.is_done(ticket)
    bench.transfers.finish(ticket)
    with (
        bench.fake.failing("cuEventQuery", code=700),
        pytest.raises(CudaError, match="cuEventQuery"),
    ):
        bench.transfers.is_done(ticket)


SCENARIOS: Final[dict[str, Callable[[], None]]] = {
    one.__name__: one
    for one in (
        a_sweep_is_right_in_every_order,
        a_sweep_that_is_not_captured_is_right,
        every_wait_and_record_is_needed,
        the_next_layer_is_on_its_way_before_this_one_is_waited_for,
        the_host_waits_for_the_range_before_the_last,
    )
}


if __name__ == "__main__":
    sys.exit(run_scenarios(SCENARIOS))
