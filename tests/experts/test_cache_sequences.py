"""Any sequence of what can be done to an expert cache between steps leaves it whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.native.executor import Executor
from freetokend.policy.backend_choice import LayerBranch
from tests.experts.cache_rig import RecordBank, Rig, record_bank, routed

LAYERS, EXPERTS = 3, 5
ALL = LAYERS * EXPERTS
EXAMPLES_COUNT = 60

Action = Callable[[Rig], None]

layers = st.integers(0, LAYERS - 1)
seeds = st.integers(0, 1 << 20)
slots = st.integers(0, ALL)
tokens_and_top_k = st.tuples(st.integers(1, 6), st.integers(1, EXPERTS))


def decode(layer: int, size: tuple[int, int], seed: int) -> Action:
    step = routed(*size, seed, among=range(EXPERTS), absent_percent=15)
    return lambda rig: rig.decode(layer, step)


def sweep(layer: int, size: tuple[int, int], seed: int) -> Action:
    step = routed(*size, seed, among=range(EXPERTS), absent_percent=15)
    return lambda rig: rig.sweep(layer, step)


def prefetch(layer: int, wanted: list[bool] | None) -> Action:
    ints = None if wanted is None else torch.tensor(wanted, dtype=torch.int32)
    return lambda rig: rig.cache.prefetch(layer, wanted=ints)


def resize(slots_count: int) -> Action:
    def act(rig: Rig) -> None:
        assert rig.cache.resize(slots_count).slots_count == slots_count

    return act


def verify(rig: Rig) -> None:
    assert rig.cache.verify().differences == ()


actions = st.one_of(
    st.builds(decode, layers, tokens_and_top_k, seeds),
    st.builds(decode, layers, tokens_and_top_k, seeds),
    st.builds(sweep, layers, tokens_and_top_k, seeds),
    st.builds(prefetch, layers, st.none() | st.lists(st.booleans(), min_size=5, max_size=5)),
    st.just(lambda rig: rig.cache.let_go()),
    st.builds(resize, slots),
    st.builds(lambda count: lambda rig: rig.cache.prepare_growth(count), slots),
    st.builds(
        lambda branches: lambda rig: rig.cache.set_branches(branches),
        st.lists(st.sampled_from(LayerBranch), min_size=LAYERS, max_size=LAYERS),
    ),
    st.builds(
        lambda table: lambda rig: rig.cache.set_fill_counts(table),
        st.lists(
            st.lists(st.integers(0, EXPERTS), min_size=EXPERTS + 1, max_size=EXPERTS + 1),
            min_size=1,
            max_size=5,
        ),
    ),
    st.just(verify),
    st.just(lambda rig: rig.cache.preload()),
)


@pytest.fixture(scope="module")
def bank() -> RecordBank:
    return record_bank(layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:1]) as executor:
        yield executor


@settings(max_examples=EXAMPLES_COUNT)
@given(
    first=slots,
    fill_misses=st.booleans(),
    slow=st.booleans(),
    sequence=st.lists(actions, min_size=1, max_size=14),
)
def test_any_sequence_leaves_a_whole_cache(
    bank: RecordBank,
    executor: Executor,
    first: int,
    fill_misses: bool,
    slow: bool,
    sequence: list[Action],
) -> None:
    rate = 100e6 if slow else None
    rig = Rig(bank, executor, slots_count=first, fill_misses=fill_misses, rate_bytes_per_s=rate)
    try:
        before = rig.counters()
        for act in sequence:
            act(rig)
            now = rig.counters()
            for old, new in zip(before.layers, now.layers, strict=True):
                assert new.hits_count >= old.hits_count
                assert new.misses_count >= old.misses_count
            assert now.generation >= before.generation
            before = now
        rig.check()
        # and it still serves
        rig.cache.let_go()
        for layer in range(LAYERS):
            rig.decode(layer, routed(2, 2, layer, among=range(EXPERTS)))
        rig.check()
    finally:
        rig.cache.close()


@settings(max_examples=EXAMPLES_COUNT)
@given(first=slots, sequence=st.lists(actions, min_size=1, max_size=8))
def test_the_invariants_hold_after_every_action(
    bank: RecordBank, executor: Executor, first: int, sequence: list[Action]
) -> None:
    rig = Rig(bank, executor, slots_count=first)
    try:
        for act in sequence:
            act(rig)
            rig.check()
    finally:
        rig.cache.close()
