"""The expert cache of the host device: the executor's bits whatever is resident, and the truth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from freetokend.core.errors import InternalError, InvalidInputError
from freetokend.experts.cache import BUCKETS_COUNT
from freetokend.experts.slot_pool import ResizeOutcome
from freetokend.native.executor import Executor
from freetokend.policy.backend_choice import LayerBranch
from tests.experts.cache_rig import HIDDEN, RecordBank, Rig, record_bank, routed

LAYERS, EXPERTS = 3, 6
ALL = LAYERS * EXPERTS
SLOW_LINK_BYTES_PER_S = 20e6  # 1.2 ms for a record here


@pytest.fixture(scope="module")
def bank() -> RecordBank:
    return record_bank(layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:2]) as executor:
        yield executor


NewRig = Callable[..., Rig]


@pytest.fixture
def new_rig(bank: RecordBank, executor: Executor) -> Iterator[NewRig]:
    made: list[Rig] = []

    def new(slots_count: int, *, fill_misses: bool = False, rate: float | None = None) -> Rig:
        rig = Rig(
            bank, executor, slots_count=slots_count, fill_misses=fill_misses, rate_bytes_per_s=rate
        )
        made.append(rig)
        return rig

    yield new
    for rig in made:
        rig.cache.close()


@pytest.mark.parametrize("rate", [None, SLOW_LINK_BYTES_PER_S], ids=["memory", "slow-link"])
@pytest.mark.parametrize("fill_misses", [False, True], ids=["split", "fill"])
@pytest.mark.parametrize("slots_count", [0, 1, 2, 5, 12, ALL])
def test_every_cache_gives_the_executors_bits(
    new_rig: NewRig, slots_count: int, fill_misses: bool, rate: float | None
) -> None:
    rig = new_rig(slots_count, fill_misses=fill_misses, rate=rate)
    seed = 0
    for tokens, top_k in ((1, 2), (1, 6), (5, 3), (33, 2)):
        for layer in range(LAYERS):
            seed += 1
            rig.decode(layer, routed(tokens, top_k, seed, among=rig.experts, absent_percent=10))
        for layer in range(LAYERS):
            seed += 1
            rig.sweep(layer, routed(tokens, top_k, seed, among=rig.experts, absent_percent=10))
            # a decode step beside the sweep, with the next layer on its way
            rig.decode((layer + 1) % LAYERS, routed(2, 2, seed, among=rig.experts))
        rig.check()


def test_hits_misses_and_fills_are_counted(new_rig: NewRig) -> None:
    rig = new_rig(4)
    rig.cache.set_fill_counts([[0, 1, 1, 2, 2, 2, 2]])
    rig.decode(0, routed(1, 3, 1, among=(0, 1, 2)))  # 3 misses: 2 filled
    first = rig.counters().layers[0]
    assert (first.hits_count, first.misses_count, first.fills_count, first.cpu_count) == (
        *(0, 3),
        *(2, 1),
    )
    rig.decode(0, routed(1, 3, 2, among=(0, 1, 2)))  # 2 hits, 1 miss: filled
    second = rig.counters().layers[0]
    assert (second.hits_count, second.misses_count, second.fills_count, second.cpu_count) == (
        *(2, 4),
        *(3, 1),
    )
    counters = rig.counters()
    assert counters.resident_count == counters.fills_count == 3
    assert counters.layers[1].misses_count == 0
    rig.decode(1, routed(1, 3, 3, among=(3, 4, 5)))  # one empty slot, so one expert goes
    assert rig.counters().layers[1].evictions_count == 1
    assert rig.cache.executions_count == 9
    rig.check()


def test_more_misses_than_slots_take_rounds_or_the_cpu(new_rig: NewRig) -> None:
    step = routed(4, 6, 5, among=range(EXPERTS))
    filling = new_rig(2, fill_misses=True)
    filling.decode(0, step)
    layer = filling.counters().layers[0]
    assert (layer.misses_count, layer.fills_count, layer.cpu_count) == (6, 6, 0)
    splitting = new_rig(2)
    splitting.decode(0, step)
    layer = splitting.counters().layers[0]
    assert (layer.misses_count, layer.fills_count, layer.cpu_count) == (6, 2, 4)
    for rig in (filling, splitting):
        rig.check()
        rig.cache.resize(0)
        rig.decode(0, step)  # nothing can be filled: the CPU has it all
        assert rig.counters().layers[0].cpu_count == layer.cpu_count * (rig is splitting) + 6


@pytest.mark.parametrize("fill_misses", [False, True], ids=["split", "fill"])
def test_the_branch_of_a_layer_says_who_takes_its_misses(
    new_rig: NewRig, fill_misses: bool
) -> None:
    rig = new_rig(ALL, fill_misses=fill_misses)
    rig.cache.set_fill_counts([[0] + [1] * EXPERTS])
    rig.cache.set_branches([LayerBranch.CPU, LayerBranch.FILL, LayerBranch.SPLIT])
    for layer in range(LAYERS):
        rig.decode(layer, routed(1, 4, layer, among=rig.experts))
    cpu, fill, split = rig.counters().layers
    assert (cpu.fills_count, cpu.cpu_count) == (0, 4)
    assert (fill.fills_count, fill.cpu_count) == (4, 0)
    assert (split.fills_count, split.cpu_count) == ((4, 0) if fill_misses else (1, 3))
    rig.cache.prefetch(0)  # nothing of it can be filled
    assert rig.counters().streamed_count == 0
    rig.check()


def test_the_split_goes_by_the_bucket_of_tokens_per_expert(new_rig: NewRig) -> None:
    rig = new_rig(ALL)
    rig.cache.set_fill_counts([[0, 1, 1, 1, 1, 1, 1], [0, 1, 2, 2, 2, 2, 2], [0, 1, 2, 3, 4, 4, 4]])
    for tokens, fills_count in ((1, 1), (2, 2), (4, 4), (16, 4)):
        rig.decode(0, routed(tokens, 6, tokens, among=rig.experts))
        assert rig.counters().layers[0].fills_count == fills_count
        rig.cache.resize(0)
        rig = new_rig(ALL)
        rig.cache.set_fill_counts(
            [[0, 1, 1, 1, 1, 1, 1], [0, 1, 2, 2, 2, 2, 2], [0, 1, 2, 3, 4, 4, 4]]
        )


def test_a_sweep_streams_a_layer_ahead_and_leaves_the_most_used(new_rig: NewRig) -> None:
    rig = new_rig(2 * EXPERTS)
    assert rig.cache.can_sweep
    rig.cache.prefetch(0)
    for layer in range(LAYERS):
        rig.sweep(layer, routed(40, 2, layer, among=rig.experts))
    counters = rig.counters()
    assert counters.streamed_count == counters.fills_count == ALL
    assert all(layer.misses_count == layer.fills_count == 0 for layer in counters.layers)
    rig.check()
    rig.cache.resize(2 * EXPERTS - 1)
    assert not rig.cache.can_sweep


def test_experts_known_ahead_are_all_that_is_streamed(new_rig: NewRig) -> None:
    rig = new_rig(ALL)
    wanted = torch.zeros(EXPERTS, dtype=torch.int32)
    wanted[[1, 4]] = 1
    rig.cache.prefetch(2, wanted=wanted)
    assert rig.counters().streamed_count == 2
    rig.sweep(2, routed(9, 2, 3, among=(1, 4)))
    assert rig.counters().streamed_count == 2
    rig.cache.prefetch(1, wanted=wanted)
    rig.sweep(1, routed(9, 3, 3, among=rig.experts))  # more than was known: from the pool
    rig.check()


def test_preload_fills_what_there_is_room_for(new_rig: NewRig) -> None:
    for slots_count in (0, 4, EXPERTS, 8, ALL):
        rig = new_rig(slots_count)
        rig.cache.preload()
        assert rig.counters().resident_count == slots_count
        rig.check()
    for layer in range(LAYERS):
        rig.decode(layer, routed(3, 6, layer, among=rig.experts))
    assert sum(layer.misses_count for layer in rig.counters().layers) == 0


def test_resizes_keep_the_hottest_and_take_memory_and_give_it_back(new_rig: NewRig) -> None:
    rig = new_rig(6)
    for experts in ((0, 1), (2, 3), (4, 5), (2, 3)):
        rig.decode(0, routed(1, 2, 1, among=experts))
    result = rig.cache.resize(2)
    assert (result.outcome, result.slots_count) == (ResizeOutcome.DONE, 2)
    before = rig.counters().layers[0]
    rig.decode(0, routed(1, 2, 2, among=(2, 3)))
    assert rig.counters().layers[0].hits_count == before.hits_count + 2
    rig.check()
    rig.cache.prepare_growth(ALL)
    rig.check()
    assert rig.cache.resize(ALL).slots_count == ALL
    rig.check()
    assert rig.cache.claimed_bytes() == rig.counters().committed_bytes
    for cycle in range(10):
        rig.cache.resize(1)
        rig.cache.resize(ALL - cycle)
        rig.check()
    assert rig.cache.resize(ALL - 9).outcome is ResizeOutcome.UNCHANGED
    generation = rig.counters().generation
    for wrong in (-1, ALL + 1):
        with pytest.raises(InvalidInputError, match=f"0 to {ALL}"):
            rig.cache.resize(wrong)
    assert rig.counters().generation == generation


def test_a_resize_between_two_layers_of_a_sweep(new_rig: NewRig) -> None:
    rig = new_rig(ALL, rate=SLOW_LINK_BYTES_PER_S)
    for slots_count in (ALL, 3, 0, 2 * EXPERTS, 1, ALL):
        rig.cache.prefetch(0)
        rig.sweep(0, routed(7, 2, 1, among=rig.experts))
        assert rig.cache.resize(slots_count).slots_count == slots_count
        rig.check()
        rig.sweep(1, routed(7, 2, 2, among=rig.experts))
        rig.cache.let_go()
        rig.sweep(2, routed(7, 2, 3, among=rig.experts))
        rig.check()


def test_what_is_still_on_its_way_is_executed_in_the_pool(new_rig: NewRig) -> None:
    rig = new_rig(ALL, rate=1e5)  # a quarter of a second for a record
    started_s = time.monotonic()
    rig.cache.prefetch(1)
    rig.decode(1, routed(3, 4, 1, among=rig.experts))
    assert time.monotonic() - started_s < 0.2
    assert rig.counters().layers[1].hits_count >= 4
    assert rig.counters().fills_count == 0


def test_tables_branches_and_lists_of_other_shapes_are_refused(new_rig: NewRig) -> None:
    rig = new_rig(6)
    before = rig.counters().fill_counts
    row = [0] * (EXPERTS + 1)
    for table in ([], [row[:-1]], [[*row, 0]], [row, row[:-1]], [row] * (BUCKETS_COUNT + 1)):
        with pytest.raises(InternalError, match=f"{BUCKETS_COUNT} buckets of {EXPERTS + 1}"):
            rig.cache.set_fill_counts(table)
    assert rig.counters().fill_counts == before
    for count in (0, LAYERS - 1, LAYERS + 1):
        with pytest.raises(InternalError, match=f"{count} layers for {LAYERS}"):
            rig.cache.set_branches([LayerBranch.CPU] * count)
    for layer in (-1, LAYERS):
        with pytest.raises(InternalError):
            rig.cache.prefetch(layer)
    with pytest.raises(InternalError, match="wanted experts"):
        rig.cache.prefetch(0, wanted=torch.ones(EXPERTS + 1, dtype=torch.int32))
    with pytest.raises(InternalError):
        rig.cache.prefetch(0, wanted=torch.ones(EXPERTS, dtype=torch.int64))
    assert rig.counters().streamed_count == 0
    rig.decode(0, routed(2, 3, 4, among=rig.experts))
    rig.check()


def test_a_step_with_wrong_experts_leaves_a_cache_that_serves(new_rig: NewRig) -> None:
    rig = new_rig(2 * EXPERTS)
    x, ids, weights = routed(3, 2, 1, among=rig.experts)
    beyond = torch.full_like(ids, EXPERTS)
    before = rig.counters().layers
    with pytest.raises(InternalError, match=f"expert {EXPERTS} of {EXPERTS}"):
        rig.decoder.run(0, (x, beyond, weights))
    assert rig.counters().layers == before
    rig.decode(0, (x, ids, weights))
    # In the middle of a sweep: two layers are held by then.
    rig.cache.prefetch(0)
    with pytest.raises(InternalError):
        rig.sweeper.run(0, (x, beyond, weights))
    rig.decode(1, (x, ids, weights))
    rig.cache.let_go()
    rig.check()
    for layer in range(LAYERS):
        rig.sweep(layer, (x, ids, weights))
        rig.decode(layer, (x, ids, weights))
    rig.check()
    for runner in (rig.decoder, rig.sweeper):
        with pytest.raises(InternalError, match="no such MoE layer"):
            runner.run(LAYERS, (x, ids, weights))


def test_fills_of_a_step_that_failed_are_awaited(new_rig: NewRig) -> None:
    """A step that ends between its fills and their arrival must not leave slots that are said to
    hold experts which are still on the way."""
    rig = new_rig(ALL, fill_misses=True, rate=1e6)  # 25 ms for a record
    step = routed(1, 4, 1, among=rig.experts)
    x, ids, weights = (part.repeat(1, 2) for part in step)
    with pytest.raises(InternalError, match="top_k is larger"):  # which the executor finds
        rig.decoder.run(0, (x[:, :HIDDEN].contiguous(), ids, weights))
    assert rig.counters().fills_count == 4
    rig.decode(0, step)
    rig.check()


def test_closing_ends_fills_and_can_be_repeated(bank: RecordBank, executor: Executor) -> None:
    rig = Rig(bank, executor, slots_count=ALL, rate_bytes_per_s=1000.0)
    rig.cache.prefetch(0)
    started_s = time.monotonic()
    rig.cache.close()
    rig.cache.close()
    assert time.monotonic() - started_s < 5
    counters = rig.cache.counters()
    assert (counters.slots_count, counters.committed_bytes) == (0, 0)
