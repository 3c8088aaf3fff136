"""The scheduler's rules for sweeps, one test each, on the echo engine."""

from __future__ import annotations

import pytest

from freetokend.core.errors import InternalError, Reason
from freetokend.link.messages import FinishReason
from freetokend.scheduler.limits import StepFault
from tests.scheduler.paged_echo import solo_tokens
from tests.scheduler.support import request
from tests.scheduler.sweep_echo import SweepEchoEngine
from tests.scheduler.sweep_support import SweepBench


def bench(
    *,
    layers_count: int = 3,
    sweep_from_tokens: int = 20,
    sweep_tokens: int = 100,
    pages_count: int = 64,
    max_running_count: int = 4,
    step_tokens: int = 16,
    poison_ids: frozenset[int] = frozenset(),
    largest_sweep_tokens: int = 1 << 30,
    failing_sweeps: frozenset[int] = frozenset(),
) -> SweepBench:
    engine = SweepEchoEngine(
        4,
        sweep_from_tokens=sweep_from_tokens,
        layers_count=layers_count,
        poison_ids=poison_ids,
        largest_sweep_tokens=largest_sweep_tokens,
        failing_sweeps=failing_sweeps,
    )
    return SweepBench(
        engine,
        sweep_tokens=sweep_tokens,
        pages_count=pages_count,
        max_running_count=max_running_count,
        step_tokens=step_tokens,
    )


def swept(made: SweepBench) -> list[list[int]]:
    """Tokens per sequence of each sweep."""
    return [[len(one.token_ids) for one in work.sequences] for work in made.sweep_engine.sweeps]


def test_waiting_prompts_share_a_sweep_and_get_their_solo_tokens() -> None:
    made = bench()
    for index in range(3):
        made.submit(request(f"r{index}", [index] * 10, 5))
    made.run()
    assert swept(made) == [[10, 10, 10]]
    assert all(made.tokens[f"r{index}"] == solo_tokens((index,) * 10, 5) for index in range(3))
    counts = made.scheduler.counts()
    assert (counts.sweeps_count, counts.steps_count) == (1, 4)
    assert (counts.prefill_tokens_count, counts.decode_tokens_count) == (30, 15)


def test_below_the_crossover_prompts_are_read_in_steps() -> None:
    made = bench()
    made.submit(request("a", [1] * 10, 2))
    made.submit(request("b", [2] * 9, 2))
    made.run()
    assert swept(made) == []


@pytest.mark.parametrize(("from_tokens", "most"), [(0, 100), (20, 0), (20, 19)])
def test_an_engine_that_cannot_sweep_never_does(from_tokens: int, most: int) -> None:
    made = bench(sweep_from_tokens=from_tokens, sweep_tokens=most)
    made.submit(request("a", [1] * 50, 2))
    made.run()
    assert swept(made) == []
    assert made.tokens["a"] == solo_tokens((1,) * 50, 2)


def test_a_prompt_longer_than_a_sweep_takes_several_and_its_rest_takes_steps() -> None:
    made = bench(sweep_tokens=30)
    made.submit(request("long", range(70), 3))
    made.submit(request("next", [3] * 25, 3))
    made.run()
    assert swept(made) == [[30], [30], [10, 20]]
    assert made.tokens["long"] == solo_tokens(tuple(range(70)), 3)
    assert made.tokens["next"] == solo_tokens((3,) * 25, 3)


def test_a_prompt_that_does_not_fit_beside_the_others_waits_for_a_later_sweep() -> None:
    made = bench(pages_count=12)
    made.submit(request("first", [1] * 30, 2))
    made.submit(request("second", [2] * 30, 2))
    made.run()
    assert swept(made) == [[30], [30]]
    assert made.scheduler.counts().preemptions_count == 0


def test_a_new_prompt_leaves_pages_for_those_that_decode() -> None:
    made = bench(pages_count=12)
    made.submit(request("talker", [1], 6))
    made.step()
    made.submit(request("reader", [2] * 38, 2))  # 10 pages, of 11 that are free
    made.step()
    assert made.scheduler.counts().running_count == 1
    made.run()
    assert list(made.ends) == ["talker", "reader"]
    assert swept(made) == [[38]]


def test_a_sweep_is_filled_by_age_whoever_started_first() -> None:
    made = bench(layers_count=2, sweep_tokens=30, step_tokens=5)
    made.submit(request("first", [1] * 25, 1))
    made.step()
    made.submit(request("long", [2] * 28, 2))
    made.submit(request("short", [3] * 18, 2))
    made.run()
    assert swept(made) == [[25], [28, 2]]
    for name, prompt in (("long", (2,) * 28), ("short", (3,) * 18)):
        assert made.tokens[name] == solo_tokens(prompt, 2)


def test_who_decodes_gets_a_token_before_each_layer() -> None:
    made = bench(layers_count=6)
    made.submit(request("talker", [1, 2], 40))
    made.step()
    made.submit(request("reader", range(60), 2))
    for _ in range(6):
        made.step()
    assert made.sweep_engine.events == ["step", "begin", *["step", "layer"] * 6, "end"]
    assert len(made.tokens["talker"]) == 7
    made.run()
    assert made.tokens["reader"] == solo_tokens(tuple(range(60)), 2)


def test_between_two_sweeps_there_is_a_step() -> None:
    made = bench(layers_count=1, sweep_tokens=20)
    made.submit(request("talker", [1, 2], 40))
    made.step()
    made.submit(request("reader", range(80), 1))
    made.run()
    events = "".join(event[0] for event in made.sweep_engine.events)
    assert "bsle" * 4 in events


def test_beside_a_sweep_short_prompts_start_and_long_ones_wait() -> None:
    made = bench(layers_count=5)
    made.submit(request("swept", range(30), 2))
    made.step()
    made.submit(request("long", [5] * 25, 2))
    made.submit(request("short", [6] * 8, 2))
    made.submit(request("more", [7] * 12, 2))
    made.step()
    made.step()
    assert list(made.ends) == ["short"], "and more would reach the crossover with it"
    made.run()
    assert swept(made) == [[30], [25]]
    assert made.tokens["more"] == solo_tokens((7,) * 12, 2)


def test_a_short_prompt_takes_nothing_from_a_longer_one_that_waits() -> None:
    made = bench(layers_count=9, pages_count=20, max_running_count=3)
    made.submit(request("swept", [1] * 20, 2))  # 6 pages with its next token
    made.step()
    made.submit(request("long", [2] * 40, 2))  # 11 pages
    made.submit(request("large", [3] * 14, 20))  # 4 pages, and 3 are left
    made.step()
    assert made.scheduler.counts().running_count == 1
    made.cancel("large")
    made.submit(request("small", [3] * 4, 20))
    made.submit(request("third", [4], 2))  # has the pages, but not the place of the long one
    made.step()
    assert made.scheduler.counts().running_count == 2
    assert made.tokens["small"]
    made.cancel("small")
    made.run()
    assert made.tokens["long"] == solo_tokens((2,) * 40, 2)
    assert made.scheduler.counts().preemptions_count == 0


def test_who_is_cancelled_in_a_sweep_is_answered_at_once_and_its_pages_are_kept() -> None:
    made = bench()
    made.submit(request("gone", [1] * 20, 5))
    made.submit(request("stays", [2] * 8, 5))
    made.step()
    used = made.allocator.used_count
    made.cancel("gone")
    assert made.reason("gone") is FinishReason.CANCELLED
    assert made.allocator.used_count == used
    assert made.scheduler.counts().running_count == 1
    # the same id again is another request, which is not in the sweep
    made.ends.clear()
    made.tokens.clear()
    made.submit(request("gone", [3] * 5, 3))
    made.step()
    made.step()
    assert not made.scheduler.is_sweeping
    assert made.allocator.used_count < used
    made.run()
    assert made.tokens["gone"] == solo_tokens((3,) * 5, 3)
    assert made.tokens["stays"] == solo_tokens((2,) * 8, 5)


def test_a_sweep_for_nobody_is_abandoned() -> None:
    made = bench()
    made.submit(request("a", [1] * 20, 5))
    made.submit(request("b", [2] * 20, 5))
    made.step()
    made.cancel("a")
    assert not made.scheduler.sweep_is_deserted
    made.cancel("b")
    assert made.scheduler.sweep_is_deserted
    assert made.allocator.used_count > 0
    assert not made.scheduler.has_work
    made.run()
    assert made.sweep_engine.events[-1] == "abandon"
    assert made.allocator.used_count == 0


def test_before_a_sweep_for_nobody_is_abandoned_its_pages_are_waited_for() -> None:
    made = bench(layers_count=30, pages_count=12, sweep_from_tokens=10)
    made.submit(request("old", [1] * 3, 30))
    made.step()
    made.submit(request("young", [2] * 30, 2))
    made.step()
    made.cancel("young")
    while made.decode_step():
        pass
    assert len(made.tokens["old"]) == 14
    made.run()
    assert made.tokens["old"] == solo_tokens((1,) * 3, 30)


def test_an_abandoned_sweep_is_computed_again() -> None:
    made = bench()
    made.submit(request("a", [1] * 30, 5))
    made.step()
    made.abandon()
    made.run()
    assert swept(made) == [[30], [30]]
    assert made.tokens["a"] == solo_tokens((1,) * 30, 5)


def test_pages_of_a_sweep_are_not_taken_and_an_older_one_waits_for_its_end() -> None:
    made = bench(layers_count=25, pages_count=12, sweep_from_tokens=10)
    made.submit(request("old", [1] * 3, 30))
    made.step()
    made.submit(request("young", [2] * 30, 2))
    for _ in range(24):
        made.step()
    # 12 pages: 8 in the sweep, and 4 for 16 tokens of the old one, which knows one more
    assert made.scheduler.is_sweeping
    assert len(made.tokens["old"]) == 14
    assert made.scheduler.counts().preemptions_count == 0
    made.step()
    made.step()
    assert len(made.tokens["old"]) == 15, "then it makes room for itself"
    made.run()
    assert made.tokens["old"] == solo_tokens((1,) * 3, 30)
    assert made.tokens["young"] == solo_tokens((2,) * 30, 2)


def test_beside_a_sweep_the_youngest_outside_is_preempted() -> None:
    made = bench(layers_count=30, pages_count=16, sweep_from_tokens=10)
    made.submit(request("old", [1] * 3, 25))
    made.submit(request("middle", [4] * 3, 25))
    made.step()
    made.submit(request("young", [2] * 30, 2))
    for _ in range(20):
        made.step()
    assert made.scheduler.counts().preemptions_count == 1
    assert len(made.tokens["old"]) > len(made.tokens["middle"])
    made.run()
    for name, prompt, count in (("old", 1, 25), ("middle", 4, 25)):
        assert made.tokens[name] == solo_tokens((prompt,) * 3, count)


def test_a_poisoned_prompt_fails_alone_after_the_sweep_it_was_in() -> None:
    made = bench(poison_ids=frozenset({96}))
    made.submit(request("talker", [5], 40))
    made.step()
    made.submit(request("good", [1] * 30, 3))
    made.submit(request("bad", [96] * 10, 3))
    made.submit(request("fine", range(20), 3))
    made.run()
    assert made.ends["bad"].error_reason is Reason.ENGINE_FAILED
    for name, prompt in (("good", (1,) * 30), ("fine", tuple(range(20)))):
        assert made.tokens[name] == solo_tokens(prompt, 3)
    assert made.tokens["talker"] == solo_tokens((5,), 40)
    assert len(made.sweep_engine.sweeps) == 1


def test_while_the_prompts_of_a_failed_sweep_run_alone_decoding_goes_on() -> None:
    made = bench(sweep_tokens=240, failing_sweeps=frozenset({2}), step_tokens=80)
    made.submit(request("first", [4] * 30, 40))
    made.step()
    made.step()
    made.step()
    made.submit(request("long", [1] * 200, 3))
    while made.sweep_engine.events[-1] != "fault":
        made.step()
    told = len(made.tokens["first"])
    steps = len(made.engine.steps)
    for _ in range(7):
        made.step()
    alone = [[one.key for one in step.sequences] for step in made.engine.steps[steps:]]
    assert alone == [[1], [0], [1], [0], [1], [0], [1]]
    assert len(made.tokens["first"]) == told + 3
    made.run()
    assert made.tokens["long"] == solo_tokens((1,) * 200, 3)


def test_a_sweep_too_large_for_the_memory_is_halved_and_nobody_is_isolated() -> None:
    made = bench(sweep_tokens=1000, largest_sweep_tokens=30)
    made.submit(request("a", [1] * 90, 3))
    made.run()
    assert swept(made) == [[90], [45], [22], [22], [22], [22]]
    assert made.scheduler.counts().step_faults_count == 2
    assert made.tokens["a"] == solo_tokens((1,) * 90, 3)


def test_when_no_sweep_fits_the_memory_prompts_are_read_in_steps() -> None:
    made = bench(sweep_tokens=1000, largest_sweep_tokens=10)
    made.submit(request("a", [1] * 90, 3))
    made.run()
    assert swept(made) == [[90], [45], [22]]
    made.submit(request("b", [2] * 90, 3))
    made.run()
    assert len(swept(made)) == 3
    assert made.tokens["b"] == solo_tokens((2,) * 90, 3)


def test_abandoning_everything_ends_the_sweep_too() -> None:
    made = bench()
    for index in range(4):
        made.submit(request(f"r{index}", [1] * 20, 5))
    made.step()
    made.cancel("r0")
    made.scheduler.abandon(Reason.DRAINING, "stopping")
    made.collect()
    assert {made.ends[f"r{index}"].error_reason for index in range(1, 4)} == {Reason.DRAINING}
    assert made.allocator.used_count == 0
    assert not made.scheduler.is_sweeping


def test_a_drain_finishes_the_sweep() -> None:
    made = bench()
    made.submit(request("a", [1] * 30, 3))
    made.step()
    made.scheduler.drain()
    made.submit(request("late", [1] * 30, 3))
    made.run()
    assert made.ends["late"].error_reason is Reason.DRAINING
    assert made.tokens["a"] == solo_tokens((1,) * 30, 3)


def test_the_crossover_may_move_between_sweeps() -> None:
    made = bench()
    made.scheduler.set_sweep_from(0)
    made.submit(request("a", [1] * 30, 1))
    made.run()
    made.scheduler.set_sweep_from(5)
    made.submit(request("b", [1] * 6, 1))
    made.run()
    assert swept(made) == [[6]]


def test_calls_out_of_order_are_faults_of_ours() -> None:
    made = bench()
    made.submit(request("a", [1] * 30, 3))
    with pytest.raises(InternalError, match="not planned"):
        made.scheduler.sweep_abandoned()
    assert made.scheduler.plan_sweep() is not None
    with pytest.raises(InternalError, match="while another"):
        made.scheduler.plan_sweep()
    made.submit(request("b", [1], 3))
    assert made.scheduler.plan() is not None
    with pytest.raises(InternalError, match="while a step"):
        made.scheduler.sweep_failed(StepFault(message="?"))
