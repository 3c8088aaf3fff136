"""A bench that sweeps, in the loop's order: begin a sweep, one step, one layer."""

from __future__ import annotations

from freetokend.engine.work import StepWork, Sweep
from freetokend.scheduler.limits import StepFault
from freetokend.scheduler.sequence import Sequence
from tests.scheduler.support import Bench
from tests.scheduler.sweep_echo import SweepEchoEngine


class SweepBench(Bench):
    """Checks every plan against what was there before it. `step` is a turn of the loop."""

    def __init__(
        self,
        engine: SweepEchoEngine,
        *,
        sweep_tokens: int,
        pages_count: int = 64,
        page_tokens: int = 4,
        max_running_count: int = 4,
        max_waiting_count: int = 8,
        step_tokens: int = 16,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(
            pages_count=pages_count,
            page_tokens=page_tokens,
            max_running_count=max_running_count,
            max_waiting_count=max_waiting_count,
            step_tokens=step_tokens,
            eos_token_ids=eos_token_ids,
            engine=engine,
            sweep_from_tokens=engine.sweep_from_tokens,
            sweep_tokens=sweep_tokens,
        )
        self.sweep_engine = engine
        self.sweep: Sweep | None = None
        self.roster = self.scheduler._roster

    def step(self) -> bool:
        """False when there was nothing to do."""
        self.abandon_deserted()
        self.begin()
        stepped = self.decode_step()
        return self.layer() or stepped

    def begin(self) -> bool:
        """Plan and begin a sweep if there is none; True when it has begun."""
        if self.sweep is not None:
            return False
        work = self._planned_sweep()
        if work is None:
            return False
        try:
            self.sweep = self.sweep_engine.begin_sweep(work)
        except RuntimeError as error:
            self.scheduler.sweep_failed(StepFault(message=str(error)))
        self.collect()
        return self.sweep is not None

    def decode_step(self) -> bool:
        """One step, as without sweeps."""
        return super().step()

    def planned(self, work: StepWork | None) -> None:
        """Nobody who can decode is left out, and no long prompt is read beside a sweep."""
        if any(one.suspect_count for one in self.roster.running):
            return
        keys = {one.key for one in work.sequences} if work is not None else set()
        for sequence in self.roster.running:
            if sequence.is_decoding and sequence.key not in keys:
                assert self.sweep is not None, "it waits for no sweep"
                assert self.allocator.free_count == 0
        if self.sweep is not None:
            read = [one for one in self.roster.running if one.key in keys and not one.is_decoding]
            most = max(self.scheduler._sweep_from_tokens - 1, 0)
            assert sum(one.pending_count for one in read) <= most

    def layer(self) -> bool:
        """One layer of the sweep, if there is one."""
        if self.sweep is None:
            return False
        sweep, self.sweep = self.sweep, None
        try:
            outcome = sweep.advance()
        except MemoryError as error:
            self.scheduler.sweep_failed(StepFault(message=str(error), memory=True))
        except RuntimeError as error:
            self.scheduler.sweep_failed(StepFault(message=str(error)))
        else:
            if outcome is None:
                self.sweep = sweep
            else:
                self.scheduler.commit_sweep(outcome)
        self.collect()
        return True

    def abandon(self) -> None:
        """End the sweep before its end, if there is one."""
        if self.sweep is not None:
            self.sweep.abandon()
            self.sweep = None
            self.scheduler.sweep_abandoned()
            self.collect()

    def abandon_deserted(self) -> None:
        if self.scheduler.sweep_is_deserted:
            self.abandon()
            assert not self.scheduler.is_sweeping

    def _planned_sweep(self) -> StepWork | None:
        """The sweep; it has everyone who fits, oldest first."""
        scheduler, roster = self.scheduler, self.roster
        most, least = scheduler._sweep_budget.tokens, scheduler._sweep_from_tokens
        suspects = any(one.suspect_count for one in roster.running)
        prefills = [one for one in roster.running if not one.is_decoding]
        eligible = sorted(prefills + self._fitting(), key=lambda one: one.key)
        expected: list[tuple[int, int]] = []
        left = most
        for one in eligible:
            if left > 0:
                expected.append((one.key, min(one.pending_count, left)))
                left -= expected[-1][1]
        preemptions_count = roster.preemptions_count
        work = scheduler.plan_sweep()
        worth_it = 0 < least <= most - left and not suspects
        if roster.preemptions_count == preemptions_count:
            assert (work is not None) == worth_it
        for one in roster.running:
            held = len(one.pages) * self.scheduler._limits.page_tokens
            assert not (worth_it and one.is_decoding) or held > one.computed_count
        if work is not None:
            assert worth_it
            shares = [(one.key, len(one.token_ids)) for one in work.sequences]
            assert least <= work.tokens_count <= most
            if roster.preemptions_count == preemptions_count:
                assert shares == expected
            assert set(shares) <= set(expected)
        return work

    def _fitting(self) -> list[Sequence]:
        """Who would start in a sweep: by age, and nobody behind one that does not fit."""
        roster = self.roster
        most_running = self.scheduler._limits.max_running_count
        fitting: list[Sequence] = []
        free = roster.unpromised_pages()
        for one in roster.waiting:
            free -= roster.admission_pages(one)
            if len(roster.running) + len(fitting) == most_running:
                break
            if free < 0 and (roster.running or fitting):
                break
            fitting.append(one)
        return fitting
