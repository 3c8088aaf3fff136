"""Replays against what they must equal: naive caches, exhaustive search, hand-made traces."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.policy.eviction import COLDEST, NEVER, DecayedUse, EvictionOrder, Lru, default_order
from freetokend.traces.replay import (
    CacheReplay,
    LayerCall,
    Misses,
    layer_calls,
    replay_cache,
    replay_optimum,
    replay_placement,
    replay_static,
)
from freetokend.traces.trace import SKIPPED, Phase, RoutingTrace, TraceShape, TraceStep

SHAPES = st.builds(
    lambda layers, experts, k: TraceShape(
        layers_count=layers, experts_per_layer=experts, experts_per_token=min(k, experts)
    ),
    st.integers(1, 3),
    st.integers(2, 5),
    st.integers(1, 2),
)
ORDERS = st.sampled_from((Lru(), DecayedUse(4, 1), DecayedUse(7, 2), default_order(3)))


@st.composite
def traces(draw: st.DrawFn, max_steps: int = 12) -> RoutingTrace:
    shape = draw(SHAPES)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    steps = [
        TraceStep(
            phase=draw(st.sampled_from((Phase.DECODE, Phase.DECODE, Phase.PREFILL))),
            ids=random.integers(
                0,
                shape.experts_per_layer,
                (shape.layers_count, draw(st.integers(1, 3)), shape.experts_per_token),
                dtype=np.uint16,
            ),
        )
        for _ in range(draw(st.integers(1, max_steps)))
    ]
    return RoutingTrace(shape=shape, steps=tuple(steps))


def decode(rows: list[list[int]], experts: int = 8) -> RoutingTrace:
    """One layer, one token per step."""
    ids = [np.array(row, dtype=np.uint16)[None, None, :] for row in rows]
    shape = TraceShape(layers_count=1, experts_per_layer=experts, experts_per_token=len(rows[0]))
    steps = tuple(TraceStep(phase=Phase.DECODE, ids=one) for one in ids)
    return RoutingTrace(shape=shape, steps=steps)


def test_what_a_layer_skipped_is_no_call_and_no_use() -> None:
    shape = TraceShape(layers_count=2, experts_per_layer=8, experts_per_token=2)
    skipped = [SKIPPED, SKIPPED]
    read = np.array([[[1, 2], [1, 3]], [skipped, [4, 5]]], dtype=np.uint16)
    part = np.array([[[1, 2]], [skipped]], dtype=np.uint16)
    steps = tuple(TraceStep(phase=Phase.PREFILL, ids=ids) for ids in (read, part))
    calls = layer_calls(RoutingTrace(shape=shape, steps=steps))
    assert [(one.layer, one.needed, one.uses, one.tokens_count) for one in calls] == [
        (0, (1, 2, 3), (2, 1, 1), 2),
        (1, (4, 5), (1, 1), 1),
        (0, (1, 2), (1, 1), 1),
    ]


class NaiveCache:
    """The same rules with a list of dictionaries and a full sort for every victim."""

    def __init__(
        self, shape: TraceShape, order: EvictionOrder, slots: int, kept: int, fill_ratio: float
    ) -> None:
        self.shape, self.order, self.kept, self.fill_ratio = shape, order, kept, fill_ratio
        self.slots: list[tuple[int, int] | None] = [None] * slots  # (expert_id, key)
        self.score: dict[int, int] = {}
        self.demanded: dict[int, int] = {}
        self.clock = 0

    def where(self) -> dict[int, int]:
        return {one[0]: index for index, one in enumerate(self.slots) if one is not None}

    def victims(self, layer: int, held: set[int]) -> list[int]:
        def rank(slot: int) -> tuple[int, int]:
            one = self.slots[slot]
            if one is None:
                return (-(1 << 60), slot)
            ahead = (one[0] // self.shape.experts_per_layer - layer) % self.shape.layers_count
            cost = self.order.ticks_per_layer * (ahead or self.shape.layers_count)
            return (one[1] - cost, slot)

        free = [
            slot
            for slot, one in enumerate(self.slots)
            if one is None or one[0] not in held
        ]  # fmt: skip
        return sorted(free, key=rank)

    def step(self, call: LayerCall) -> int:
        self.clock += 1
        base = call.layer * self.shape.experts_per_layer
        return self.prefill(call, base) if call.phase is Phase.PREFILL else self.use(call, base)

    def use(self, call: LayerCall, base: int) -> int:
        ids = [base + expert for expert in call.needed]
        for one in ids:
            self.score[one] = self.order.score_on_use(self.score.get(one, NEVER), self.clock)
        where = self.where()
        for one in ids:
            if one in where:
                self.slots[where[one]] = (one, self.order.key(self.score[one], self.clock))
        missing = [one for one in ids if one not in where]
        missing.sort(key=lambda one: (-self.demanded.get(one, -1), one))
        count = max(1, round(self.fill_ratio * len(missing)))
        places = self.victims(call.layer, set(ids))
        for one, slot in list(zip(missing, places, strict=False))[:count]:
            self.slots[slot] = (one, self.order.key(self.score[one], self.clock))
        for one in ids:
            self.demanded[one] = self.clock
        return len(missing)

    def prefill(self, call: LayerCall, base: int) -> int:
        uses = {base + expert: count for expert, count in zip(call.needed, call.uses, strict=True)}
        for one, count in uses.items():
            self.score[one] = self.order.score_on_prompt(
                self.score.get(one, NEVER), self.clock, count, call.tokens_count
            )
        kept = sorted(uses, key=lambda one: (-uses[one], one))[: self.kept]
        where = self.where()
        for one in kept:
            if one in where:
                self.slots[where[one]] = (one, self.order.key(self.score[one], self.clock))
        layer = range(base, base + self.shape.experts_per_layer)
        stream = [one for one in kept if one not in where]
        stream += [one for one in layer if one not in where and one not in kept]
        held = set(layer)
        if len(self.slots) > 2 * self.shape.experts_per_layer:
            held |= {one - self.shape.experts_per_layer for one in layer}
        for one, slot in zip(stream, self.victims(call.layer, held), strict=False):
            hot = self.order.key(self.score[one], self.clock) if one in kept else COLDEST
            self.slots[slot] = (one, hot)
        return 0


@settings(max_examples=150)
@given(traces(), ORDERS, st.integers(1, 12), st.integers(0, 3), st.sampled_from((0.25, 0.5, 1.0)))
def test_the_cache_equals_a_naive_one(
    trace: RoutingTrace, order: EvictionOrder, slots: int, kept: int, fill_ratio: float
) -> None:
    cached = CacheReplay(trace.shape, order, slots, kept_per_layer=kept, fill_ratio=fill_ratio)
    naive = NaiveCache(trace.shape, order, slots, kept, fill_ratio)
    for call in layer_calls(trace):
        found = cached.run((call,))
        assert found.missed_count == naive.step(call)
        assert cached.resident == frozenset(naive.where())


def list_lru(rows: list[list[int]], slots: int) -> int:
    """The textbook: a list, most recently used last."""
    recent: list[int] = []
    misses = 0
    for row in rows:
        (expert,) = row
        if expert in recent:
            recent.remove(expert)
        else:
            misses += 1
            recent = recent[-(slots - 1) :] if slots > 1 else []
        recent.append(expert)
    return misses


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=1), min_size=1), st.integers(1, 9))
def test_lru_equals_a_list(rows: list[list[int]], slots: int) -> None:
    trace = decode(rows)
    found = replay_cache(trace.shape, layer_calls(trace), Lru(), slots, keep_prompts=False)
    assert found.missed_count == list_lru(rows, slots)
    assert found.needed_count == len(rows)


def fewest_misses(shape: TraceShape, calls: tuple[LayerCall, ...], slots: int) -> int:
    """Every cache content after every call is tried."""

    @cache
    def least(index: int, content: frozenset[int]) -> int:
        if index == len(calls):
            return 0
        call = calls[index]
        base = call.layer * shape.experts_per_layer
        needed = {base + expert for expert in call.needed}
        missed = len(needed - content) if call.phase is Phase.DECODE else 0
        if call.phase is Phase.PREFILL:
            needed = set(range(base, base + shape.experts_per_layer))
        known = sorted(content | needed)
        return missed + min(
            least(index + 1, frozenset(kept))
            for kept in combinations(known, min(slots, len(known)))
        )

    return least(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(traces(max_steps=5), st.integers(1, 4))
def test_the_optimum_is_that_of_exhaustive_search(trace: RoutingTrace, slots: int) -> None:
    calls = layer_calls(trace)
    found = replay_optimum(trace.shape, calls, slots)
    assert found.missed_count == fewest_misses(trace.shape, calls, slots)


@settings(max_examples=100)
@given(traces(), ORDERS, st.integers(1, 12), st.booleans(), st.sampled_from((0.25, 1.0)))
def test_nothing_beats_the_optimum(
    trace: RoutingTrace, order: EvictionOrder, slots: int, keep: bool, fill_ratio: float
) -> None:
    shape, calls = trace.shape, layer_calls(trace)
    best = replay_optimum(shape, calls, slots)
    for other in (
        replay_cache(shape, calls, order, slots, keep_prompts=keep, fill_ratio=fill_ratio),
        replay_static(shape, calls, slots),
        replay_placement(shape, calls, slots),
    ):
        assert other.needed_count == best.needed_count
        # a placement holds its experts from the start, a cache has to fetch each of them once
        free = 0 if other.fills_count else slots
        assert other.missed_count + free >= best.missed_count


def test_a_cache_as_large_as_the_model_misses_each_expert_once() -> None:
    trace = decode([[0, 1], [2, 3], [0, 3], [1, 2]])
    found = replay_cache(trace.shape, layer_calls(trace), default_order(1), 8)
    assert found == Misses(needed_count=8, missed_count=4, fills_count=4)


def test_tokens_of_a_step_that_share_an_expert_miss_once() -> None:
    shape = TraceShape(layers_count=1, experts_per_layer=4, experts_per_token=1)
    ids = np.array([[[2], [2], [3]]], dtype=np.uint16)
    trace = RoutingTrace(shape=shape, steps=(TraceStep(phase=Phase.DECODE, ids=ids),))
    found = replay_cache(shape, layer_calls(trace), Lru(), 4)
    assert (found.needed_count, found.missed_count) == (2, 2)


def test_a_loop_that_does_not_fit_gives_lru_nothing_and_the_default_some() -> None:
    """Four layers that need the same two experts each, six slots for these eight."""
    shape = TraceShape(layers_count=4, experts_per_layer=4, experts_per_token=2)
    ids = np.tile(np.array([0, 1], dtype=np.uint16), (4, 1, 1))
    steps = tuple(TraceStep(phase=Phase.DECODE, ids=ids) for _ in range(100))
    calls = layer_calls(RoutingTrace(shape=shape, steps=steps))
    assert replay_cache(shape, calls, Lru(), 6).ratio == 1.0
    assert replay_cache(shape, calls, default_order(4), 6).ratio < 0.6


def test_placements_hold_even_shares() -> None:
    trace = decode([[0], [1], [2], [3]], experts=4)
    assert replay_static(trace.shape, layer_calls(trace), 3).missed_count == 1


def test_a_prompt_moves_the_placement() -> None:
    shape = TraceShape(layers_count=1, experts_per_layer=4, experts_per_token=1)
    prompt = np.array([[[3], [3], [2]]], dtype=np.uint16)
    steps = (
        TraceStep(phase=Phase.PREFILL, ids=prompt),
        TraceStep(phase=Phase.DECODE, ids=prompt),
    )
    calls = layer_calls(RoutingTrace(shape=shape, steps=steps))
    assert replay_placement(shape, calls, 1) == Misses(needed_count=2, missed_count=1)
    assert replay_placement(shape, calls, 2).missed_count == 0
    assert replay_placement(shape, calls, 4).missed_count == 0
    assert replay_static(shape, calls, 2).missed_count == 2


@pytest.mark.parametrize("slots", [0, (1 << 20) + 1])
def test_sizes_that_no_pool_has(slots: int) -> None:
    trace = decode([[0]])
    with pytest.raises(ValueError, match="slots"):
        CacheReplay(trace.shape, Lru(), slots)


def test_a_trace_without_decode_steps_misses_nothing() -> None:
    assert Misses(needed_count=0, missed_count=0).ratio == 0.0
