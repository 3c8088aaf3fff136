"""What the scheduler asks of one engine step and what comes back. Values only, no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a token; defaults change nothing. `temperature` 0 is greedy.

    Filters apply in this order: temperature, top_k (0: off), top_p (1: off), min_p (0: off).
    The draw for a request's i-th token depends on (seed, i) only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceWork:
    """The tokens of one sequence in one step.

    `pages` is the sequence's page table (int32), long enough for all of `token_ids`; it is only
    valid during the step, or until the sweep has ended. `draw_index` is the index of the token to
    sample, None when the last of `token_ids` is not the end of what is known (a prefill chunk in
    the middle).
    """

    key: int
    token_ids: Sequence[int]
    first_position: int
    pages: array[int]
    sampling: SamplingParams
    draw_index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step: every sequence has at least one token; keys are distinct."""

    sequences: tuple[SequenceWork, ...]

    @property
    def tokens_count(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutcome:
    """What a sampled sequence got: a token, or why it has none (its logits are not numbers)."""

    key: int
    token_id: int | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One outcome per sequence that had a `draw_index`, in the order of the work."""

    outcomes: tuple[SequenceOutcome, ...]


class StepEngine(Protocol):
    """Computes steps. After an exception the step may be asked again, whole or in parts."""

    def run(self, work: StepWork) -> StepOutcome: ...


class Sweep(Protocol):
    """One pass of a prefill through all layers, a layer at a time.

    Between two calls of `advance` the engine may be asked for steps of other sequences.
    """

    def advance(self) -> StepOutcome | None:
        """Compute up to and including the next MoE layer; None while there is more to do.

        After an outcome or an exception the sweep is over and holds nothing any more; what it
        was to compute may then be asked again, in a sweep or in steps.
        """
        ...

    def abandon(self) -> None:
        """End it before its end, between two layers; nothing that it computed counts."""
        ...


@runtime_checkable
class SweepEngine(StepEngine, Protocol):
    """A StepEngine that also prefills by streaming whole layers. One sweep at a time.

    `sweep_from_tokens`: from so many prompt tokens on a sweep is faster than steps; 0: never
    sweep. It may change between two sweeps.
    """

    @property
    def sweep_from_tokens(self) -> int: ...

    def begin_sweep(self, work: StepWork) -> Sweep: ...
