"""What holds for any snapshot and any history of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.units import GIB
from freetokend.policy.controller import (
    Answer,
    EngineFacts,
    Floor,
    Hold,
    HostFacts,
    Outcome,
    Phase,
    ProcessRule,
    Resize,
    SessionNeeds,
    Sleep,
    Snapshot,
    Spec,
    State,
    Wake,
    Window,
    tick,
)
from freetokend.policy.controller.division import (
    bytes_of_pages,
    bytes_of_slots,
    filled,
    floor_sizes,
    sizes_of,
)
from freetokend.policy.readings import GpuProcess, GpuReading, HostReading, PressureReading
from freetokend.policy.vram_budget import Preset, VramWishes
from tests.policy.controller.world import SHAPE, as_it_is, engine, with_sizes

sizes = st.one_of(st.none(), st.sampled_from([-1, 0, (1 << 64) - 1]), st.integers(0, 24 * GIB))
times = st.floats(0, 2000) | st.sampled_from([0.0, float("nan"), float("inf"), -1.0])
counts = st.integers(0, 300)

gpus = st.builds(
    GpuReading,
    uuid=st.just("G"),
    name=st.just("g"),
    taken_s=times,
    total_bytes=sizes,
    free_bytes=sizes,
    is_lost=st.booleans(),
    processes=st.none()
    | st.tuples(
        st.builds(
            GpuProcess, pid=st.integers(0, 3), name=st.sampled_from([None, "x"]), used_bytes=sizes
        )
    ),
)
hosts = st.builds(
    HostReading,
    taken_s=times,
    mem_total_bytes=sizes,
    mem_available_bytes=sizes,
    cgroup_limit_bytes=sizes,
    cgroup_used_bytes=sizes,
    memory_pressure=st.none() | st.builds(PressureReading, some_avg10=st.floats(0, 100)),
)
specs = st.builds(
    Spec,
    revision=st.integers(0, 3),
    wishes=st.builds(
        VramWishes,
        preset=st.sampled_from(Preset),
        slots_count=st.none() | st.integers(-5, 400),
        kv_bytes=st.none() | st.integers(-5, 10 * GIB),
        max_context_tokens=st.none() | st.integers(-1, 50_000),
    ),
    vram_limit_bytes=st.none() | st.integers(0, 20 * GIB),
    floor=st.sampled_from(Floor),
    holds=st.just(()) | st.just((Hold(hold_id="h", size_bytes=GIB, reason="r"),)),
    rules=st.just(()) | st.just((ProcessRule(name="X", keep_free_bytes=3 * GIB),)),
    windows=st.just(())
    | st.just((Window(name="w", start_minute=5, end_minute=3, keep_free_bytes=GIB),)),
    sleep_ticket=st.integers(0, 2),
    wake_ticket=st.integers(0, 2),
    sleep_idle_s=st.none() | st.just(5.0),
    sleep_over_budget=st.booleans(),
)


@st.composite
def engines(draw: st.DrawFn) -> EngineFacts:
    shape = replace(SHAPE, experts_count=draw(st.sampled_from([0, 1, 16, 160])))
    facts = engine(
        shape=shape,
        slots_capacity_count=shape.experts_count,
        boot_count=draw(st.integers(1, 2)),
        phase=draw(st.sampled_from(Phase)),
        fixed_held_bytes=draw(st.integers(0, 4 * GIB)),
        newest_generation=draw(st.integers(0, 9)),
        answer=draw(
            st.none()
            | st.builds(Answer, generation=st.integers(0, 9), outcome=st.sampled_from(Outcome))
        ),
        running_count=draw(st.integers(0, 2)),
        waiting_count=draw(st.integers(0, 2)),
        idle_s=draw(st.floats(0, 100)),
        needs=draw(
            st.builds(
                SessionNeeds,
                longest_context_tokens=st.integers(0, 60_000),
                waiting_prompt_tokens=st.integers(0, 60_000),
            )
        ),
    )
    pages = draw(st.integers(0, 256))
    facts = replace(facts, kv_pages_used_count=draw(st.integers(0, pages)))
    return with_sizes(facts, draw(st.integers(0, shape.experts_count)), pages)


snapshots = st.builds(
    Snapshot,
    now_s=st.floats(0, 2000),
    spec=specs,
    engine=st.none() | engines(),
    gpu=st.none() | gpus,
    host=st.none() | hosts,
    host_facts=st.builds(
        HostFacts, spill_bytes=st.sampled_from([0, GIB]), model_loaded=st.booleans()
    ),
    local_minute=st.none() | st.integers(0, 1439),
    local_weekday=st.none() | st.integers(0, 6),
)
# Snapshots as they come: a quarter of a second apart, read when they are made.
steps = st.lists(st.tuples(engines(), sizes, specs, st.booleans()), min_size=1, max_size=30)


def _size_bytes(command: Resize | Wake) -> int:
    return sizes_of(SHAPE, command.slots_count, command.kv_pages_count).size_bytes


@given(st.lists(snapshots, max_size=8))
def test_any_snapshots_have_an_answer_and_the_same_one_again(history: list[Snapshot]) -> None:
    state = State()
    for snapshot in history:
        after = tick(state, snapshot)
        assert tick(state, snapshot) == after
        state, commands = after
        assert all(command.reason.text for command in commands)
        assert sum(isinstance(command, Resize | Sleep | Wake) for command in commands) <= 1


@given(st.lists(snapshots, max_size=6), snapshots)
def test_a_second_look_at_the_same_commands_nothing_more(
    history: list[Snapshot], snapshot: Snapshot
) -> None:
    """Unless the engine answered what was only just sent, which a snapshot can say by chance."""
    state = State()
    for earlier in history:
        state, _ = tick(state, earlier)
    if snapshot.engine is not None:
        snapshot = replace(snapshot, engine=replace(snapshot.engine, answer=None))
    state, first = tick(state, snapshot)
    if any(isinstance(command, Resize | Sleep | Wake) for command in first):
        _, second = tick(state, snapshot)
        assert not [c for c in second if isinstance(c, Resize | Sleep | Wake)]


@given(steps)
@settings(max_examples=200)
def test_no_step_breaks_the_rules(
    history: list[tuple[EngineFacts, int | None, Spec, bool]],
) -> None:
    state, now_s, newest, resizes_s = State(), 100.0, 0, list[float]()
    boot_count = 0
    for facts, free_bytes, spec, quick in history:
        now_s += 0.25 if quick else 7.0
        gpu = GpuReading(uuid="G", name="g", taken_s=now_s, free_bytes=free_bytes, processes=())
        if facts.boot_count != boot_count:
            boot_count, resizes_s = facts.boot_count, []
        before = state
        state, commands = tick(state, Snapshot(now_s=now_s, spec=spec, engine=facts, gpu=gpu))
        for command in commands:
            assert isinstance(command, Resize | Sleep | Wake) or facts.phase is Phase.ASLEEP
            if not isinstance(command, Resize | Sleep | Wake):
                continue
            if command.generation <= newest:
                # sent again: the very same
                assert before.in_flight is not None
                assert before.in_flight.command == command
                continue
            newest = command.generation
            assert newest > facts.newest_generation
            if isinstance(command, Sleep):
                assert not facts.running_count
                assert not facts.waiting_count
                continue
            _check_sizes(command, facts, free_bytes, spec)
            if isinstance(command, Resize):
                resizes_s = [at_s for at_s in resizes_s if now_s - at_s < 60] + [now_s]
                assert len(resizes_s) <= 6


def _check_sizes(
    command: Resize | Wake, facts: EngineFacts, free_bytes: int | None, spec: Spec
) -> None:
    floor = floor_sizes(facts, spec.floor)
    assert command.slots_count >= min(floor.slots_count, facts.slots_count)
    assert command.slots_count <= facts.slots_capacity_count
    assert command.kv_pages_count >= min(floor.kv_pages_count, facts.kv_pages_count)
    assert command.kv_pages_count <= facts.kv_pages_capacity_count
    # nothing is decided of a card that is not known
    assert free_bytes is not None
    assert 0 <= free_bytes <= 24 * GIB
    grown_bytes = _size_bytes(command) - facts.elastic_bytes
    if grown_bytes > 0:
        # and never more than is free beside the cushion
        assert grown_bytes <= free_bytes - spec.limits.cushion_bytes


@given(st.integers(0, 400), st.integers(0, 12 * GIB), st.integers(0, 12 * GIB))
def test_others_taking_more_never_leaves_us_more(
    slots: int, first_bytes: int, second_bytes: int
) -> None:
    facts = with_sizes(engine(), min(slots, 160), 64)

    def after(free_bytes: int) -> int:
        gpu = GpuReading(uuid="G", name="g", taken_s=1.0, free_bytes=free_bytes, processes=())
        spec = Spec(wishes=as_it_is(160))
        snapshot = Snapshot(now_s=1.0, spec=spec, engine=facts, gpu=gpu)
        _, commands = tick(State(), snapshot)
        resizes = [c for c in commands if isinstance(c, Resize)]
        return _size_bytes(resizes[0]) if resizes else facts.elastic_bytes

    less, more = sorted((first_bytes, second_bytes))
    assert after(less) <= after(more) + bytes_of_pages(SHAPE, 1)


@given(
    granule=st.sampled_from([1 << 12, 1 << 16, 1 << 21]),
    kv_granule=st.none() | st.sampled_from([1 << 12, 3 << 19, 1 << 21, 1 << 24]),
    slots=st.integers(0, 30),
    pages=st.integers(0, 300),
    room_bytes=st.integers(0, 3 * GIB),
)
def test_filling_wastes_less_than_a_page_and_a_granule_of_its_own(
    granule: int, kv_granule: int | None, slots: int, pages: int, room_bytes: int
) -> None:
    shape = replace(SHAPE, granularity_bytes=granule, kv_granularity_bytes=kv_granule)
    start = sizes_of(shape, slots, pages)
    most_slots, most_pages = slots + 200, pages + 2000
    full = filled(shape, start, most_slots=most_slots, most_pages=most_pages, room_bytes=room_bytes)
    assert full.size_bytes == bytes_of_slots(shape, full.slots_count) + bytes_of_pages(
        shape, full.kv_pages_count
    )
    assert bytes_of_pages(shape, full.kv_pages_count) % (kv_granule or granule) == 0
    assert full.slots_count >= slots
    assert full.kv_pages_count >= pages
    if start.size_bytes > room_bytes:
        return
    assert full.size_bytes <= room_bytes
    more_pages = sizes_of(shape, full.slots_count, full.kv_pages_count + 1)
    assert full.kv_pages_count == most_pages or more_pages.size_bytes > room_bytes
