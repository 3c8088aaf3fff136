"""Random histories of a slot pool, for every kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from hypothesis import strategies as st

from freetokend.device.arena import Arena
from freetokend.device.copier import SlotCopier
from freetokend.experts.residency import HELD_FROM
from freetokend.experts.slot_pool import ResizeOutcome, SlotPool
from tests.experts.slot_support import NaiveCache, RandomBank, random_bank

RECORD_BYTES: Final = 768 << 10  # a granule holds neither a whole number of them nor one
EXPERTS: Final = 24
CAPACITY: Final = 14

Step = (
    tuple[Literal["demand"], list[int]]
    | tuple[Literal["hold", "free"], int]
    | tuple[Literal["resize", "resize_held"], int]
)

_experts = st.integers(0, EXPERTS - 1)
_sizes = st.integers(0, CAPACITY)
histories: Final[st.SearchStrategy[list[Step]]] = st.lists(
    st.one_of(
        st.tuples(st.just("demand"), st.lists(_experts, min_size=1, max_size=6, unique=True)),
        st.tuples(st.sampled_from(("hold", "free")), _experts),
        st.tuples(st.sampled_from(("resize", "resize", "resize_held")), _sizes),
    ),
    max_size=24,
)


def make_cache(arena: Arena, copier: SlotCopier, bank: RandomBank) -> NaiveCache:
    """An empty cache of the sizes above."""
    pool = SlotPool(
        arena,
        copier,
        record_bytes=RECORD_BYTES,
        experts_count=EXPERTS,
        slots_capacity=CAPACITY,
    )
    return NaiveCache(pool, bank, arena)


def make_bank() -> RandomBank:
    """Its experts."""
    return random_bank(layers_count=3, experts_count=EXPERTS // 3, record_bytes=RECORD_BYTES)


def check_history(cache: NaiveCache, history: list[Step]) -> None:
    """Live through it; after every step the pool is what the model says."""
    resize(cache, CAPACITY // 2, held_may_move=False)
    for step in history:
        match step:
            case ("demand", list(experts)):
                cache.demand(experts)
            case ("hold" | "free" as kind, int(expert)):
                cache.hold(expert, kind == "hold")
            case ("resize" | "resize_held" as kind, int(slots_count)):
                resize(cache, slots_count, held_may_move=kind == "resize_held")
        cache.check()


def resize(cache: NaiveCache, slots_count: int, *, held_may_move: bool) -> None:
    """Resize and compare the outcome with brute force."""
    before = [(slot.expert, slot.key) for slot in cache.slots]
    held = [index for index, slot in enumerate(cache.slots) if slot.key >= HELD_FROM]
    generation = cache.pool.generation
    deferred = slots_count < len(before) and (
        len(held) > slots_count
        or (not held_may_move and any(index >= slots_count for index in held))
    )
    expected = cache.resident() if deferred else cache.hottest(slots_count)
    staying = {expert for expert, _ in before[:slots_count] if expert in expected}
    result = cache.pool.resize(slots_count, held_may_move=held_may_move)
    cache.read_back()
    assert cache.resident() == expected
    assert result.committed_bytes == cache.pool.claimed_bytes()
    assert result.slots_count == len(cache.slots) == cache.pool.slots_count
    if deferred:
        assert result.outcome is ResizeOutcome.DEFERRED
        assert result.slots_count == len(before)
        assert str(slots_count) in result.note
    else:
        assert result.slots_count == slots_count
        assert (result.outcome is ResizeOutcome.UNCHANGED) == (slots_count == len(before))
        assert result.moved_count == len(expected) - len(staying)
        assert all(cache.slots[i].expert == e for i, (e, _) in enumerate(before) if e in staying)
    changed = result.outcome is ResizeOutcome.DONE
    assert cache.pool.generation == result.generation == generation + changed


Scenario = Callable[[NaiveCache], None]


def ten_cycles_do_not_drift(cache: NaiveCache) -> None:
    claimed = []
    for _ in range(10):
        for slots_count in (CAPACITY, 3, 9):
            resize(cache, slots_count, held_may_move=False)
            cache.demand([slots_count, slots_count + 1, 20])
            cache.check()
        claimed.append(cache.pool.claimed_bytes())
    assert len(set(claimed)) == 1


def a_grown_slot_is_usable_at_once(cache: NaiveCache) -> None:
    resize(cache, 1, held_may_move=False)
    cache.demand([4])
    resize(cache, CAPACITY, held_may_move=False)
    cache.demand(list(range(6, 6 + CAPACITY - 1)))
    assert len(cache.resident()) == CAPACITY
    cache.check()
    resize(cache, 0, held_may_move=False)
    assert cache.pool.claimed_bytes() == 0


SCENARIOS: Final[tuple[Scenario, ...]] = (ten_cycles_do_not_drift, a_grown_slot_is_usable_at_once)
