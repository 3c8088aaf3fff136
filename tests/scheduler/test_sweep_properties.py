"""Random arrivals, cancellations, faults, sweeps and page pressure: the promises hold all the same.

The bench checks every plan; see there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.link.messages import FinishReason, GenerateRequest
from tests.scheduler.paged_echo import VOCAB_SIZE, solo_tokens
from tests.scheduler.support import Bench, request
from tests.scheduler.sweep_echo import SweepEchoEngine
from tests.scheduler.sweep_support import SweepBench
from tests.scheduler.test_scheduler_properties import expect_fault, expected_tokens

POISON = 96
NAN = 95
ENDS = frozenset({13, 14, 15})


class What(enum.Enum):
    """What happens between two turns, beside arrivals."""

    CANCEL = enum.auto()
    ABANDON_SWEEP = enum.auto()
    MOVE_CROSSOVER = enum.auto()


@dataclass(frozen=True)
class Move:
    """After some turns of the loop: an arrival, or something with a number."""

    turns_before: int
    move: tuple[tuple[int, ...], int] | tuple[What, int]


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=48).map(tuple)
arrivals = st.tuples(prompts, st.integers(1, 24))
happenings = st.tuples(st.sampled_from([What.CANCEL, What.CANCEL, *What]), st.integers(0, 30))
moves = st.lists(
    st.builds(Move, turns_before=st.integers(0, 4), move=st.one_of(arrivals, arrivals, happenings)),
    max_size=30,
)


@st.composite
def benches(draw: st.DrawFn) -> SweepBench:
    page_tokens = draw(st.sampled_from([1, 4, 16]))
    max_running_count = draw(st.integers(1, 5))
    from_tokens = draw(st.integers(1, 60))
    return SweepBench(
        SweepEchoEngine(
            page_tokens,
            sweep_from_tokens=from_tokens,
            layers_count=draw(st.sampled_from([1, 2, 5, 20])),
            poison_ids=frozenset({POISON}),
            nan_ids=frozenset({NAN}),
            largest_sweep_tokens=draw(st.sampled_from([1 << 30, 20, 60])),
            failing_sweeps=draw(st.frozensets(st.integers(1, 6), max_size=3)),
        ),
        sweep_tokens=from_tokens + draw(st.integers(0, 100)),
        pages_count=draw(st.integers(-(-48 // page_tokens), 200 // page_tokens)),
        page_tokens=page_tokens,
        max_running_count=max_running_count,
        max_waiting_count=draw(st.integers(0, 30)),
        step_tokens=max_running_count + draw(st.integers(1, 40)),
        eos_token_ids=ENDS,
    )


def happen(bench: SweepBench, what: What, number: int, asked: set[str]) -> str | None:
    """The request that was cancelled, if one was."""
    match what:
        case What.CANCEL:
            name = f"r{number}"
            live = name in asked and name not in bench.ends
            bench.cancel(name)
            if name in asked:
                assert name in bench.ends, "a cancelled request is answered at once"
            return name if live else None
        case What.ABANDON_SWEEP:
            bench.abandon()
        case What.MOVE_CROSSOVER:
            bench.scheduler.set_sweep_from(2 * number)
    return None


def turns_at_most(what: list[GenerateRequest], layers_count: int) -> int:
    """What is left ends within its own work, one request after another: its steps twice, as many
    alone after faults, and for each of them the layers of a sweep. So nobody starves."""
    work = sum(2 * (len(one.prompt_token_ids) + one.max_new_tokens) + 2 for one in what)
    return (3 * work + 20) * (layers_count + 1)


@settings(max_examples=300, deadline=None)
@given(bench=benches(), script=moves)
def test_every_request_is_answered_once_with_its_own_tokens(
    bench: SweepBench, script: list[Move]
) -> None:
    asked: dict[str, GenerateRequest] = {}
    cancelled: set[str | None] = set()
    for entry in script:
        for _ in range(entry.turns_before):
            bench.step()
        first, second = entry.move
        if isinstance(first, What):
            cancelled.add(happen(bench, first, second, set(asked)))
        else:
            what = request(f"r{len(asked)}", first, second)
            asked[what.request_id] = what
            bench.submit(what)
    left = [what for name, what in asked.items() if name not in bench.ends]
    bench.run(most_steps=turns_at_most(left, bench.sweep_engine.layers_count))
    assert set(bench.ends) == set(asked)
    assert bench.allocator.used_count == 0
    assert not bench.scheduler.is_sweeping
    assert not bench.sweep_engine.sweeping
    for name, what in asked.items():
        end = bench.ends[name]
        if end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert bench.tokens[name] == expected_tokens(what, bench)
            assert not expect_fault(what, bench)
        elif end.finish_reason is FinishReason.CANCELLED:
            assert name in cancelled
            count = len(bench.tokens[name])
            assert bench.tokens[name] == solo_tokens(what.prompt_token_ids, count)
        else:
            assert end.error_reason is not None
            if end.error_reason.value == "engine_failed":
                assert expect_fault(what, bench)


@settings(max_examples=100, deadline=None)
@given(
    arriving=st.lists(st.tuples(st.integers(0, 4), arrivals), max_size=20),
    layers_count=st.integers(1, 8),
    from_tokens=st.integers(1, 60),
)
def test_the_answers_are_those_without_sweeps(
    arriving: list[tuple[int, tuple[tuple[int, ...], int]]], layers_count: int, from_tokens: int
) -> None:
    engine = SweepEchoEngine(4, sweep_from_tokens=from_tokens, layers_count=layers_count)
    sweeping = SweepBench(engine, sweep_tokens=120, pages_count=40, max_waiting_count=20)
    stepping = Bench(pages_count=40, max_waiting_count=20)
    for bench in (sweeping, stepping):
        for index, (turns_count, (prompt, count)) in enumerate(arriving):
            for _ in range(turns_count):
                bench.step()
            bench.submit(request(f"r{index}", prompt, count, ignore_eos=True))
        bench.run()
    assert sweeping.ends == stepping.ends
    assert sweeping.tokens == stepping.tokens


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(st.tuples(st.integers(0, 3), arrivals), max_size=20), layers=st.integers(1, 8)
)
def test_who_decodes_waits_for_at_most_one_layer(
    script: list[tuple[int, tuple[tuple[int, ...], int]]], layers: int
) -> None:
    """Without faults, and with pages for all, each turn of the loop gives everyone a token."""
    engine = SweepEchoEngine(4, sweep_from_tokens=20, layers_count=layers)
    bench = SweepBench(engine, sweep_tokens=64, pages_count=200, max_waiting_count=30)
    arriving = iter(enumerate(script))
    idle = False
    while not idle:
        decoding = {
            one.request_id: len(bench.tokens[one.request_id])
            for one in bench.roster.running
            if one.is_decoding
        }
        layers_before = engine.events.count("layer")
        idle = not bench.step()
        assert engine.events.count("layer") <= layers_before + 1
        for name, count in decoding.items():
            assert len(bench.tokens[name]) == count + 1
        for index, (turns_count, (prompt, count)) in arriving:
            bench.submit(request(f"r{index}", prompt, count))
            idle = False
            if turns_count > 0:
                break


@pytest.mark.parametrize("layers_count", [1, 5])
def test_a_stream_of_short_prompts_does_not_starve_a_long_one(layers_count: int) -> None:
    """Short prompts arrive in each turn, more than there are places for."""
    engine = SweepEchoEngine(4, sweep_from_tokens=20, layers_count=layers_count)
    bench = SweepBench(engine, sweep_tokens=64, pages_count=30, max_waiting_count=1000)
    for index in range(20):
        bench.submit(request(f"before{index}", [index] * 12, 8))
    bench.submit(request("long", [5] * 100, 8))
    turns_count = 0
    while "long" not in bench.ends:
        turns_count += 1
        bench.submit(request(f"r{turns_count}", [turns_count % 50] * 7, 6))
        bench.step()
        assert turns_count < 400
    assert bench.tokens["long"] == solo_tokens((5,) * 100, 8)
