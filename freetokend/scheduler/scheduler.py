"""The state machine of continuous batching. One thread calls it; it never waits for anything.

    submit, cancel, drain -> plan -> (the engine computes) -> commit | step_failed -> take_updates
    plan_sweep -> (the engine computes layers, and steps between them) -> commit_sweep |
    sweep_failed | sweep_abandoned

Every accepted request is answered exactly once. The oldest request is never preempted and moves
in every step it can, so everything that was accepted ends.

Steps and sweeps do not starve each other. A sweep has a fixed number of layers and its caller
computes at most one step between two of them, so it ends. Before it starts everyone who decodes
has the page for the next token, and the next sweep is planned no earlier than a layer, hence a
step, later: whoever decodes gets a token in each sweep, and in each layer as long as pages last;
when they do not, an older sequence takes those of younger ones outside the sweep or waits for its
end. A sweep is filled by age, so the oldest prompt moves in each. A short prompt may overtake a
longer one beside a sweep, but not at the cost of the place and the pages that the longer one
needs; behind a prompt that does not fit nobody starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from freetokend.core.errors import InternalError, Reason
from freetokend.engine.work import SequenceOutcome, StepOutcome, StepWork
from freetokend.kvcache.allocator import PageAllocator
from freetokend.link.messages import FinishReason, GenerateRequest, SequenceUpdate
from freetokend.policy.admission import AdmissionState, Refused, decide_admission
from freetokend.scheduler.budget import TokenBudget
from freetokend.scheduler.limits import (
    SchedulerCounts,
    SchedulerLimits,
    StepFault,
    sampling_params,
)
from freetokend.scheduler.roster import Roster, Share
from freetokend.scheduler.sequence import Place, Sequence
from freetokend.scheduler.shares import (
    decoding_shares,
    step_shares,
    step_shares_beside_sweep,
    sweep_shares,
)

# A sequence that runs alone after a failed step does so in small chunks: should the cause have
# been the size of the step, it gets through.
ISOLATED_CHUNK_TOKENS: Final = 64
# Successes before a step or a sweep that memory was short for may grow again: a step that fails
# sends everyone in it through a step alone, a sweep that fails costs its prompts a sweep.
STEPS_PATIENCE_COUNT: Final = 1024
SWEEPS_PATIENCE_COUNT: Final = 16


class Scheduler:
    """What happens to the sequences of its roster, and what is told about them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        allocator: PageAllocator,
        fresh_seed: Callable[[], int],
    ) -> None:
        limits.check(allocator.pages_count)
        self._limits = limits
        self._servable_context_tokens = limits.servable_context_tokens
        self._allocator = allocator
        self._fresh_seed = fresh_seed
        self._roster = Roster(limits, allocator)
        self._updates: list[SequenceUpdate] = []
        self._in_flight: list[Share] | None = None
        self._sweep: list[Share] | None = None
        self._isolating_sweep = False
        self._isolated_last = False
        self._next_key = 0
        self._step_budget = TokenBudget(
            limits.step_tokens,
            least_tokens=limits.max_running_count + 1,
            patience_count=STEPS_PATIENCE_COUNT,
        )
        self._sweep_budget = TokenBudget(
            limits.sweep_tokens, least_tokens=0, patience_count=SWEEPS_PATIENCE_COUNT
        )
        self._sweep_from_tokens = limits.sweep_from_tokens
        self._draining = False
        self._steps_count = 0
        self._prefill_tokens_count = 0
        self._decode_tokens_count = 0
        self._step_faults_count = 0
        self._sweeps_count = 0

    # -- what comes from outside

    def submit(self, request: GenerateRequest) -> None:
        """Accept or refuse; a refusal is an update. An id that is being served is ignored."""
        self._require_between_steps()
        if request.request_id in self._roster.by_id:
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
        """End a request now, wherever it is; unknown ids (already answered) are ignored.

        The pages of one in a sweep are given back when the sweep ends: it still writes into them.
        """
        self._require_between_steps()
        sequence = self._roster.by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED)

    def drain(self) -> None:
        """Refuse what comes from now on; what was accepted is finished."""
        self._draining = True

    def abandon(self, reason: Reason, message: str) -> None:
        """End everything that was accepted with this error. A sweep has been abandoned before."""
        self._in_flight = None
        if self._sweep is not None:
            self.sweep_abandoned()
        for sequence in list(self._roster.by_id.values()):
            self._finish(sequence, FinishReason.ERROR, reason=reason, message=message)

    def set_sweep_from(self, tokens: int) -> None:
        """The crossover, which moves with what is resident; 0: no sweep. For the next sweep."""
        self._sweep_from_tokens = tokens

    @property
    def servable_context_tokens(self) -> int:
        """The most that one request can have; from any thread."""
        return self._servable_context_tokens

    def set_servable_context(self, tokens: int) -> None:
        """The most that one request can have, from now on; what was accepted keeps its word."""
        self._servable_context_tokens = tokens

    def promised_pages(self) -> int:
        """With fewer pages not everything that was accepted could be finished."""
        return self._roster.promised_pages()

    def refuse_larger(self, message: str) -> None:
        """End the requests that can have more tokens than are servable now. None of them runs."""
        most = self._servable_context_tokens
        for sequence in list(self._roster.by_id.values()):
            if sequence.prompt_count + sequence.max_new_tokens > most:
                self._finish(
                    sequence,
                    FinishReason.ERROR,
                    reason=Reason.ENGINE_UNAVAILABLE,
                    message=message,
                )

    @property
    def has_work(self) -> bool:
        return bool(self._roster.by_id)

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    @property
    def is_sweeping(self) -> bool:
        return self._sweep is not None

    @property
    def sweep_is_deserted(self) -> bool:
        """Whether a sweep is computed for nobody any more."""
        return self._sweep is not None and all(
            sequence.place is Place.ENDED for sequence, _ in self._sweep
        )

    def take_updates(self) -> tuple[SequenceUpdate, ...]:
        """Everything that is to be told since the last call."""
        updates = tuple(self._updates)
        self._updates.clear()
        return updates

    def counts(self) -> SchedulerCounts:
        return SchedulerCounts(
            running_count=len(self._roster.running),
            waiting_count=len(self._roster.waiting),
            pages_used_count=self._allocator.used_count,
            pages_total_count=self._allocator.pages_count,
            steps_count=self._steps_count,
            prefill_tokens_count=self._prefill_tokens_count,
            decode_tokens_count=self._decode_tokens_count,
            preemptions_count=self._roster.preemptions_count,
            step_faults_count=self._step_faults_count,
            sweeps_count=self._sweeps_count,
            pending_prompt_tokens=self._roster.pending_prompt_tokens,
            longest_context_tokens=self._roster.longest_context_tokens,
            waiting_prompt_tokens=self._roster.waiting_tokens,
        )

    def check_integrity(self) -> None:
        """Raise InternalError unless places, ages, pages and the sweep agree with each other."""
        self._roster.check_integrity()
        swept = {sequence.key for sequence, _ in self._sweep or ()}
        marked = {one.key for one in self._roster.running if one.in_sweep}
        if not marked <= swept or (self._sweep is None) is not (not swept):
            raise InternalError(f"the sweep has {sorted(swept)}, but {sorted(marked)} are in it")

    # -- one step

    def plan(self) -> StepWork | None:
        """The next step, or None when there is nothing to compute but the sweep."""
        self._require_between_steps()
        chosen = self._chosen()
        if not chosen:
            return None
        self._in_flight = chosen
        return StepWork(sequences=tuple(sequence.work(count) for sequence, count in chosen))

    def commit(self, outcome: StepOutcome) -> None:
        """Take a computed step into account: KV, sampled tokens, ends."""
        in_flight = self._take_in_flight()
        self._steps_count += 1
        self._step_budget.succeeded()
        # A machine without memory for any sweep computes no sweep that could say it has some now.
        if self._sweep_budget.tokens < self._sweep_from_tokens:
            self._sweep_budget.succeeded()
        self._take_computed(in_flight, outcome)

    def step_failed(self, fault: StepFault) -> bool:
        """Take a step that raised into account; True when a request was failed for it.

        A step of several requests names no culprit: each of them runs alone next. A request that
        fails alone, in a small chunk, is answered with the error. Computing a token again writes
        the same keys and values, so nothing else has to be undone.
        """
        in_flight = self._take_in_flight()
        self._step_faults_count += 1
        if fault.memory:
            self._step_budget.fell_short(self._step_budget.tokens)
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

    # -- one sweep

    def plan_sweep(self) -> StepWork | None:
        """The prompts of one sweep, or None when steps compute what there is sooner.

        All running and waiting prefills that fit share it. The work's page tables are valid until
        the sweep has ended; steps may be planned and computed meanwhile.
        """
        self._require_between_steps()
        if self._sweep is not None:
            raise InternalError("a sweep was planned while another is being computed")
        most_tokens = self._sweep_budget.tokens
        if not 0 < self._sweep_from_tokens <= most_tokens or self._suspect() is not None:
            return None
        shares = sweep_shares(self._roster, most_tokens, self._sweep_from_tokens)
        chosen = [share for share in self._roster.with_pages(shares) if not share[0].is_decoding]
        if sum(count for _, count in chosen) < self._sweep_from_tokens:
            return None  # who decodes took the pages; the rest keeps those it got
        for sequence, _ in chosen:
            sequence.in_sweep = True
        self._sweep = chosen
        return StepWork(sequences=tuple(sequence.work(count) for sequence, count in chosen))

    def commit_sweep(self, outcome: StepOutcome) -> None:
        """Take a computed sweep into account, for those that have not ended meanwhile."""
        self._sweeps_count += 1
        self._sweep_budget.succeeded()
        self._take_computed(self._take_sweep(), outcome)

    def sweep_failed(self, fault: StepFault) -> None:
        """Take a sweep that raised into account.

        Without memory the prompts are asked again in smaller sweeps, at last in steps. Otherwise
        each of them runs alone next, in steps: there the one that is at fault is found.
        """
        tokens_count = sum(count for _, count in self._sweep or ())
        sweep = self._take_sweep()
        self._step_faults_count += 1
        if fault.memory:
            self._sweep_budget.fell_short(tokens_count)
            return
        self._isolating_sweep = True
        for sequence, count in sweep:
            sequence.suspect_count = count

    def sweep_abandoned(self) -> None:
        """A sweep was ended before its end: what is left of it is still to be computed."""
        self._take_sweep()

    # -- parts of planning

    def _chosen(self) -> list[Share]:
        suspect = self._suspect()
        if suspect is not None:  # it has the pages already, from the step that failed
            # A prompt of a sweep takes many steps alone: who decodes gets every other one.
            if self._isolating_sweep and self._isolated_last:
                self._isolated_last = False
                chosen = self._roster.with_pages(decoding_shares(self._roster))
                if chosen:
                    return chosen
            self._isolated_last = True
            return [(suspect, min(suspect.suspect_count, ISOLATED_CHUNK_TOKENS))]
        self._isolating_sweep = self._isolated_last = False
        if self._sweep is None:
            shares = step_shares(self._roster, self._step_budget.tokens)
        else:
            shares = step_shares_beside_sweep(
                self._roster, self._step_budget.tokens, self._sweep_from_tokens
            )
        return self._roster.with_pages(shares)

    def _suspect(self) -> Sequence | None:
        return next((one for one in self._roster.running if one.suspect_count > 0), None)

    # -- parts of accepting and ending

    def _refusal(self, request: GenerateRequest) -> Refused | None:
        """Enqueue the request and return None, or say why not."""
        free_places = self._roster.free_places_count
        decision = decide_admission(
            len(request.prompt_token_ids),
            request.max_new_tokens,
            AdmissionState(
                servable_context_tokens=self._servable_context_tokens,
                waiting_count=max(len(self._roster.waiting) - free_places, 0),
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
        self._roster.add(sequence)
        return None

    def _take_computed(self, shares: list[Share], outcome: StepOutcome) -> None:
        by_key = {one.key: one for one in outcome.outcomes}
        for sequence, count in shares:
            if not sequence.is_decoding:
                self._prefill_tokens_count += count
            sequence.computed_count += count
            sequence.suspect_count = max(sequence.suspect_count - count, 0)
            if sequence.pending_count == 0:
                self._take_outcome(sequence, by_key[sequence.key])

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
        """The only place where a request leaves: one last update, and its pages go back."""
        self._roster.remove(sequence)
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

    def _require_between_steps(self) -> None:
        if self._in_flight is not None:
            raise InternalError("the scheduler was called while a step is being computed")

    def _take_in_flight(self) -> list[Share]:
        in_flight = self._in_flight
        if in_flight is None:
            raise InternalError("a step ended that was not planned")
        self._in_flight = None
        return in_flight

    def _take_sweep(self) -> list[Share]:
        """The sweep has ended; those of its shares that have not."""
        self._require_between_steps()
        sweep = self._sweep
        if sweep is None:
            raise InternalError("a sweep ended that was not planned")
        self._sweep = None
        self._roster.release_departed()
        for sequence, _ in sweep:
            sequence.in_sweep = False
        return [share for share in sweep if share[0].place is Place.RUNNING]
