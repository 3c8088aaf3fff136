"""Random caches and random steps."""

from __future__ import annotations

import random

from freetokend.experts.plan.contract import KernelOrder, PlanShape
from freetokend.policy.eviction import DecayedUse, Lru
from tests.experts.plan.twins import MakePlanner, Plan, Release, Reserve, Resize, Step, Twins


def random_twins(make_planner: MakePlanner, draw: random.Random) -> Twins:
    """A small cache: often too small for a call, sometimes without any slot."""
    layers_count = draw.randint(1, 4)
    experts_count = draw.randint(1, 12)
    shape = PlanShape(
        moe_layers_count=layers_count,
        experts_per_layer_count=experts_count,
        top_k=draw.randint(1, 4),
        tokens_capacity=draw.randint(1, 5),
        cpu_kernel=draw.random() < 0.7,
    )
    columns_count = draw.choice((1, 2, 3, experts_count + 1))
    extremes = (-(1 << 31), -1, 0, 1, 2, 3, 5, (1 << 31) - 1)
    return Twins(
        make_planner,
        shape,
        random_order(draw),
        slots_capacity=draw.randint(0, layers_count * experts_count + 2),
        fill_count=[
            [draw.choice(extremes) for _ in range(columns_count)] for _ in range(draw.randint(1, 4))
        ],
    )


def random_order(draw: random.Random) -> KernelOrder:
    """LRU, or decayed use with and without the layers' term."""
    if draw.random() < 0.4:
        return Lru()
    return DecayedUse(
        half_life_ticks=draw.choice((1, 2, 7, 240, 5000)), ticks_per_layer=draw.choice((0, 1, 6))
    )


def random_step(twins: Twins, draw: random.Random) -> Step:
    """Mostly plan calls."""
    shape = twins.shape
    layer = draw.randrange(shape.moe_layers_count)
    experts_count = shape.experts_per_layer_count
    kind = draw.random()
    if kind < 0.68:
        return random_plan(twins, draw)
    if kind < 0.8:
        wanted = [] if draw.random() < 0.6 else draw.choices((0, 0, 1, 7), k=experts_count)
        return Reserve(layer=layer, wanted=wanted, fillable=draw.random() < 0.9)
    if kind < 0.93:
        tokens_count = draw.choice((1, 2, 31, 4096, (1 << 24) - 1))
        few = draw.choices((0, 0, 1, min(3, tokens_count), tokens_count), k=experts_count)
        return Release(
            layer=layer,
            uses=[draw.randint(0, tokens_count) if draw.random() < 0.3 else one for one in few],
            tokens_count=tokens_count,
            kept_count=draw.choice((0, 1, 2, experts_count, experts_count + 5)),
        )
    return Resize(slots_count=draw.randint(0, twins.tensors.slots_capacity))


def random_plan(twins: Twins, draw: random.Random) -> Plan:
    """Duplicates, holes and padding included; a layer at times prefers few experts."""
    shape = twins.shape
    highest = draw.choice((shape.experts_per_layer_count, 2, 4)) - 1
    highest = min(highest, shape.experts_per_layer_count - 1)
    lowest = draw.choice((0, 0, -1, -3))
    valid_tokens = draw.randint(0, shape.tokens_capacity)
    routed = [
        [draw.randint(lowest, highest) for _ in range(shape.top_k)]
        for _ in range(shape.tokens_capacity)
    ]
    for row in routed[valid_tokens:]:
        row[0] = draw.choice((row[0], 1 << 20, -7))  # padding is never looked at
    return Plan(
        layer=draw.randrange(shape.moe_layers_count),
        routed=routed,
        valid_tokens=valid_tokens,
        fillable=draw.random() < 0.9,
    )


def live(make_planner: MakePlanner, seed: int, steps_count: int) -> Twins:
    """A random life; AssertionError in the step that differs."""
    draw = random.Random(seed)
    twins = random_twins(make_planner, draw)
    for _ in range(steps_count):
        twins.run(random_step(twins, draw))
    return twins
