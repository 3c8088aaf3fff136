"""The state machine of continuous batching. One thread calls it; it never waits for anything.

    submit, cancel, drain -> plan -> (the engine computes) -> commit | step_failed -> take_updates

Every accepted request is answered exactly once. The oldest request is never preempted and moves
in every step it can, so everything that was accepted ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from freetokend.core.errors import InternalError, Reason
from freetokend.engine.work import SequenceOutcome, StepOutcome, StepWork
from freetokend.kvcache.allocator import PageAllocator
from freetokend.link.messages import FinishReason, GenerateRequest, SequenceUpdate
from freetokend.policy.admission import AdmissionState, Refused, decide_admission
from freetokend.policy.kv_sizing import pages_for
from freetokend.scheduler.limits import (
    SchedulerCounts,
    SchedulerLimits,
    StepFault,
    sampling_params,
)
from freetokend.scheduler.sequence import Place, Sequence

# A sequence that runs alone after a failed step does so in small chunks: should the cause have
# been the size of the step, it gets through.
ISOLATED_CHUNK_TOKENS: Final = 64

_AGE: Final = attrgetter("key")


class Scheduler:
    """Owner of all sequences and, through the allocator, of their pages."""

    def __init__(
        self,
        limits: SchedulerLimits,
        allocator: PageAllocator,
        fresh_seed: Callable[[], int],
    ) -> None:
        limits.check(allocator.pages_count)
        self._limits = limits
        self._allocator = allocator
        self._fresh_seed = fresh_seed
        self._waiting: list[Sequence] = []  # by age
        self._running: list[Sequence] = []  # by age
        self._by_id: dict[str, Sequence] = {}
        self._updates: list[SequenceUpdate] = []
        self._in_flight: list[tuple[Sequence, int]] | None = None
        self._next_key = 0
        self._step_tokens = limits.step_tokens
        self._draining = False
        self._steps_count = 0
        self._prefill_tokens_count = 0
        self._decode_tokens_count = 0
        self._preemptions_count = 0
        self._step_faults_count = 0

    # -- what comes from outside

    def submit(self, request: GenerateRequest) -> None:
        """Accept or refuse; a refusal is an update. An id that is being served is ignored."""
        self._require_between_steps()
        if request.request_id in self._by_id:
            return
        refusal = self._refusal(request)
        if refusal is not None:
            self._updates.append(
                SequenceUpdate(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error_reason=refusal.reason,
                    error_message=refusal.message,
                    prompt_tokens=len(request.prompt_token_ids),
                )
            )

    def cancel(self, request_id: str) -> None:
        """End a request now, wherever it is; unknown ids (already answered) are ignored."""
        self._require_between_steps()
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED)

    def drain(self) -> None:
        """Refuse what comes from now on; what was accepted is finished."""
        self._draining = True

    def abandon(self, reason: Reason, message: str) -> None:
        """End everything that was accepted with this error."""
        self._in_flight = None
        for sequence in list(self._by_id.values()):
            self._finish(sequence, FinishReason.ERROR, reason=reason, message=message)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def take_updates(self) -> tuple[SequenceUpdate, ...]:
        """Everything that is to be told since the last call."""
        updates = tuple(self._updates)
        self._updates.clear()
        return updates

    def counts(self) -> SchedulerCounts:
        return SchedulerCounts(
            running_count=len(self._running),
            waiting_count=len(self._waiting),
            pages_used_count=self._allocator.used_count,
            pages_total_count=self._allocator.pages_count,
            steps_count=self._steps_count,
            prefill_tokens_count=self._prefill_tokens_count,
            decode_tokens_count=self._decode_tokens_count,
            preemptions_count=self._preemptions_count,
            step_faults_count=self._step_faults_count,
        )

    def check_integrity(self) -> None:
        """Raise InternalError unless places, ages and pages agree with each other."""
        self._allocator.check_integrity(sequence.pages for sequence in self._running)
        for place, sequences in ((Place.WAITING, self._waiting), (Place.RUNNING, self._running)):
            keys = [sequence.key for sequence in sequences]
            if keys != sorted(set(keys)):
                raise InternalError(f"{place.name} sequences are not ordered by age: {keys}")
            for sequence in sequences:
                held = len(sequence.pages) * self._limits.page_tokens
                if sequence.place is not place or sequence.computed_count > held:
                    raise InternalError(f"sequence {sequence.key} is inconsistent")
        if len(self._by_id) != len(self._waiting) + len(self._running):
            raise InternalError("a request is nowhere or in two places")

    # -- one step

    def plan(self) -> StepWork | None:
        """The next step, or None when there is nothing to compute."""
        self._require_between_steps()
        suspect = next((one for one in self._running if one.suspect_count > 0), None)
        if suspect is not None:  # it has the pages already, from the step that failed
            chosen = [(suspect, min(suspect.suspect_count, ISOLATED_CHUNK_TOKENS))]
        else:
            chosen = self._chosen_with_pages(self._shares())
        if not chosen:
            return None
        self._in_flight = chosen
        return StepWork(sequences=tuple(sequence.work(count) for sequence, count in chosen))

    def commit(self, outcome: StepOutcome) -> None:
        """Take a computed step into account: KV, sampled tokens, ends."""
        in_flight = self._take_in_flight()
        self._steps_count += 1
        by_key = {one.key: one for one in outcome.outcomes}
        for sequence, count in in_flight:
            if not sequence.is_decoding:
                self._prefill_tokens_count += count
            sequence.computed_count += count
            sequence.suspect_count = max(sequence.suspect_count - count, 0)
            if sequence.pending_count == 0:
                self._take_outcome(sequence, by_key[sequence.key])

    def step_failed(self, fault: StepFault) -> bool:
        """Take a step that raised into account; True when a request was failed for it.

        A step of several requests names no culprit: each of them runs alone next. A request that
        fails alone, in a small chunk, is answered with the error. Computing a token again writes
        the same keys and values, so nothing else has to be undone.
        """
        in_flight = self._take_in_flight()
        self._step_faults_count += 1
        if fault.memory:
            smallest = self._limits.max_running_count + 1
            self._step_tokens = max(self._step_tokens // 2, smallest)
        if len(in_flight) > 1 or in_flight[0][1] > ISOLATED_CHUNK_TOKENS:
            for sequence, count in in_flight:
                sequence.suspect_count = count
            return False
        self._finish(
            in_flight[0][0],
            FinishReason.ERROR,
            reason=Reason.ENGINE_FAILED,
            message=f"Computing this request failed: {fault.message}",
        )
        return True

    # -- parts of planning

    def _shares(self) -> list[tuple[Sequence, int]]:
        """Tokens per running sequence, then new ones: decode first, prompts by age after it."""
        decoding_count = sum(1 for one in self._running if one.is_decoding)
        budget = self._step_tokens - decoding_count
        shares: list[tuple[Sequence, int]] = []
        for sequence in self._running:
            if sequence.is_decoding:
                shares.append((sequence, 1))
            elif budget > 0:
                count = min(sequence.pending_count, budget)
                shares.append((sequence, count))
                budget -= count
        free_count = self._unpromised_pages()
        while self._waiting and budget > 0:
            needed = self._admission_pages(self._waiting[0])
            if len(self._running) >= self._limits.max_running_count:
                break
            if needed > free_count and self._running:
                break
            free_count -= needed
            sequence = self._waiting.pop(0)
            sequence.place = Place.RUNNING
            insort(self._running, sequence, key=_AGE)
            count = min(sequence.pending_count, budget)
            shares.append((sequence, count))
            budget -= count
        return sorted(shares, key=lambda share: share[0].key)

    def _admission_pages(self, sequence: Sequence) -> int:
        """Pages for all that is known and one more token."""
        return pages_for(len(sequence.tokens) + 1, self._limits.page_tokens)

    def _unpromised_pages(self) -> int:
        """Free pages less those that running prompts will still take: prevents thrashing."""
        promised = sum(max(self._admission_pages(one) - len(one.pages), 0) for one in self._running)
        return self._allocator.free_count - promised

    def _chosen_with_pages(
        self, shares: Iterable[tuple[Sequence, int]]
    ) -> list[tuple[Sequence, int]]:
        """Give pages to the shares, oldest first; the youngest running make room.

        Who makes room is never older than who needs it, so what has been chosen stays.
        """
        chosen: list[tuple[Sequence, int]] = []
        for sequence, count in shares:
            if sequence.place is Place.RUNNING and self._take_pages(sequence, count):
                chosen.append((sequence, count))
        return chosen

    def _take_pages(self, sequence: Sequence, count: int) -> bool:
        """False when `sequence` itself was preempted."""
        needed = pages_for(sequence.computed_count + count, self._limits.page_tokens)
        needed -= len(sequence.pages)
        while needed > 0:
            pages = self._allocator.take(needed)
            if pages is not None:
                sequence.pages.extend(pages)
                return True
            youngest = self._running[-1]
            if youngest is sequence and len(self._running) == 1:
                raise InternalError(
                    f"a request of {len(sequence.tokens)} tokens was admitted but "
                    f"{self._allocator.pages_count} pages do not hold it"
                )
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give its pages back; it will be computed again, prompt and generated tokens, in turn."""
        self._running.remove(sequence)
        self._release_pages(sequence)
        sequence.place = Place.WAITING
        insort(self._waiting, sequence, key=_AGE)
        self._preemptions_count += 1

    # -- parts of accepting and ending

    def _refusal(self, request: GenerateRequest) -> Refused | None:
        """Enqueue the request and return None, or say why not."""
        free_places = self._limits.max_running_count - len(self._running)
        decision = decide_admission(
            len(request.prompt_token_ids),
            request.max_new_tokens,
            AdmissionState(
                servable_context_tokens=self._limits.servable_context_tokens,
                waiting_count=max(len(self._waiting) - free_places, 0),
                max_waiting_count=self._limits.max_waiting_count,
                draining=self._draining,
            ),
        )
        if isinstance(decision, Refused):
            return decision
        lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if lowest < 0 or highest >= self._limits.vocab_size:
            bad = lowest if lowest < 0 else highest
            return Refused(
                reason=Reason.INVALID_REQUEST,
                message=f"Token id {bad} is outside 0..{self._limits.vocab_size - 1}.",
            )
        try:
            sampling = sampling_params(request.sampling, self._fresh_seed)
        except ValueError as error:
            return Refused(reason=Reason.INVALID_REQUEST, message=str(error))
        stop_ids: frozenset[int] = frozenset()
        if not request.ignore_eos:  # otherwise only the length ends it, whoever lists the ids
            stop_ids = self._limits.eos_token_ids.union(request.stop_token_ids)
        sequence = Sequence(self._next_key, request, sampling, decision.max_new_tokens, stop_ids)
        self._next_key += 1
        self._by_id[request.request_id] = sequence
        self._waiting.append(sequence)
        return None

    def _take_outcome(self, sequence: Sequence, outcome: SequenceOutcome) -> None:
        token_id = outcome.token_id
        if token_id is None:
            self._finish(
                sequence,
                FinishReason.ERROR,
                reason=Reason.ENGINE_FAILED,
                message=f"The model's output for this request is unusable: {outcome.error}",
            )
            return
        self._decode_tokens_count += 1
        if token_id in sequence.stop_ids:
            self._finish(sequence, FinishReason.STOP, stop_tokens=1)
            return
        sequence.tokens.append(token_id)
        if sequence.generated_count >= sequence.max_new_tokens:
            self._finish(sequence, FinishReason.LENGTH, token_ids=(token_id,))
            return
        self._updates.append(SequenceUpdate(request_id=sequence.request_id, token_ids=(token_id,)))

    def _finish(
        self,
        sequence: Sequence,
        finish_reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        stop_tokens: int = 0,
        reason: Reason | None = None,
        message: str = "",
    ) -> None:
        """The only place where a request leaves: pages back, one last update."""
        del self._by_id[sequence.request_id]
        if sequence.place is Place.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release_pages(sequence)
        self._updates.append(
            SequenceUpdate(
                request_id=sequence.request_id,
                token_ids=token_ids,
                finish_reason=finish_reason,
                error_reason=reason,
                error_message=message,
                prompt_tokens=sequence.prompt_count,
                completion_tokens=sequence.generated_count + stop_tokens,
            )
        )

    def _release_pages(self, sequence: Sequence) -> None:
        self._allocator.release(sequence.pages)
        del sequence.pages[:]
        sequence.computed_count = 0

    def _require_between_steps(self) -> None:
        if self._in_flight is not None:
            raise InternalError("the scheduler was called while a step is being computed")

    def _take_in_flight(self) -> list[tuple[Sequence, int]]:
        in_flight = self._in_flight
        if in_flight is None:
            raise InternalError("a step ended that was not planned")
        self._in_flight = None
        return in_flight
