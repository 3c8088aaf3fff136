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

    def prefetch(self, moe_layer_index: int, *, wanted: torch.Tensor | None = None) -> None:
        """Start streaming a layer's experts; `wanted`: as of `KnownAhead`, None for all."""
        ...

    def let_go(self) -> None:
        """Free what is held for a sweep."""
        ...


class KnownAhead(Protocol):
    """Routing that follows from the token ids, as that of DeepSeek-V4's first layers does."""

    def wanted(self, moe_layer_index: int, token_ids: torch.Tensor) -> torch.Tensor | None:
        """int32 [experts per layer], where the ids are, not 0 for the experts that the tokens [N]
        choose; None for a layer of which that is known only when it is computed."""
        ...


class SweepingEngine(Engine):
    """An Engine that also computes sweeps, with a program of their own: while one is under way
    its buffers keep what steps in between must not touch.

    sweep_from_tokens: as of `SweepEngine`, for a cache with room for two layers. known_ahead: of
    layers that it knows only what the tokens need is streamed.
    """

    def __init__(
        self,
        program: TokenRunner,
        sweep_program: LayerRunner,
        kv: KvStore,
        stream: LayerStream,
        *,
        sweep_from_tokens: int,
        known_ahead: KnownAhead | None = None,
    ) -> None:
        super().__init__(program, kv)
        self._sweep_program = sweep_program
        self._ends = layer_ends(sweep_program.program)
        self._stream = stream
        self._sweep_from_tokens = sweep_from_tokens
        self._known_ahead = known_ahead

    @property
    def sweep_from_tokens(self) -> int:
        """0 while there is no room for two layers."""
        return self._sweep_from_tokens if self._stream.can_sweep else 0

    def begin_sweep(self, work: StepWork) -> LayerSweep:
        """The first layer's experts are on their way when this returns."""
        prepared = self.prepare(work)
        self._stream.prefetch(0, wanted=self.wanted(0, prepared))
        return LayerSweep(self, self._sweep_program, self._stream, self._ends, prepared)

    def wanted(self, moe_layer_index: int, prepared: Prepared) -> torch.Tensor | None:
        """See `KnownAhead`."""
        if self._known_ahead is None:
            return None
        return self._known_ahead.wanted(moe_layer_index, prepared.step.token_ids)


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
        self._next_layer = 1

    @torch.inference_mode()
    def advance(self) -> StepOutcome | None:
        """The ops up to the end of the next layer, and with the last one the tokens."""
        step, kv = self._prepared.step, self._prepared.kv
        try:
            last = self._ends.pop(0)
            self._prefetch_known()
            self._program.execute(step, kv, first=self._first, last=last)
            self._first = last
            if self._ends:
                return None
            return self._engine.outcome(self._prepared, self._program.chosen(step))
        except BaseException:
            self._stream.let_go()
            raise

    def _prefetch_known(self) -> None:
        """What the next layer needs, before the experts of this one would stream all of it."""
        if self._ends:
            wanted = self._engine.wanted(self._next_layer, self._prepared)
            if wanted is not None:
                self._stream.prefetch(self._next_layer, wanted=wanted)
            self._next_layer += 1

    def abandon(self) -> None:
        self._stream.let_go()


def layer_ends(program: StepProgram) -> tuple[int, ...]:
    """Where a sweep stops to let others run: behind the experts of each MoE layer but the last,
    and at the program's end."""
    experts = [index + 1 for index, op in enumerate(program.ops) if isinstance(op, Experts)]
    return (*experts[:-1], len(program.ops))
