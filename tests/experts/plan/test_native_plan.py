"""The plan call in C++ against the oracle, and the oracle against the contract."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError
from freetokend.experts.plan.contract import (
    CPU,
    DEFERRED,
    KernelOrder,
    PlanInputs,
    PlanOutputs,
    PlanShape,
    Stat,
)
from freetokend.experts.plan.native import NativePlanner
from freetokend.experts.plan.oracle import OracleResult
from freetokend.experts.residency import HELD_FROM, ResidencyState
from freetokend.policy.eviction import COLDEST, DecayedUse, Lru
from tests.experts.plan.traces import live, random_order, random_plan
from tests.experts.plan.twins import Plan, Release, Reserve, Resize, Twins


def make_twins(
    *,
    layers: int = 1,
    experts: int = 8,
    slots: int = 4,
    tokens: int = 1,
    top_k: int = 4,
    cpu_kernel: bool = True,
    order: KernelOrder | None = None,
    fill_count: list[list[int]] | None = None,
) -> Twins:
    shape = PlanShape(
        moe_layers_count=layers,
        experts_per_layer_count=experts,
        top_k=top_k,
        tokens_capacity=tokens,
        cpu_kernel=cpu_kernel,
    )
    return Twins(
        NativePlanner,
        shape,
        order or Lru(),
        slots_capacity=slots,
        fill_count=fill_count or [[0, *[experts] * experts]],
    )


def plan(twins: Twins, layer: int, *rows: list[int], fillable: bool = True) -> OracleResult:
    """Rows as given; filled up with none, and with rows of padding."""
    shape = twins.shape
    routed = [row + [-1] * (shape.top_k - len(row)) for row in rows]
    routed += [[0] * shape.top_k] * (shape.tokens_capacity - len(rows))
    result = twins.run(Plan(layer=layer, routed=routed, valid_tokens=len(rows), fillable=fillable))
    assert result is not None
    return result


@given(seed=st.integers(0, (1 << 32) - 1))
@settings(max_examples=250, deadline=None)
def test_random_lives_are_the_oracles(seed: int) -> None:
    live(NativePlanner, seed, 40)


@given(seed=st.integers(0, (1 << 32) - 1))
@settings(max_examples=25, deadline=None)
def test_random_lives_of_a_larger_cache(seed: int) -> None:
    draw = random.Random(seed)
    twins = make_twins(
        layers=5,
        experts=64,
        slots=draw.randint(60, 320),
        tokens=16,
        top_k=6,
        cpu_kernel=draw.random() < 0.5,
        order=random_order(draw),
        fill_count=[[draw.randint(0, 80) for _ in range(65)] for _ in range(3)],
    )
    for _ in range(25):
        twins.run(random_plan(twins, draw))


@pytest.mark.parametrize("cpu_kernel", [True, False])
def test_lru_by_a_naive_cache(cpu_kernel: bool) -> None:
    # One expert a call: the cache of the textbook.
    twins = make_twins(layers=3, experts=6, slots=7, top_k=1, cpu_kernel=cpu_kernel)
    recent: deque[tuple[int, int]] = deque(maxlen=7)
    draw = random.Random(5)
    for _ in range(400):
        key = draw.randrange(3), draw.randrange(6)
        result = plan(twins, key[0], [key[1]])
        assert result.stats[Stat.HITS] == (key in recent)
        if key in recent:
            recent.remove(key)
        recent.append(key)


def test_the_misses_demanded_last_are_filled() -> None:
    twins = make_twins(slots=3, fill_count=[[0, 1, 2, 2, 2]])
    for expert in (6, 2, 4):
        plan(twins, 0, [expert], fillable=False)
    result = plan(twins, 0, [6, 2, 4, 1])
    assert [expert for expert, _ in result.fills] == [2, 4]
    assert result.cpu == [1, 6]
    result = plan(twins, 0, [7, 5, 0])  # equal: never demanded
    assert [expert for expert, _ in result.fills] == [0, 5]


@pytest.mark.parametrize(
    ("asked", "filled"), [(-(1 << 31), 1), (0, 1), (1, 1), (3, 3), (4, 4), ((1 << 31) - 1, 4)]
)
def test_the_table_asks_for_one_at_least_and_no_more_than_there_are(
    asked: int, filled: int
) -> None:
    twins = make_twins(slots=6, fill_count=[[9, asked]])  # last column: one miss and more
    assert plan(twins, 0, [0, 1, 2, 3]).stats[Stat.FILLS] == filled


def test_the_row_of_the_table_goes_by_tokens_per_expert() -> None:
    twins = make_twins(slots=8, tokens=9, fill_count=[[0, *[row] * 8] for row in (1, 2, 3, 4)])
    assert len(plan(twins, 0, [0, 1, 2, 3]).fills) == 1  # one token each
    rows = [[4, 5, 6, 7]] * 2
    assert len(plan(twins, 0, *rows).fills) == 2  # two
    twins.run(Resize(slots_count=0))
    twins.run(Resize(slots_count=8))
    assert len(plan(twins, 0, *[[4, 5, 6, 7]] * 2, [4]).fills) == 3  # 9 / 4: three at most
    twins.run(Resize(slots_count=0))
    twins.run(Resize(slots_count=8))
    assert len(plan(twins, 0, *[[4, 5, 6, 7]] * 9).fills) == 4  # nine: behind the last row


def test_a_layer_that_cannot_be_filled_goes_to_the_cpu() -> None:
    twins = make_twins()
    plan(twins, 0, [3])
    result = plan(twins, 0, [3, 1, 5], fillable=False)
    assert result.physical == [[0, CPU, CPU, -2]]
    assert result.cpu == [1, 5]
    assert result.fills == []


def test_rounds_without_a_cpu_kernel_serve_everybody() -> None:
    twins = make_twins(slots=3, tokens=2, cpu_kernel=False)
    plan(twins, 0, [7])
    rows = [[7, 1, 2, 3], [4, 5, 6, 7]]
    served: set[int] = set()
    for _ in range(3):
        result = plan(twins, 0, *rows)
        for row, places in zip(rows, result.physical, strict=True):
            served |= {e for e, place in zip(row, places, strict=True) if place >= 0}
        rows = [
            [e if place == DEFERRED else -1 for e, place in zip(row, places, strict=True)]
            for row, places in zip(rows, result.physical, strict=True)
        ]
    assert served == {1, 2, 3, 4, 5, 6, 7}
    assert result.stats[Stat.DEFERRED] == 0
    # Each was used once, however many rounds it took: nobody has more than the others.
    assert len({twins.state.demanded_at[e] for e in served}) == 3


def test_without_slots_or_with_held_ones_nothing_is_filled() -> None:
    twins = make_twins(layers=2, slots=0)
    assert plan(twins, 0, [1]).physical[0][0] == CPU
    twins = make_twins(layers=2, slots=8)
    twins.run(Reserve(layer=1))
    assert plan(twins, 0, [1]).physical[0][0] == CPU
    rounds = make_twins(layers=2, slots=8, cpu_kernel=False)
    rounds.run(Reserve(layer=1))
    result = plan(rounds, 0, [1])
    assert result.physical[0][0] == DEFERRED
    assert result.stats[Stat.FILLS] == 0
    assert rounds.state.demanded_at[1] == -1


def test_a_step_beside_a_prefill_uses_its_slots_and_keeps_them_held() -> None:
    twins = make_twins(layers=2, slots=12)
    plan(twins, 0, [2, 3])
    keys = {expert: twins.state.slot_key[twins.state.slot_of_expert[expert]] for expert in (2, 3)}
    twins.run(Reserve(layer=0))
    plan(twins, 0, [5, 3])
    assert all(twins.state.slot_key[twins.state.slot_of_expert[e]] >= HELD_FROM for e in range(8))
    twins.run(Release(layer=0, uses=[9, 0, 1, 0, 0, 0, 9, 4], tokens_count=9, kept_count=2))
    now = twins.state.clock
    assert [twins.state.slot_key[twins.state.slot_of_expert[e]] for e in range(8)] == [
        now,
        COLDEST,
        keys[2],  # as hot as it was before the prefill
        now - 1,  # a hit during the prefill
        COLDEST,
        now - 1,
        now,
        COLDEST,
    ]


def test_two_layers_are_held_and_a_third_waits() -> None:
    twins = make_twins(layers=3, slots=16)
    assert twins.run(Reserve(layer=0)).stats[Stat.FILLS] == 8
    assert twins.run(Reserve(layer=1)).stats[Stat.FILLS] == 8
    result = twins.run(Reserve(layer=2))
    assert (result.stats[Stat.FILLS], result.stats[Stat.DEFERRED]) == (0, 8)
    twins.run(Release(layer=0, uses=[1] * 8, tokens_count=1, kept_count=3))
    result = twins.run(Reserve(layer=2, wanted=[0, 1, 0, 0, 0, 0, 0, 1]))
    assert (result.stats[Stat.FILLS], result.stats[Stat.EVICTIONS]) == (2, 2)
    assert all(slot >= 3 for _, slot in result.fills)  # not those that were kept


def test_the_layer_that_has_just_gone_by_is_evicted_first() -> None:
    order = DecayedUse(half_life_ticks=24, ticks_per_layer=6)
    twins = make_twins(layers=4, slots=4, top_k=1, order=order)
    for layer in range(4):
        plan(twins, layer, [0])
    # Its own layer is the farthest; by recency it would be slot 0.
    assert plan(twins, 2, [1]).fills == [(17, 2)]


def refused(match: str, shape: PlanShape, **changed: torch.Tensor) -> None:
    state = ResidencyState.empty(experts_count=8, slots_capacity=2)
    state.slots_count.fill_(2)
    planner = NativePlanner(state, shape, Lru())
    tensors = {
        "routed": torch.zeros(2, 2, dtype=torch.int32),
        "valid_tokens": torch.ones(1, dtype=torch.int32),
        "fillable": torch.ones(2, dtype=torch.int32),
        "fill_count": torch.ones(1, 2, dtype=torch.int32),
    }
    outputs = PlanOutputs.empty(shape)
    with pytest.raises(InternalError, match=match):
        planner.plan(0, PlanInputs(**tensors | changed), outputs)
    assert int(state.clock) == 0
    planner.plan(0, PlanInputs(**tensors), outputs)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    shape = PlanShape(
        moe_layers_count=2, experts_per_layer_count=4, top_k=2, tokens_capacity=2, cpu_kernel=True
    )
    refused("expert 4 of 4", shape, routed=torch.full((2, 2), 4, dtype=torch.int32))
    refused("valid tokens", shape, valid_tokens=torch.full((1,), 3, dtype=torch.int32))
    refused("valid tokens", shape, valid_tokens=torch.full((1,), -1, dtype=torch.int32))
    refused("routed", shape, routed=torch.zeros(3, 2, dtype=torch.int32))
    refused("routed", shape, routed=torch.zeros(2, 2, dtype=torch.int64))
    refused("fillable", shape, fillable=torch.zeros(3, dtype=torch.int32))
    refused("fill_count", shape, fill_count=torch.zeros(0, 2, dtype=torch.int32))
    state = ResidencyState.empty(experts_count=8, slots_capacity=2)
    planner = NativePlanner(state, shape, Lru())
    with pytest.raises(InternalError, match="MoE layer"):
        planner.release(2, torch.zeros(4, dtype=torch.int32), tokens_count=1, kept_count=1)
    with pytest.raises(InternalError, match="more uses than tokens"):
        planner.release(0, torch.full((4,), 2, dtype=torch.int32), tokens_count=1, kept_count=1)
    with pytest.raises(InternalError, match="8 experts"):
        NativePlanner(
            state,
            PlanShape(
                moe_layers_count=3,
                experts_per_layer_count=4,
                top_k=2,
                tokens_capacity=2,
                cpu_kernel=True,
            ),
            Lru(),
        )
    with pytest.raises(InternalError, match="half_life_ticks"):
        NativePlanner(state, shape, DecayedUse(half_life_ticks=1 << 24, ticks_per_layer=0))
    with pytest.raises(InternalError, match="at least 1"):
        PlanShape(
            moe_layers_count=2,
            experts_per_layer_count=4,
            top_k=0,
            tokens_capacity=2,
            cpu_kernel=True,
        )
    assert int(state.clock) == 0


def test_a_cache_that_contradicts_itself_is_refused() -> None:
    twins = make_twins(slots=2)
    plan(twins, 0, [1, 2])
    twins.tensors.slot_of_expert[3] = 2
    with pytest.raises(InternalError, match="expert 3 is in slot 2"):
        plan(twins, 0, [3])
    twins.tensors.slot_of_expert[3] = -1
    twins.tensors.expert_of_slot[1] = 8
    with pytest.raises(InternalError, match="slot 1 holds expert 8"):
        plan(twins, 0, [3])
