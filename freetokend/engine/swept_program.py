"""Sweeps by the program of a GPU: its ops a range at a time, between the steps of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from freetokend.engine.graphs import step_on
from freetokend.native.executor import Executor
from freetokend.tensor.cuda_program import CudaProgram
from freetokend.tensor.program import StepProgram
from freetokend.tensor.protocols import KvView, StepInput
from freetokend.tensor.sampling import ChosenTokens, sample_logits


class SweptProgram:
    """A LayerRunner over logits of a device: `executor` chooses, after the sweep was noted.

    The program is that of steps too: what it keeps between two ranges no step touches. A range is
    queued, not waited for; the host is never more than one ahead of the device, so that steps and
    an end come soon.
    """

    def __init__(
        self,
        program: CudaProgram,
        executor: Executor,
        *,
        sweeping: Callable[[], AbstractContextManager[None]],
        pace: Callable[[], None],
        note: Callable[[], None],
        device: torch.device,
    ) -> None:
        """sweeping: inside of it the program's experts are streamed. pace: as of
        `experts.gpu.transfers`. note: is called after the last range, when the device has been
        waited for."""
        self._program = program
        self._executor = executor
        self._sweeping = sweeping
        self._pace = pace
        self._note = note
        self._device = device
        self._moved: tuple[StepInput, StepInput] | None = None
        self._finished_count = 0

    @property
    def program(self) -> StepProgram:
        return self._program.program

    @property
    def finished_count(self) -> int:
        """Ranges; from any thread."""
        return self._finished_count

    def execute(self, step: StepInput, kv: KvView, *, first: int = 0, last: int = -1) -> None:
        """As of `LayerRunner`."""
        # The last op chooses tokens, which is not done there.
        last_there = len(self.program.ops) - 1
        end = last_there if last < 0 else min(last, last_there)
        with self._sweeping():
            self._program.execute(self._on_device(step), kv, first=first, last=end)
        self._pace()
        self._finished_count += 1

    def chosen(self, step: StepInput) -> ChosenTokens:
        """As of `LayerRunner`. InternalError for a sweep that is void."""
        return sample_logits(self._executor, self.logits(step), step.sampling)

    def logits(self, step: StepInput) -> torch.Tensor:
        """After the last op, once: fp32 [S', vocab] on the host. As of `chosen`."""
        moved, self._moved = self._on_device(step), None
        logits = self._program.logits(moved).cpu()
        self._note()
        return logits

    def _on_device(self, step: StepInput) -> StepInput:
        """Moved once for all ranges."""
        if self._moved is None or self._moved[0] is not step:
            self._moved = (step, step_on(step, self._device))
        return self._moved[1]
