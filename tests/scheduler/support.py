"""Driving a scheduler with the echo engine, as the engine host's loop does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from freetokend.engine.work import StepWork
from freetokend.kvcache.allocator import PageAllocator
from freetokend.link.messages import FinishReason, GenerateRequest, Sampling, SequenceUpdate
from freetokend.scheduler.limits import SchedulerLimits, StepFault
from freetokend.scheduler.scheduler import Scheduler
from tests.scheduler.paged_echo import VOCAB_SIZE, PagedEchoEngine


def request(
    request_id: str,
    prompt: Iterable[int],
    max_new_tokens: int = 4,
    *,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    sampling: Sampling | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(temperature=0.0),
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )


class Bench:
    """A scheduler, its engine, and everything it has told so far; checks after every move."""

    def __init__(
        self,
        *,
        pages_count: int = 64,
        page_tokens: int = 4,
        max_running_count: int = 4,
        max_waiting_count: int = 8,
        step_tokens: int = 16,
        servable_context_tokens: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        engine: PagedEchoEngine | None = None,
        sweep_from_tokens: int = 0,
        sweep_tokens: int = 0,
    ) -> None:
        self.allocator = PageAllocator(pages_count)
        self.engine = engine or PagedEchoEngine(page_tokens)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_running_count=max_running_count,
                max_waiting_count=max_waiting_count,
                step_tokens=step_tokens,
                servable_context_tokens=servable_context_tokens or pages_count * page_tokens,
                vocab_size=VOCAB_SIZE,
                page_tokens=page_tokens,
                eos_token_ids=eos_token_ids,
                sweep_from_tokens=sweep_from_tokens,
                sweep_tokens=sweep_tokens,
            ),
            self.allocator,
            fresh_seed=lambda: 11,
        )
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, SequenceUpdate] = {}

    def collect(self) -> None:
        self.scheduler.check_integrity()
        for update in self.scheduler.take_updates():
            assert update.request_id not in self.ends, "an answer after the last one"
            self.tokens[update.request_id].extend(update.token_ids)
            if update.finish_reason is not None:
                self.ends[update.request_id] = update

    def submit(self, what: GenerateRequest) -> None:
        self.scheduler.submit(what)
        self.collect()

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)
        self.collect()

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        work = self.scheduler.plan()
        self.planned(work)
        if work is None:
            return False
        try:
            outcome = self.engine.run(work)
        except MemoryError as error:
            self.scheduler.step_failed(StepFault(message=str(error), memory=True))
        except RuntimeError as error:
            self.scheduler.step_failed(StepFault(message=str(error)))
        else:
            self.scheduler.commit(outcome)
        self.collect()
        return True

    def planned(self, work: StepWork | None) -> None:
        """Called with each plan, before it is computed."""

    def run(self, most_steps: int = 10_000) -> int:
        """Step until idle; returns the number of steps."""
        for count in range(most_steps):
            if not self.step():
                assert not self.scheduler.has_work, "work is left but no step is planned"
                return count
        raise AssertionError(f"not idle after {most_steps} steps")

    def reason(self, request_id: str) -> FinishReason | None:
        return self.ends[request_id].finish_reason
