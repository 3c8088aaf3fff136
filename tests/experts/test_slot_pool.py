"""The slot pool on the host device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from freetokend.core.errors import InternalError, InvalidInputError, ResourceError
from freetokend.device.arena import ArenaError
from freetokend.device.copier import CopyRange, HostCopier
from freetokend.device.host_arena import HostArena
from freetokend.experts.plan.oracle import OraclePlanner, OracleState
from freetokend.experts.residency import HELD, ResidencyState
from freetokend.experts.shrink_plan import LayerTerm, plan_shrink
from freetokend.experts.slot_pool import ResizeOutcome, SlotPool
from freetokend.policy.eviction import DecayedUse
from tests.experts.slot_pool_contract import (
    CAPACITY,
    EXPERTS,
    RECORD_BYTES,
    SCENARIOS,
    Scenario,
    Step,
    check_history,
    histories,
    make_bank,
    make_cache,
)
from tests.experts.slot_support import NaiveCache, RandomBank

Breakage = Callable[[NaiveCache], None]


@pytest.fixture(scope="module")
def bank() -> RandomBank:
    return make_bank()


@contextmanager
def new_cache(bank: RandomBank, copier: HostCopier | None = None) -> Iterator[NaiveCache]:
    arena = HostArena(CAPACITY * RECORD_BYTES)
    yield make_cache(arena, copier or HostCopier(), bank)
    arena.close()


@pytest.fixture
def cache(bank: RandomBank) -> Iterator[NaiveCache]:
    with new_cache(bank) as made:
        yield made


def full(cache: NaiveCache, slots_count: int = 8) -> NaiveCache:
    """Slots 0.. hold experts 0.., hottest last."""
    cache.pool.resize(slots_count)
    cache.read_back()
    for expert in range(slots_count):
        cache.demand([expert])
    return cache


@given(history=histories)
@settings(max_examples=60)
@example(history=[("demand", [1, 2, 3]), ("hold", 3), ("resize", 1), ("resize_held", 1)])
def test_random_histories(bank: RandomBank, history: list[Step]) -> None:
    with new_cache(bank) as cache:
        check_history(cache, history)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Scenario, cache: NaiveCache) -> None:
    scenario(cache)


def test_a_shrink_moves_the_hottest_below_the_new_end(cache: NaiveCache) -> None:
    full(cache)
    cache.demand([1])
    result = cache.pool.resize(3)
    cache.read_back()
    assert [slot.expert for slot in cache.slots] == [6, 1, 7]
    assert (result.moved_count, result.dropped_count) == (2, 5)
    cache.check()


@pytest.mark.parametrize("slots_count", [-1, CAPACITY + 1])
def test_a_bad_size_names_the_field_and_the_range(cache: NaiveCache, slots_count: int) -> None:
    full(cache)
    with pytest.raises(InvalidInputError, match=f"0 to {CAPACITY}") as refused:
        cache.pool.resize(slots_count)
    assert refused.value.param == "slots"
    cache.check()


def test_held_slots_defer_a_shrink_and_say_which(cache: NaiveCache) -> None:
    full(cache)
    for expert in (2, 3, 4, 5, 6, 7):
        cache.hold(expert, True)
    result = cache.pool.resize(2)
    assert result.outcome is ResizeOutcome.DEFERRED
    assert "slot 2 with expert 2, slot 3 with expert 3, slot 4 with expert 4 and 3 more" in (
        result.note
    )
    assert (result.slots_count, cache.pool.slots_count) == (8, 8)
    assert cache.pool.resize(5, held_may_move=True).outcome is ResizeOutcome.DEFERRED
    cache.check()
    for expert in (2, 3):
        cache.hold(expert, False)
    assert cache.pool.resize(4, held_may_move=True).outcome is ResizeOutcome.DONE
    cache.read_back()
    assert cache.resident() == dict.fromkeys((4, 5, 6, 7), HELD)
    cache.check()


def test_growth_without_memory_changes_nothing(bank: RandomBank) -> None:
    arena = HostArena(CAPACITY * RECORD_BYTES, limit_bytes=6 << 20)
    cache = full(make_cache(arena, HostCopier(), bank), 6)
    before = cache.pool.generation
    with pytest.raises(ArenaError):
        cache.pool.resize(CAPACITY)
    assert (cache.pool.slots_count, cache.pool.generation) == (6, before)
    cache.check()
    arena.close()


def test_growth_can_be_prepared_beside_steps(cache: NaiveCache) -> None:
    full(cache, 4)
    before = cache.pool.committed_bytes
    cache.pool.prepare_growth(12)
    assert cache.pool.claimed_bytes() > before
    assert (cache.pool.slots_count, int(cache.pool.state.slots_count)) == (4, 4)
    cache.demand([7, 8])
    cache.check()
    with pytest.raises(InvalidInputError):
        cache.pool.prepare_growth(CAPACITY + 1)
    prepared_bytes = cache.pool.committed_bytes
    assert cache.pool.resize(12).committed_bytes == prepared_bytes
    cache.read_back()
    cache.check()
    for unused, slots_count in ((13, 12), (14, 3)):
        cache.pool.prepare_growth(unused)
        cache.pool.resize(slots_count)
        cache.read_back()
        cache.check()


class BrokenCopier(HostCopier):
    """A device whose copies fail."""

    def copy(self, ranges: object) -> None:
        raise ResourceError("the device does not copy")


def test_a_failed_copy_leaves_a_sound_cache(cache: NaiveCache) -> None:
    full(cache)
    pool = cache.pool
    working, pool._copier = pool._copier, BrokenCopier()
    with pytest.raises(ResourceError, match="does not copy"):
        pool.resize(3)
    assert pool.slots_count == 8
    cache.read_back()
    cache.check()
    pool._copier = working
    assert pool.resize(3).outcome is ResizeOutcome.DONE
    cache.read_back()
    assert set(cache.resident()) == {5, 6, 7}
    cache.check()


class StickyArena(HostArena):
    """A driver that takes memory back only at the second try."""

    refused = False

    def shrink_to(self, length_bytes: int) -> None:
        if not self.refused and length_bytes < self.committed_bytes:
            self.refused = True
            raise ResourceError("the driver keeps it")
        super().shrink_to(length_bytes)


def test_memory_that_was_not_taken_back_is_given_at_the_next_resize(bank: RandomBank) -> None:
    arena = StickyArena(CAPACITY * RECORD_BYTES)
    cache = full(make_cache(arena, HostCopier(), bank))
    with pytest.raises(ResourceError, match="keeps it"):
        cache.pool.resize(2)
    assert cache.pool.slots_count == 2
    with pytest.raises(InternalError, match="committed"):
        cache.pool.check_integrity()
    assert cache.pool.resize(2).outcome is ResizeOutcome.UNCHANGED
    cache.read_back()
    cache.check()
    arena.close()


def set_state(name: str, index: int, value: int) -> Breakage:
    """Write one wrong number into the state."""

    def breakage(cache: NaiveCache) -> None:
        getattr(cache.pool.state, name)[index] = value

    return breakage


def close_arena(cache: NaiveCache) -> None:
    cache.arena.close()


def release_memory(cache: NaiveCache) -> None:
    cache.arena.shrink_to(0)


@pytest.mark.parametrize(
    ("breakage", "named"),
    [
        (set_state("expert_of_slot", 3, 2), "slot 3 holds expert 2, which is said to be in slot 2"),
        (set_state("expert_of_slot", 3, EXPERTS), f"slot 3 holds expert {EXPERTS} of {EXPERTS}"),
        (set_state("expert_of_slot", 9, 15), "slot 9 holds expert 15 although"),
        (set_state("expert_of_slot", 3, -1), "expert 3 is said to be in slot 3, which holds"),
        (set_state("slot_of_expert", 15, 8), "expert 15 is said to be in slot 8 of 8"),
        (set_state("slot_of_expert", 15, 3), "expert 15 is said to be in slot 3, which holds"),
        (set_state("slot_of_expert", 3, -1), "slot 3 holds expert 3, which is said to be in"),
        (set_state("slot_key", 7, HELD), "slot 7 is held although it is empty"),
        (set_state("demanded_at", 3, 99), "expert 3 was last demanded at 99 and the clock"),
        (set_state("slots_count", 0, 7), "the device has 7 slots and the slot pool 8"),
        (close_arena, "address"),
        (release_memory, "the arena has committed 0"),
    ],
)
def test_integrity_names_what_is_broken(cache: NaiveCache, breakage: Breakage, named: str) -> None:
    full(cache)
    if "held although" in named:
        set_state("expert_of_slot", 7, -1)(cache)
        set_state("slot_of_expert", 7, -1)(cache)
    cache.pool.check_integrity()
    breakage(cache)
    with pytest.raises(InternalError, match=named):
        cache.pool.check_integrity()


def test_verify_names_slot_expert_and_byte(cache: NaiveCache, bank: RandomBank) -> None:
    full(cache)
    address = cache.pool.slot_address(5) + 70_001
    wrong = np.array([bank.bytes[5 * RECORD_BYTES + 70_001] ^ 1], dtype=np.uint8)
    HostCopier().copy(
        [CopyRange(from_address=wrong.ctypes.data, to_address=address, length_bytes=1)]
    )
    report = cache.pool.verify(bank.mapped)
    assert report.compared_count == 8
    assert report.compared_bytes == 8 * RECORD_BYTES
    (difference,) = report.differences
    assert (difference.slot, difference.expert_id, difference.offset_bytes) == (5, 5, 70_001)


def test_addresses_and_sizes_are_checked(cache: NaiveCache) -> None:
    full(cache)
    assert cache.pool.slot_address(7) == cache.base_address + 7 * RECORD_BYTES
    for slot in (-1, 8):
        with pytest.raises(InternalError, match="outside the 8"):
            cache.pool.slot_address(slot)
    for record_bytes in (100, 16 << 20):
        with pytest.raises(InternalError):
            SlotPool(
                cache.arena,
                HostCopier(),
                record_bytes=record_bytes,
                experts_count=4,
                slots_capacity=2,
            )


def test_state_arrays_keep_their_addresses(cache: NaiveCache) -> None:
    state = cache.pool.state
    arrays = (state.slot_of_expert, state.expert_of_slot, state.slot_key, state.slots_count)
    before = [array.data_ptr() for array in arrays]
    full(cache)
    cache.pool.resize(2)
    cache.pool.resize(CAPACITY)
    assert [array.data_ptr() for array in arrays] == before


def test_arrays_that_do_not_fit_are_refused() -> None:
    empty = ResidencyState.empty(experts_count=3, slots_capacity=2)
    assert (empty.experts_count, empty.slots_capacity) == (3, 2)
    with pytest.raises(InternalError, match="slot_key"):
        ResidencyState(
            slot_of_expert=empty.slot_of_expert,
            expert_of_slot=empty.expert_of_slot,
            slot_key=empty.slot_key.to(torch.int32),
            demanded_at=empty.demanded_at,
            score=empty.score,
            clock=empty.clock,
            slots_count=empty.slots_count,
        )
    with pytest.raises(InternalError, match="int32"):
        ResidencyState.empty(experts_count=1 << 31, slots_capacity=2)


def test_a_closed_pool_refuses_instead_of_using_memory_that_is_gone() -> None:
    pool = SlotPool(
        HostArena(64 * 4096), HostCopier(), record_bytes=4096, experts_count=64, slots_capacity=64
    )
    pool.resize(8)
    pool.close()
    for use in (pool.resize, pool.prepare_growth, pool.slot_address):
        with pytest.raises(InternalError):
            use(4)


@pytest.mark.parametrize("ticks_per_layer", [0, 3, 700])
def test_a_shrink_drops_what_the_plan_would_evict(ticks_per_layer: int) -> None:
    """Between two steps, as the oracle chooses victims with its last layer just gone by."""
    random = np.random.default_rng(ticks_per_layer)
    layers_count, per_layer, slots_count, missed_count = 5, 16, 60, 13
    experts_count = layers_count * per_layer
    # The last layer's wanted ones are all missing, so that every slot may be a victim.
    residents = random.permutation(experts_count - missed_count)[:slots_count]
    state = OracleState.empty(experts_count=experts_count, slots_capacity=slots_count)
    state.slots_count, state.clock = slots_count, 5000
    for slot, expert in enumerate(residents.tolist()):
        state.expert_of_slot[slot], state.slot_of_expert[expert] = expert, slot
        state.slot_key[slot] = int(random.integers(0, 2000))
    keys = np.array(state.slot_key)
    oracle = OraclePlanner(
        layers_count=layers_count,
        experts_per_layer_count=per_layer,
        cpu_kernel=True,
        order=DecayedUse(half_life_ticks=30, ticks_per_layer=ticks_per_layer),
        state=state,
    )
    wanted = range(per_layer - missed_count, per_layer)
    result = oracle.plan(
        layers_count - 1,
        [list(wanted)],
        valid_tokens=1,
        fillable=True,
        fill_count=[list(range(per_layer + 1))],
    )
    term = LayerTerm(experts_per_layer_count=per_layer, ticks_per_layer=ticks_per_layer)
    plan = plan_shrink(residents, keys, slots_count - missed_count, term)
    assert plan.dropped_slots == tuple(slot for _, slot in result.fills)
    assert len(plan.dropped_slots) == missed_count


def test_a_plan_of_many_slots_is_right_and_least() -> None:
    random = np.random.default_rng(3)
    count, wanted = 16_384, 5_000
    experts = random.permutation(count).astype(np.int32)
    experts[random.random(count) < 0.1] = -1
    keys = random.integers(0, 4_000, count)
    plan = plan_shrink(experts, keys, wanted)
    order = sorted(np.flatnonzero(experts != -1), key=lambda slot: (keys[slot], slot))
    kept = set(map(int, order[-wanted:]))
    assert set(plan.dropped_slots) == set(map(int, order)) - kept
    assert {move.from_slot for move in plan.moves} == {slot for slot in kept if slot >= wanted}
    targets = [move.to_slot for move in plan.moves]
    assert len(set(targets)) == len(targets)
    assert all(target < wanted and target not in kept for target in targets)
