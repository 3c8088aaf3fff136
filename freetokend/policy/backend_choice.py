"""Which backend computes, and which branch each layer's misses take; with a reason for each.

fused: every expert has a slot. offload: misses are filled. hybrid: misses are split between fills
and the CPU. cpu: no GPU is used. "auto" takes the one with the least estimated seconds per token of
those that are possible; of equal ones the first in this order, which has fewer parts that can fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from freetokend.core.errors import ConfigError
from freetokend.core.units import format_bytes
from freetokend.policy.step_cost import (
    StepCosts,
    cpu_s,
    estimated_miss_ratio,
    fused_s,
    hybrid_s,
    offload_s,
)

AUTO: Final = "auto"
# An estimate is not better than this; within it the simpler backend is taken.
TIE_RATIO: Final = 1.01


class Backend(StrEnum):
    """The simpler first."""

    FUSED = "fused"
    OFFLOAD = "offload"
    HYBRID = "hybrid"
    CPU = "cpu"


# Without estimates: what is never much slower than the others where it is possible.
_UNMEASURED_ORDER: Final = (Backend.FUSED, Backend.HYBRID, Backend.OFFLOAD, Backend.CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What the choice is made from.

    device_problem: why no device can be used, empty if one can. slots_count: what the budget gives
    to experts. fillable_layers_count: MoE layers whose records are pinned. cpu_kernel: whether the
    CPU executes this weight format. cache_key, misses_key: a setting that was made and that only an
    expert cache, or only one with misses, can honour; empty if there is none. costs: None while
    nothing has been measured. miss_ratio: as measured, None to estimate it from the slots.
    """

    device_problem: str
    moe_layers_count: int
    experts_count: int
    record_bytes: int
    slots_count: int
    fillable_layers_count: int
    cpu_kernel: bool
    weight_format: str
    cache_key: str = ""
    misses_key: str = ""
    costs: StepCosts | None = None
    miss_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One backend. token_s: estimated seconds per token, None where impossible or not measured."""

    backend: Backend
    possible: bool
    token_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendDecision:
    """The backend with its reason, all candidates in the order of `Backend`, and what a user would
    otherwise wonder about."""

    backend: Backend
    reason: str
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()


class LayerBranch(StrEnum):
    """What happens to a layer's misses; `split` is by the table, `resident` has none."""

    RESIDENT = "resident"
    SPLIT = "split"
    FILL = "fill"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """One MoE layer's branch and its reason."""

    branch: LayerBranch
    reason: str


def decide_backend(asked: str, facts: BackendFacts) -> BackendDecision:
    """`asked`: "auto" or a backend. ConfigError: it is unknown or not possible, and why; with
    "auto", that none is."""
    unusable = facts.costs.problem() if facts.costs is not None else ""
    costs = None if unusable else facts.costs
    candidates = tuple(_candidate(backend, facts, costs) for backend in Backend)
    notes = (f"The measured rates are not used: {unusable}.",) if unusable else ()
    if asked == AUTO:
        backend, reason = _cheapest(candidates, measured=costs is not None)
        return BackendDecision(backend=backend, reason=reason, candidates=candidates, notes=notes)
    if asked not in list(Backend):
        raise ConfigError(
            f'engine.backend = "{asked}" is unknown; known are auto, {", ".join(Backend)}.',
            param="engine.backend",
        )
    chosen = next(candidate for candidate in candidates if candidate.backend == asked)
    if not chosen.possible:
        others = [f'"{one.backend}"' for one in candidates if one.possible]
        raise ConfigError(
            f'engine.backend = "{asked}" is not possible: {chosen.reason}. '
            f"Possible here: {', '.join(others) or 'none'}.",
            param="engine.backend",
        )
    return BackendDecision(
        backend=chosen.backend,
        reason=f'engine.backend = "{asked}"; {chosen.reason}',
        candidates=candidates,
        notes=notes,
    )


def resolve_layers(
    backend: Backend,
    *,
    fillable: Sequence[bool],
    cpu_kernel: bool,
    overrides: Mapping[int, LayerBranch],
) -> tuple[LayerChoice, ...]:
    """The branch of every MoE layer. `fillable[layer]`: its records are pinned. `overrides`: FILL
    or CPU by MoE layer index, counted from 0 without dense layers.

    ConfigError: an override that names no layer or cannot be met, or a layer that only the CPU
    could execute and cannot. For plan calls CPU means "not fillable", FILL a table with q = m,
    SPLIT the table of the measured rates.
    """
    for layer, branch in overrides.items():
        problem = _override_problem(backend, layer, branch, fillable, cpu_kernel)
        if problem:
            raise ConfigError(
                f'The override of layer {layer} to "{branch}" is not possible: {problem}.',
                param="engine.layers",
            )
    choices = tuple(
        LayerChoice(branch=overrides[layer], reason="set for this layer")
        if layer in overrides
        else _layer_choice(backend, pinned, cpu_kernel)
        for layer, pinned in enumerate(fillable)
    )
    for layer, choice in enumerate(choices):
        if choice.branch is LayerBranch.CPU and not cpu_kernel:
            raise ConfigError(
                f"Layer {layer} would be executed by the CPU, which has no kernel for the weight "
                f"format ({choice.reason}). Choose another weight format, or see that all layers "
                "can be pinned.",
                param="engine.backend",
            )
    return choices


def _layer_choice(backend: Backend, pinned: bool, cpu_kernel: bool) -> LayerChoice:
    match backend:
        case Backend.FUSED:
            return LayerChoice(branch=LayerBranch.RESIDENT, reason="every expert has a slot")
        case Backend.CPU:
            return LayerChoice(branch=LayerBranch.CPU, reason="no GPU is used")
        case Backend.OFFLOAD | Backend.HYBRID:
            if not pinned:
                return LayerChoice(
                    branch=LayerBranch.CPU,
                    reason="its records are not pinned and cannot be filled",
                )
            if backend is Backend.OFFLOAD:
                return LayerChoice(branch=LayerBranch.FILL, reason="offload fills every miss")
            if not cpu_kernel:
                return LayerChoice(
                    branch=LayerBranch.FILL, reason="the CPU has no kernel for the weight format"
                )
            return LayerChoice(branch=LayerBranch.SPLIT, reason="split by the measured rates")


def _override_problem(
    backend: Backend,
    layer: int,
    branch: LayerBranch,
    fillable: Sequence[bool],
    cpu_kernel: bool,
) -> str:
    if not 0 <= layer < len(fillable):
        return f"the model has MoE layers 0 to {len(fillable) - 1}"
    if branch not in (LayerBranch.FILL, LayerBranch.CPU):
        return f"a layer can be set to {LayerBranch.FILL} or {LayerBranch.CPU}"
    if backend is Backend.FUSED:
        return "with the backend fused every expert has a slot, and nothing is missing"
    if backend is Backend.CPU and branch is LayerBranch.FILL:
        return "the backend cpu uses no GPU that could be filled"
    if branch is LayerBranch.FILL and not fillable[layer]:
        return "its records are not pinned and cannot be filled"
    if branch is LayerBranch.CPU and not cpu_kernel:
        return "the CPU has no kernel for the weight format"
    return ""


def _candidate(backend: Backend, facts: BackendFacts, costs: StepCosts | None) -> Candidate:
    problem = _problem(backend, facts)
    if problem:
        return Candidate(backend=backend, possible=False, token_s=None, reason=problem)
    unpinned = facts.moe_layers_count - facts.fillable_layers_count
    on_cpu = ""
    if unpinned and backend in (Backend.OFFLOAD, Backend.HYBRID):
        on_cpu = (
            f"; {unpinned} of {facts.moe_layers_count} layers are not pinned, and the CPU executes "
            "them"
        )
    if costs is None:
        reason = f"its speed was not measured{on_cpu}"
        return Candidate(backend=backend, possible=True, token_s=None, reason=reason)
    token_s = _token_s(backend, facts, costs)
    reason = f"estimated {_milliseconds(token_s)} per token"
    if backend in (Backend.OFFLOAD, Backend.HYBRID):
        miss_ratio, source = _miss_ratio(facts)
        reason += (
            f" with {facts.slots_count} of {facts.experts_count} experts resident, {source} "
            f"misses {miss_ratio:.0%}{on_cpu}"
        )
    return Candidate(backend=backend, possible=True, token_s=token_s, reason=reason)


def _problem(backend: Backend, facts: BackendFacts) -> str:
    """Why the backend cannot be had; empty if it can."""
    no_kernel = f"the CPU has no kernel for {facts.weight_format}"
    if backend is Backend.CPU:
        if facts.cache_key:
            return f"{facts.cache_key} is set, which is for an expert cache"
        return "" if facts.cpu_kernel else no_kernel
    if facts.device_problem:
        return facts.device_problem
    unpinned = facts.moe_layers_count - facts.fillable_layers_count
    if backend is Backend.FUSED:
        if facts.misses_key:
            return (
                f"{facts.misses_key} is set, and nothing is missing where every expert has a slot"
            )
        if facts.slots_count >= facts.experts_count:
            if unpinned:
                return f"{unpinned} layers are not pinned, so that their slots cannot be filled"
            return ""
        needed_bytes = facts.experts_count * facts.record_bytes
        return (
            f"all {facts.experts_count} experts take {format_bytes(needed_bytes)}, and there are "
            f"{facts.slots_count} slots ({format_bytes(facts.slots_count * facts.record_bytes)})"
        )
    if facts.slots_count < 1:
        return "the GPU has no room for an expert"
    if backend is Backend.OFFLOAD:
        if unpinned and not facts.cpu_kernel:
            return f"{unpinned} layers are not pinned and {no_kernel}"
        return ""
    return "" if facts.cpu_kernel else no_kernel


def _miss_ratio(facts: BackendFacts) -> tuple[float, str]:
    """The ratio and where it comes from; what is no ratio was not measured."""
    if facts.miss_ratio is not None and 0 <= facts.miss_ratio <= 1:
        return facts.miss_ratio, "measured"
    resident_ratio = facts.slots_count / facts.experts_count if facts.experts_count else 1.0
    return estimated_miss_ratio(resident_ratio), "estimated"


def _token_s(backend: Backend, facts: BackendFacts, costs: StepCosts) -> float:
    miss_ratio, _ = _miss_ratio(facts)
    unpinned = facts.moe_layers_count - facts.fillable_layers_count
    match backend:
        case Backend.FUSED:
            return fused_s(costs)
        case Backend.OFFLOAD:
            return offload_s(costs, miss_ratio=miss_ratio, unfillable_layers_count=unpinned)
        case Backend.HYBRID:
            return hybrid_s(costs, miss_ratio=miss_ratio, unfillable_layers_count=unpinned)
        case Backend.CPU:
            return cpu_s(costs)


def _cheapest(candidates: tuple[Candidate, ...], *, measured: bool) -> tuple[Backend, str]:
    possible = [candidate for candidate in candidates if candidate.possible]
    if not possible:
        reasons = "; ".join(f"{one.backend}: {one.reason}" for one in candidates)
        raise ConfigError(
            f"No backend can serve this model here ({reasons}). Choose another weight format, or "
            "make room on the GPU.",
            param="engine.backend",
        )
    if not measured:
        by_order = {candidate.backend: candidate for candidate in possible}
        backend = next(one for one in _UNMEASURED_ORDER if one in by_order)
        return backend, _with_others(
            f"the first that is possible, as no speeds were measured: {by_order[backend].reason}",
            backend,
            candidates,
        )
    least_s = min(candidate.token_s or 0.0 for candidate in possible)
    best = next(one for one in possible if (one.token_s or 0.0) <= least_s * TIE_RATIO)
    return best.backend, _with_others(best.reason, best.backend, candidates)


def _with_others(reason: str, chosen: Backend, candidates: tuple[Candidate, ...]) -> str:
    others = [
        f"{one.backend} {_milliseconds(one.token_s)}"
        if one.token_s is not None
        else f"{one.backend} {'is possible' if one.possible else f'is not possible: {one.reason}'}"
        for one in candidates
        if one.backend is not chosen
    ]
    return f"{reason}; {'; '.join(others)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
