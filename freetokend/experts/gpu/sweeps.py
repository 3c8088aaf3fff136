"""Prefill on a GPU that streams whole layers through the slots, two of them at a time.

While a layer is computed the experts of the next one are on their way, before their routing is
known: slots are reserved in the stream of the steps, where residency is read and changed, and a
stream beside it copies. What lies in slots already stays and is not copied. A step between two
layers waits on the device for what is on its way, because its plan takes those experts for there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.cache import default_kept_share
from freetokend.experts.gpu.device_tap import DeviceTap
from freetokend.experts.gpu.dispatch import CudaExpertDispatch, FillRecords
from freetokend.experts.gpu.transfers import Transfers
from freetokend.experts.plan.contract import (
    CachePlanner,
    PlanInputs,
    PlanOutputs,
    PlanShape,
    Stat,
    require_int32,
)
from freetokend.experts.residency import ResidencyState
from freetokend.tensor.protocols import ExpertDispatch

WINDOWS_COUNT: Final = 2


class SlotSweeps:
    """An ExpertDispatch of sweeps, and what `engine.sweep` calls a stream of layers.

    Owns what is held for a sweep; `steps` computes, with buffers that it has for its own steps.
    All that it queues lies in the stream of the steps, but for the copies.
    """

    def __init__(
        self,
        steps: CudaExpertDispatch,
        state: ResidencyState,
        fill: FillRecords,
        transfers: Transfers,
        make_planner: Callable[[PlanShape], CachePlanner],
        *,
        tap: DeviceTap | None = None,
    ) -> None:
        """No slots yet: `set_slots`. tap: sees what sweeps choose."""
        spec = self._spec = steps.spec
        self._steps = steps
        self._state = state
        self._fill = fill
        self._transfers = transfers
        self._tap = tap
        device = state.slot_of_expert.device
        shape = spec.plan_shape(1, cpu_kernel=steps.has_cpu)
        self._planner = make_planner(shape)
        self._inputs = PlanInputs(
            routed=torch.full((1, spec.top_k), -1, dtype=torch.int32, device=device),
            valid_tokens=torch.zeros(1, dtype=torch.int32, device=device),
            fillable=steps.fillable,
            fill_count=steps.fill_counts.select(0, 0),
        )
        # A list is read until its records are there; that of the next layer is made before.
        self._lists = [PlanOutputs.empty(shape, device) for _ in range(WINDOWS_COUNT)]
        self._uses = torch.zeros(spec.experts_per_layer_count, dtype=torch.int32, device=device)
        self.totals: Final = torch.zeros(2, len(Stat), dtype=torch.int64, device=device)
        self._held: dict[int, int] = {}
        self._arriving: list[int] = []
        self._kept_count = 0
        self._slots_count = 0
        self._pairs_count = 0
        self._is_cold = False

    @property
    def can_sweep(self) -> bool:
        """Whether there is room for two layers, and beside them for a step."""
        spec = self._spec
        least_count = WINDOWS_COUNT * spec.experts_per_layer_count
        if not self._steps.has_cpu:
            least_count += spec.least_slots
        return self._slots_count >= least_count and any(self._steps.fillable_layers)

    @property
    def is_held(self) -> bool:
        """Whether layers are there for a sweep, or on their way."""
        return bool(self._held)

    @property
    def pairs_count(self) -> int:
        """(token, expert) pairs that sweeps have computed; from any thread."""
        return self._pairs_count

    def set_slots(self, slots_count: int) -> None:
        """So many slots there are now; nothing may be held."""
        if self._held:
            raise InternalError("a cache was resized that holds layers of a sweep")
        layers_count = self._spec.moe_layers_count
        experts_count = layers_count * self._spec.experts_per_layer_count
        share = default_kept_share(slots_count, experts_count)
        self._slots_count = slots_count
        self._kept_count = int(share * slots_count / layers_count)
        self._warm_up()

    def warm_up(self) -> None:
        """Compile what sweeps launch, before the first: stream a layer that nobody computes. Where
        there is no room yet: when there is."""
        self._is_cold = True
        self._warm_up()

    def prefetch(self, moe_layer_index: int, *, wanted: torch.Tensor | None = None) -> None:
        """Start streaming a layer that a sweep will come to, if there is room for two.

        wanted: int32 [E] on the device, not 0 for experts that are known to be needed; None for
        all.
        """
        if moe_layer_index not in self._held and self.can_sweep:
            self._start(moe_layer_index, wanted)

    def load(self, moe_layer_index: int) -> None:
        """Fill slots with all of a layer, for which there is room; nothing may be held."""
        self._start(moe_layer_index, None)
        self.let_go()

    def _start(self, moe_layer_index: int, wanted: torch.Tensor | None) -> None:
        list_ = self._lists[moe_layer_index % WINDOWS_COUNT]
        self._planner.reserve(moe_layer_index, self._inputs, list_, wanted=wanted)
        fillable = self._steps.fillable_layers[moe_layer_index]
        self.totals.select(0, int(fillable)).add_(list_.stats)
        ticket = self._transfers.begin(lambda: self._fill(list_.fills, list_.fills_count))
        self._held[moe_layer_index] = ticket
        self._arriving.append(ticket)

    def let_go(self) -> None:
        """Free what is held for a sweep; for one that was given up, or that a resize interrupts."""
        self.join()
        self._uses.zero_()
        for layer in tuple(self._held):
            self._release(layer, tokens_count=0)

    def join(self) -> None:
        """What is queued from now on finds all that is on its way; before every step."""
        if self._arriving:
            self._join(self._arriving[-1])

    def _join(self, ticket: int) -> None:
        """With a transfer that no other join has seen."""
        if ticket in self._arriving:
            self._transfers.join(ticket)
            self._arriving = [later for later in self._arriving if later > ticket]

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """As of `ExpertDispatch`; bf16 x, every row counts.

        Where a resize has left no room for two layers: as steps do it, on demand.
        """
        require_int32("expert_ids", expert_ids, (x.shape[0], self._spec.top_k))
        if self._tap is not None:
            self._tap.keep(moe_layer_index, expert_ids)
        streams = self.can_sweep
        if streams:
            self._hold(moe_layer_index)
            slot_of_expert = self._slots_of(moe_layer_index)
        else:
            self.let_go()
        out = [x.new_zeros((0, self._spec.hidden_size), dtype=torch.float32)]
        for start in range(0, x.shape[0], self._spec.tokens_capacity):
            count = min(self._spec.tokens_capacity, x.shape[0] - start)
            rows, ids, shares = (one.narrow(0, start, count) for one in (x, expert_ids, weights))
            if streams:
                places = slot_of_expert.index_select(0, ids.flatten()).view_as(ids)
                out.append(self._steps.dispatch_placed(moe_layer_index, rows, ids, shares, places))
            else:
                self._steps.begin_step(count)
                out.append(self._steps.dispatch(moe_layer_index, rows, ids, shares))
        if streams:
            self._count(expert_ids)
            self._release(moe_layer_index, tokens_count=x.shape[0])
            self._pairs_count += expert_ids.numel()
        return torch.cat(out)

    def check(self, totals: list[list[int]]) -> None:
        """InternalError when a sweep was void; totals: those of this, on the host."""
        deferred_count = totals[1][Stat.DEFERRED]
        if deferred_count:
            self.totals.zero_()
            raise InternalError(
                f"a sweep is void: {deferred_count} experts of layers that were streamed found no "
                "slot"
            )

    def _warm_up(self) -> None:
        if self._is_cold and self.can_sweep:
            self._is_cold = False
            self.prefetch(0)
            self.let_go()

    def _hold(self, moe_layer_index: int) -> None:
        """This layer is there, the next one on its way."""
        self.prefetch(moe_layer_index)
        if moe_layer_index + 1 < self._spec.moe_layers_count:
            # Asked for before this one is waited for, so that copies follow each other.
            self.prefetch(moe_layer_index + 1)
        self._join(self._held[moe_layer_index])

    def _slots_of(self, moe_layer_index: int) -> torch.Tensor:
        """int32 [E]; an expert without a slot is the CPU's."""
        experts = self._spec.experts_per_layer_count
        return self._state.slot_of_expert.narrow(0, moe_layer_index * experts, experts)

    def _count(self, expert_ids: torch.Tensor) -> None:
        chosen = expert_ids.flatten().long()
        self._uses.zero_().scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))

    def _release(self, moe_layer_index: int, *, tokens_count: int) -> None:
        self._planner.release(
            moe_layer_index, self._uses, tokens_count=tokens_count, kept_count=self._kept_count
        )
        del self._held[moe_layer_index]


class SwitchedExperts:
    """An ExpertDispatch that is that of steps, or that of sweeps while one is computed."""

    def __init__(self, steps: ExpertDispatch, sweeps: ExpertDispatch) -> None:
        self._sweeps = sweeps
        self._now = steps

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """Sweeps inside."""
        steps, self._now = self._now, self._sweeps
        try:
            yield
        finally:
            self._now = steps

    def dispatch(
        self,
        moe_layer_index: int,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """See `ExpertDispatch.dispatch`."""
        return self._now.dispatch(moe_layer_index, x, expert_ids, weights)
