"""The backend: the cheapest of those that are possible, with a reason for each of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.errors import ConfigError
from freetokend.policy.backend_choice import (
    TIE_RATIO,
    Backend,
    BackendFacts,
    Candidate,
    LayerBranch,
    decide_backend,
    resolve_layers,
)
from freetokend.policy.fill_table import ideal_rates
from freetokend.policy.step_cost import (
    StepCosts,
    cpu_s,
    fused_s,
    hybrid_s,
    offload_s,
)

SIZE = 6 << 20
COSTS = StepCosts(
    moe_layers_count=40,
    experts_per_layer_count=256,
    top_k=8,
    rates=ideal_rates(SIZE, link_bytes_per_s=12e9, host_bytes_per_s=48e9),
    slot_bytes_per_s=1e12,
    device_dense_s=3e-3,
    cpu_dense_s=4e-2,
)
FACTS = BackendFacts(
    device_problem="",
    moe_layers_count=40,
    experts_count=10_240,
    record_bytes=SIZE,
    slots_count=3_789,
    fillable_layers_count=40,
    cpu_kernel=True,
    weight_format="bf16",
    costs=COSTS,
)
NO_GPU = "no NVIDIA GPU is visible to this process"


def rates(link: float, host: float) -> StepCosts:
    return replace(
        COSTS, rates=ideal_rates(SIZE, link_bytes_per_s=link * 1e9, host_bytes_per_s=host * 1e9)
    )


def candidate(facts: BackendFacts, backend: Backend) -> Candidate:
    return {one.backend: one for one in decide_backend("auto", facts).candidates}[backend]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # a slow link beside fast memory: the CPU takes its part
        (FACTS, Backend.HYBRID),
        # memory no faster than the link: splitting cannot help
        (replace(FACTS, costs=rates(50, 50)), Backend.OFFLOAD),
        # everything fits: nothing to decide
        (replace(FACTS, slots_count=10_240), Backend.FUSED),
        # the format has no kernel on the CPU
        (replace(FACTS, cpu_kernel=False), Backend.OFFLOAD),
        # no layer is pinned: the CPU executes all, and one backend is as good as the other
        (replace(FACTS, fillable_layers_count=0), Backend.OFFLOAD),
        (replace(FACTS, fillable_layers_count=0, costs=None), Backend.HYBRID),
        # what was set needs a cache, or a cache with misses
        (replace(FACTS, costs=rates(0.1, 48), slots_count=64), Backend.CPU),
        (
            replace(FACTS, costs=rates(0.1, 48), slots_count=64, cache_key="engine.layers"),
            Backend.HYBRID,
        ),
        (replace(FACTS, slots_count=10_240, misses_key="engine.layers"), Backend.OFFLOAD),
        (replace(FACTS, device_problem=NO_GPU), Backend.CPU),
        (replace(FACTS, slots_count=0), Backend.CPU),
        # a GPU behind a link so slow, and so little room, that it is in the way
        (
            replace(
                FACTS,
                slots_count=8,
                costs=replace(rates(0.1, 48), device_dense_s=4e-2),
            ),
            Backend.CPU,
        ),
    ],
)
def test_auto(facts: BackendFacts, expected: Backend) -> None:
    assert decide_backend("auto", facts).backend is expected


def test_auto_goes_by_seconds_and_not_by_a_ratio_of_rates() -> None:
    """The same rates: a high fixed cost of starting the CPU turns hybrid into offload."""
    costly = replace(COSTS, rates=replace(COSTS.rates, cpu_fixed_s=5e-2))
    assert decide_backend("auto", FACTS).backend is Backend.HYBRID
    assert decide_backend("auto", replace(FACTS, costs=costly)).backend is Backend.OFFLOAD


def test_a_gain_within_the_estimates_error_is_left_to_the_simpler() -> None:
    """Hybrid saves some milliseconds of three seconds."""
    heavy = replace(FACTS, costs=replace(COSTS, device_dense_s=3.0, cpu_dense_s=30.0))
    offload, hybrid = (candidate(heavy, one) for one in (Backend.OFFLOAD, Backend.HYBRID))
    assert offload.token_s is not None
    assert hybrid.token_s is not None
    assert hybrid.token_s < offload.token_s
    assert decide_backend("auto", heavy).backend is Backend.OFFLOAD


def test_every_candidate_has_its_seconds_or_its_reason() -> None:
    decision = decide_backend("auto", FACTS)
    assert [one.backend for one in decision.candidates] == list(Backend)
    fused = candidate(FACTS, Backend.FUSED)
    assert not fused.possible
    assert fused.token_s is None
    assert fused.reason == ("all 10240 experts take 60 GiB, and there are 3789 slots (22.2 GiB)")
    ratio = 0.1617
    assert candidate(FACTS, Backend.OFFLOAD).token_s == pytest.approx(
        offload_s(COSTS, miss_ratio=ratio), rel=0.01
    )
    assert candidate(FACTS, Backend.HYBRID).token_s == pytest.approx(
        hybrid_s(COSTS, miss_ratio=ratio), rel=0.01
    )
    assert candidate(FACTS, Backend.CPU).token_s == cpu_s(COSTS)
    assert "3789 of 10240 experts resident, estimated misses 16%" in decision.reason
    assert "fused is not possible: all 10240 experts" in decision.reason
    resident = replace(FACTS, slots_count=10_240)
    assert candidate(resident, Backend.FUSED).token_s == fused_s(COSTS)


def test_a_measured_miss_ratio_goes_before_the_estimate() -> None:
    measured = replace(FACTS, miss_ratio=0.5)
    assert candidate(measured, Backend.OFFLOAD).token_s == offload_s(COSTS, miss_ratio=0.5)
    assert "measured misses 50%" in candidate(measured, Backend.HYBRID).reason
    for no_ratio in (math.nan, -0.1, 1.5):
        assert (
            "estimated misses 16%"
            in candidate(replace(FACTS, miss_ratio=no_ratio), Backend.HYBRID).reason
        )


def test_layers_that_are_not_pinned_are_counted_and_said() -> None:
    half = replace(FACTS, fillable_layers_count=25, miss_ratio=0.2)
    offload = candidate(half, Backend.OFFLOAD)
    assert offload.token_s == offload_s(COSTS, miss_ratio=0.2, unfillable_layers_count=15)
    assert "15 of 40 layers are not pinned" in offload.reason
    assert candidate(half, Backend.HYBRID).token_s == hybrid_s(
        COSTS, miss_ratio=0.2, unfillable_layers_count=15
    )


@given(
    link=st.floats(0.1, 100),
    host=st.floats(0.1, 200),
    slots=st.integers(0, 10_240),
    pinned=st.integers(0, 40),
    cpu_kernel=st.booleans(),
    device=st.booleans(),
)
def test_auto_is_the_cheapest_that_is_possible(
    link: float, host: float, slots: int, pinned: int, cpu_kernel: bool, device: bool
) -> None:
    facts = replace(
        FACTS,
        costs=rates(link, host),
        slots_count=slots,
        fillable_layers_count=pinned,
        cpu_kernel=cpu_kernel,
        device_problem="" if device else NO_GPU,
    )
    if not cpu_kernel and (not device or slots == 0 or (pinned < 40 and slots < 10_240)):
        with pytest.raises(ConfigError, match="the CPU has no kernel for bf16"):
            decide_backend("auto", facts)
        return
    decision = decide_backend("auto", facts)
    seconds = {one.backend: one.token_s for one in decision.candidates if one.possible}
    chosen_s = seconds[decision.backend]
    assert chosen_s is not None
    for other, other_s in seconds.items():
        assert other_s is not None
        assert chosen_s <= other_s * TIE_RATIO
        # A simpler one is passed over only if it is slower by more than estimates are good for.
        if list(Backend).index(other) < list(Backend).index(decision.backend):
            assert other_s > chosen_s
    for one in decision.candidates:
        assert one.possible == (one.token_s is not None)
        assert one.reason
        if one.possible:
            assert decide_backend(one.backend, facts).backend is one.backend
        else:
            with pytest.raises(ConfigError) as caught:
                decide_backend(one.backend, facts)
            assert one.reason in caught.value.message
            assert caught.value.param == "engine.backend"


@pytest.mark.parametrize(
    ("asked", "facts", "why"),
    [
        ("fused", FACTS, "all 10240 experts take 60 GiB"),
        ("fused", replace(FACTS, device_problem=NO_GPU), NO_GPU),
        ("offload", replace(FACTS, device_problem=NO_GPU), NO_GPU),
        ("hybrid", replace(FACTS, device_problem=NO_GPU), NO_GPU),
        ("hybrid", replace(FACTS, cpu_kernel=False), "the CPU has no kernel for bf16"),
        ("cpu", replace(FACTS, cpu_kernel=False), "the CPU has no kernel for bf16"),
        ("offload", replace(FACTS, slots_count=0), "the GPU has no room for an expert"),
        ("fused", replace(FACTS, slots_count=10_240, fillable_layers_count=39), "1 layers are not"),
        (
            "offload",
            replace(FACTS, fillable_layers_count=30, cpu_kernel=False),
            "10 layers are not pinned and the CPU has no kernel for bf16",
        ),
    ],
)
def test_an_explicit_choice_is_refused_with_the_reason(
    asked: str, facts: BackendFacts, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        decide_backend(asked, facts)
    assert caught.value.message.startswith(f'engine.backend = "{asked}" is not possible: {why}')
    assert "Possible here: " in caught.value.message


def test_an_explicit_choice_is_kept_even_where_another_is_faster() -> None:
    decision = decide_backend("cpu", FACTS)
    assert decision.backend is Backend.CPU
    assert decision.reason.startswith('engine.backend = "cpu"; estimated ')


def test_unknown_backends_are_named_with_the_known() -> None:
    with pytest.raises(ConfigError, match="known are auto, fused, offload, hybrid, cpu"):
        decide_backend("turbo", FACTS)


def test_nothing_is_possible() -> None:
    with pytest.raises(ConfigError) as caught:
        decide_backend("auto", replace(FACTS, device_problem=NO_GPU, cpu_kernel=False))
    assert caught.value.message.count(NO_GPU) == 3
    assert "cpu: the CPU has no kernel for bf16" in caught.value.message
    with pytest.raises(ConfigError, match="Possible here: none"):
        decide_backend("cpu", replace(FACTS, device_problem=NO_GPU, cpu_kernel=False))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Backend.HYBRID),
        ({"slots_count": 10_240}, Backend.FUSED),
        ({"cpu_kernel": False}, Backend.OFFLOAD),
        ({"device_problem": NO_GPU}, Backend.CPU),
    ],
)
def test_without_measurements(changes: dict[str, object], expected: Backend) -> None:
    facts = replace(FACTS, costs=None, **changes)  # type: ignore[arg-type]
    decision = decide_backend("auto", facts)
    assert decision.backend is expected
    assert "no speeds were measured" in decision.reason
    assert all(one.token_s is None for one in decision.candidates)
    assert decision.notes == ()


def test_rates_that_make_no_sense_are_not_used_and_said() -> None:
    facts = replace(FACTS, costs=replace(COSTS, slot_bytes_per_s=0.0))
    decision = decide_backend("auto", facts)
    assert decision.backend is Backend.HYBRID
    (note,) = decision.notes
    assert "slot_bytes_per_s is 0.0" in note


@pytest.mark.parametrize("asked", ["offload", "hybrid", "auto"])
def test_with_nothing_to_fill_the_cpu_executes_all_layers(asked: str) -> None:
    decision = decide_backend(asked, replace(FACTS, fillable_layers_count=0, costs=None))
    assert decision.backend == (Backend.HYBRID if asked == "auto" else asked)
    assert "40 of 40 layers are not pinned, and the CPU executes them" in decision.reason


def test_a_model_without_experts_has_all_of_them() -> None:
    dense = replace(
        FACTS,
        moe_layers_count=0,
        experts_count=0,
        slots_count=0,
        fillable_layers_count=0,
        costs=None,
    )
    assert decide_backend("auto", dense).backend is Backend.FUSED


def branches(backend: Backend, **overrides: LayerBranch) -> list[LayerBranch]:
    """Three layers, the last not pinned; overrides as l0=..., l1=..."""
    choices = resolve_layers(
        backend,
        fillable=(True, True, False),
        cpu_kernel=True,
        overrides={int(name[1:]): branch for name, branch in overrides.items()},
    )
    assert all(choice.reason for choice in choices)
    return [choice.branch for choice in choices]


def test_layers() -> None:
    fill, cpu, split = LayerBranch.FILL, LayerBranch.CPU, LayerBranch.SPLIT
    assert branches(Backend.FUSED) == [LayerBranch.RESIDENT] * 3
    assert branches(Backend.CPU) == [cpu] * 3
    assert branches(Backend.OFFLOAD) == [fill, fill, cpu]
    assert branches(Backend.HYBRID) == [split, split, cpu]
    assert branches(Backend.HYBRID, l0=cpu, l1=fill) == [cpu, fill, cpu]
    assert branches(Backend.OFFLOAD, l1=cpu) == [fill, cpu, cpu]
    assert branches(Backend.CPU, l1=cpu) == [cpu] * 3
    assert branches(Backend.HYBRID, l2=cpu) == [split, split, cpu]


def test_a_layer_that_is_set_says_so() -> None:
    choices = resolve_layers(
        Backend.HYBRID, fillable=(True, True), cpu_kernel=True, overrides={1: LayerBranch.FILL}
    )
    assert [choice.reason for choice in choices] == [
        "split by the measured rates",
        "set for this layer",
    ]


@pytest.mark.parametrize(
    ("backend", "layer", "branch", "cpu_kernel", "why"),
    [
        (Backend.HYBRID, 3, LayerBranch.CPU, True, "the model has MoE layers 0 to 2"),
        (Backend.HYBRID, -1, LayerBranch.CPU, True, "the model has MoE layers 0 to 2"),
        (Backend.HYBRID, 2, LayerBranch.FILL, True, "its records are not pinned"),
        (Backend.OFFLOAD, 0, LayerBranch.CPU, False, "the CPU has no kernel"),
        (Backend.CPU, 0, LayerBranch.FILL, True, "uses no GPU"),
        (Backend.FUSED, 0, LayerBranch.CPU, True, "every expert has a slot"),
        (Backend.HYBRID, 0, LayerBranch.SPLIT, True, "can be set to fill or cpu"),
        (Backend.HYBRID, 0, LayerBranch.RESIDENT, True, "can be set to fill or cpu"),
    ],
)
def test_an_override_that_cannot_be_met(
    backend: Backend, layer: int, branch: LayerBranch, cpu_kernel: bool, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        resolve_layers(
            backend,
            fillable=(True, True, False),
            cpu_kernel=cpu_kernel,
            overrides={layer: branch},
        )
    assert f"layer {layer}" in caught.value.message


def test_layers_that_nobody_can_compute() -> None:
    for backend in (Backend.OFFLOAD, Backend.CPU):
        with pytest.raises(ConfigError, match="would be executed by the CPU, which has no kernel"):
            resolve_layers(
                backend,
                fillable=(backend is Backend.OFFLOAD, False),
                cpu_kernel=False,
                overrides={},
            )
