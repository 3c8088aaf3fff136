"""What the host device and a GPU decide alike, from what was measured: backend, slots, sweeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from freetokend.device.arena import ArenaError
from freetokend.enginehost.backend import cache_key
from freetokend.ftw.layout import ExpertBank
from freetokend.link.messages import EngineSettings, LayerRun
from freetokend.policy.backend_choice import (
    BackendDecision,
    BackendFacts,
    LayerChoice,
    decide_backend,
)
from freetokend.policy.prefill_crossover import PrefillFacts, prefill_crossover
from freetokend.policy.step_cost import StepCosts, estimated_miss_ratio


def decide(
    settings: EngineSettings,
    bank: ExpertBank,
    *,
    slots_count: int,
    fillable_layers_count: int,
    costs: StepCosts | None,
) -> BackendDecision:
    """The backend for so many slots; costs None: nothing could be measured. ConfigError as of
    `decide_backend`."""
    return decide_backend(
        settings.backend,
        BackendFacts(
            device_problem="",
            moe_layers_count=bank.moe_layers_count,
            experts_count=bank.experts_count,
            record_bytes=bank.record_bytes,
            slots_count=slots_count,
            fillable_layers_count=fillable_layers_count,
            cpu_kernel=True,
            weight_format=bank.format,
            cache_key=cache_key(settings),
            misses_key="engine.layers" if settings.layers else "",
            costs=costs,
        ),
    )


def take_slots(
    resize: Callable[[int], object], planned_count: int, *, exact: bool, least_count: int
) -> str:
    """Grow to the slots of the plan, or to fewer where the memory went to others since it was made.

    What became of the plan, or nothing. Raises ArenaError where no other number will do (`exact`),
    and when there is no room for `least_count`.
    """
    slots_count = planned_count
    while True:
        try:
            resize(slots_count)
        except ArenaError as error:
            if exact or slots_count <= least_count:
                raise
            cause = error.message
            slots_count = max(slots_count // 2, least_count)
            continue
        if slots_count == planned_count:
            return ""
        return f"{slots_count} of the {planned_count} slots planned could be had: {cause}"


def sweep_from(
    costs: StepCosts,
    *,
    resident_ratio: float,
    cpu_kernel: bool,
    fillable_layers_count: int,
    token_s: float,
    most_tokens: int,
) -> int:
    """From how many prompt tokens on a sweep is faster; 0 when it never is. token_s: of the experts
    of all layers, for a token of many."""
    crossover = prefill_crossover(
        PrefillFacts(
            costs=costs,
            resident_ratio=resident_ratio,
            miss_ratio=estimated_miss_ratio(resident_ratio),
            cpu_kernel=cpu_kernel,
            fillable_layers_count=fillable_layers_count,
            stream_token_s=token_s,
            decode_token_s=token_s,
        ),
        most_tokens=most_tokens,
    )
    return crossover if crossover <= most_tokens else 0


def layer_runs(choices: tuple[LayerChoice, ...]) -> tuple[LayerRun, ...]:
    """Neighbouring layers with the same branch for the same reason."""
    return tuple(
        LayerRun(layers_count=len(list(run)), branch=choice.branch, reason=choice.reason)
        for choice, run in groupby(choices)
    )
