"""What the scheduler is given: limits, end tokens, and where seeds come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from freetokend.core.errors import ConfigError
from freetokend.engine.work import SamplingParams
from freetokend.link.messages import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one engine. `step_tokens` must leave room for prefill beside a full batch.

    `sweep_from_tokens`: from so many prompt tokens on a sweep is faster than steps (0: never);
    `sweep_tokens`: the most of one sweep. There are no sweeps where the most is less than that.
    """

    max_running_count: int
    max_waiting_count: int
    step_tokens: int
    servable_context_tokens: int
    vocab_size: int
    page_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    sweep_from_tokens: int = 0
    sweep_tokens: int = 0

    def check(self, pages_count: int) -> None:
        """Raise ConfigError when these bounds cannot be kept together."""
        if self.step_tokens <= self.max_running_count:
            raise ConfigError(
                f"engine.step_tokens = {self.step_tokens} must be larger than "
                f"engine.max_running_count = {self.max_running_count}: a step decodes one token "
                "of every running request and still has to read prompts.",
                param="engine.step_tokens",
            )
        if self.servable_context_tokens > pages_count * self.page_tokens:
            raise ConfigError(
                f"a servable context of {self.servable_context_tokens} tokens does not fit in "
                f"{pages_count} pages of {self.page_tokens} tokens."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """Gauges and counters, for EngineStats. `decode_tokens_count` counts every sampled token.

    `pending_prompt_tokens`: of accepted requests, not computed yet; `waiting_prompt_tokens`: of
    those that do not run. `longest_context_tokens`: of one that runs. `sweeps_count`: those that
    reached their end; they are no steps. `step_faults_count`: of both.
    """

    running_count: int
    waiting_count: int
    pages_used_count: int
    pages_total_count: int
    steps_count: int
    prefill_tokens_count: int
    decode_tokens_count: int
    preemptions_count: int
    step_faults_count: int
    sweeps_count: int
    pending_prompt_tokens: int
    longest_context_tokens: int
    waiting_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFault:
    """An exception of a step, as a value. `memory`: an allocation failed."""

    message: str
    memory: bool = False


def sampling_params(sampling: Sampling, fresh_seed: Callable[[], int]) -> SamplingParams:
    """The engine's parameters; 0 means off for top_p. Raises ValueError naming a bad field."""
    for name, value, top in (
        ("temperature", sampling.temperature, math.inf),
        ("top_p", sampling.top_p, 1.0),
        ("min_p", sampling.min_p, 1.0),
        ("top_k", float(sampling.top_k), math.inf),
    ):
        if not math.isfinite(value) or not 0.0 <= value <= top:
            limit = "at least 0" if math.isinf(top) else "between 0 and 1"
            raise ValueError(f"{name} is {value}; it must be a number {limit}.")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.top_p > 0.0 else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.seed is not None else fresh_seed(),
    )
