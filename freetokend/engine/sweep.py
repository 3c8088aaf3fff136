"""Prefill that streams whole layers through the expert cache, one layer at a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from freetokend.engine.step import Engine, Prepared
from freetokend.engine.work import StepOutcome, StepWork
from freetokend.kvcache.batch import KvStore
from freetokend.tensor.program import Experts, StepProgram
from freetokend.tensor.protocols import KvView, StepInput, TokenRunner
from freetokend.tensor.sampling import ChosenTokens


class LayerRunner(Protocol):
    """A step program run a range of ops at a time; buffers keep their contents between."""

    @property
    def program(self) -> StepProgram: ...

    def execute(self, step: StepInput, kv: KvView, *, first: int = 0, last: int = -1) -> None: ...

    def chosen(self, step: StepInput) -> ChosenTokens:
        """After the last op."""
        ...


class LayerStream(Protocol):
    """The expert cache as a sweep sees it."""

    @property
    def can_sweep(self) -> bool:
        """Whether there is room for two layers now."""
        ...

    def prefetch(self, moe_layer_index: int) -> None:
        """Start streaming a layer's experts."""
        ...

    def let_go(self) -> None:
        """Free what is held for a sweep."""
        ...


class SweepingEngine(Engine):
    """An Engine that also computes sweeps, with a program of their own: while one is under way
    its buffers keep what steps in between must not touch.

    sweep_from_tokens: as of `SweepEngine`, for a cache with room for two layers.
    """

    def __init__(
        self,
        program: TokenRunner,
        sweep_program: LayerRunner,
        kv: KvStore,
        stream: LayerStream,
        *,
        sweep_from_tokens: int,
    ) -> None:
        super().__init__(program, kv)
        self._sweep_program = sweep_program
        self._ends = layer_ends(sweep_program.program)
        self._stream = stream
        self._sweep_from_tokens = sweep_from_tokens

    @property
    def sweep_from_tokens(self) -> int:
        """0 while there is no room for two layers."""
        return self._sweep_from_tokens if self._stream.can_sweep else 0

    def begin_sweep(self, work: StepWork) -> LayerSweep:
        """The first layer's experts are on their way when this returns."""
        prepared = self.prepare(work)
        self._stream.prefetch(0)
        return LayerSweep(self, self._sweep_program, self._stream, self._ends, prepared)


class LayerSweep:
    """One sweep; see `engine.work.Sweep`."""

    def __init__(
        self,
        engine: SweepingEngine,
        program: LayerRunner,
        stream: LayerStream,
        ends: Sequence[int],
        prepared: Prepared,
    ) -> None:
        self._engine = engine
        self._program = program
        self._stream = stream
        self._ends = list(ends)
        self._prepared = prepared
        self._first = 0

    @torch.inference_mode()
    def advance(self) -> StepOutcome | None:
        """The ops up to the end of the next layer, and with the last one the tokens."""
        step, kv = self._prepared.step, self._prepared.kv
        try:
            last = self._ends.pop(0)
            self._program.execute(step, kv, first=self._first, last=last)
            self._first = last
            if self._ends:
                return None
            return self._engine.outcome(self._prepared, self._program.chosen(step))
        except BaseException:
            self._stream.let_go()
            raise

    def abandon(self) -> None:
        self._stream.let_go()


def layer_ends(program: StepProgram) -> tuple[int, ...]:
    """Where a sweep stops to let others run: behind the experts of each MoE layer but the last,
    and at the program's end."""
    experts = [index + 1 for index, op in enumerate(program.ops) if isinstance(op, Experts)]
    return (*experts[:-1], len(program.ops))
