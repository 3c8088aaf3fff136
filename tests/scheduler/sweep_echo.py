"""The echo engine with sweeps: a SweepEngine that is torch-free and notices a page that moved."""

from __future__ import annotations

from freetokend.engine.work import StepOutcome, StepWork
from tests.scheduler.paged_echo import PagedEchoEngine


class SweepEchoEngine(PagedEchoEngine):
    """Sweeps of `layers_count` layers, which write into the pages in each of them.

    A sweep fails in its middle for a poisoned token; those whose number is in `failing_sweeps` at
    their beginning (odd numbers) or in their last layer (even ones) whatever they hold; one of
    more than `largest_sweep_tokens` for memory.
    """

    def __init__(
        self,
        page_tokens: int,
        *,
        sweep_from_tokens: int,
        layers_count: int = 3,
        poison_ids: frozenset[int] = frozenset(),
        nan_ids: frozenset[int] = frozenset(),
        largest_sweep_tokens: int = 1 << 30,
        failing_sweeps: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(page_tokens, poison_ids=poison_ids, nan_ids=nan_ids)
        self.sweep_from_tokens = sweep_from_tokens
        self.layers_count = layers_count
        self.largest_sweep_tokens = largest_sweep_tokens
        self.failing_sweeps = failing_sweeps
        self.sweeps: list[StepWork] = []
        self.events: list[str] = []  # in order: step, begin, layer, end, fault, abandon
        self.sweeping = False

    def run(self, work: StepWork) -> StepOutcome:
        self.events.append("step")
        return super().run(work)

    def begin_sweep(self, work: StepWork) -> EchoSweep:
        assert not self.sweeping, "one sweep at a time"
        self.sweeps.append(work)
        self.events.append("begin")
        if len(self.sweeps) in self.failing_sweeps and len(self.sweeps) % 2 == 1:
            self.events.append("fault")
            raise RuntimeError("the sweep does not begin")
        self.sweeping = True
        return EchoSweep(self, work, fails=len(self.sweeps) in self.failing_sweeps)


class EchoSweep:
    """A sweep in flight. Writes through the pages it had at first, as a device would."""

    def __init__(self, engine: SweepEchoEngine, work: StepWork, *, fails: bool) -> None:
        self._engine = engine
        self._work = work
        self._fails = fails
        self._pages = [list(one.pages) for one in work.sequences]
        self._layers_left = engine.layers_count

    def advance(self) -> StepOutcome | None:
        engine = self._engine
        assert engine.sweeping
        assert self._layers_left > 0, "the sweep is over"
        self._layers_left -= 1
        engine.events.append("layer")
        tables = [list(one.pages) for one in self._work.sequences]
        assert tables == self._pages, "the pages of a sweep have moved"
        if self._work.tokens_count > engine.largest_sweep_tokens:
            self._end("fault")
            raise MemoryError("the sweep is too large")
        tokens = {token for one in self._work.sequences for token in one.token_ids}
        middle = self._layers_left == engine.layers_count // 2
        if (middle and engine._poison_ids & tokens) or (self._fails and self._layers_left == 0):
            self._end("fault")
            raise RuntimeError("a poisoned layer")
        # what is written in the last layer is what the next tokens are read from
        for one in self._work.sequences:
            for offset, token in enumerate(one.token_ids):
                slot = engine._slot(one, one.first_position + offset)
                engine._memory[slot] = token if self._layers_left == 0 else -1
        if self._layers_left > 0:
            return None
        self._end("end")
        return StepOutcome(
            outcomes=tuple(
                engine._outcome(one) for one in self._work.sequences if one.draw_index is not None
            )
        )

    def abandon(self) -> None:
        assert self._layers_left > 0, "the sweep is over"
        self._end("abandon")

    def _end(self, event: str) -> None:
        self._layers_left = 0
        self._engine.sweeping = False
        self._engine.events.append(event)
