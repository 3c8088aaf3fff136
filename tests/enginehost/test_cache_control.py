"""Commands to the expert cache at the engine's end: each is answered once, none ends the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core import logs
from freetokend.core.errors import Reason, ResourceError
from freetokend.enginehost.cache_control import CacheCommands
from freetokend.link.messages import (
    CacheAnswer,
    CacheResized,
    CacheVerified,
    ResizeCache,
    ResizeOutcome,
    SlotDifference,
    VerifyCache,
)
from tests.enginehost.fake_cache import FakeCache

LOG = logs.logger("freetokend.test")


class Rig:
    def __init__(self, cache: FakeCache | None = None) -> None:
        self.cache = cache or FakeCache()
        self.sent: list[CacheAnswer] = []
        self.commands = CacheCommands(
            self.cache, send=self.sent.append, log=LOG, experts_per_layer_count=4
        )

    def do(self, *commands: ResizeCache | VerifyCache) -> list[CacheAnswer]:
        """Commands that wait together, and their answers."""
        self.sent.clear()
        for command in commands:
            self.commands.take(command)
        assert self.sent == [], "nothing is done before the safe point"
        self.commands.run()
        return list(self.sent)

    def resize(self, generation: int, slots_count: int) -> CacheResized:
        (answer,) = self.do(ResizeCache(generation=generation, slots_count=slots_count))
        assert isinstance(answer, CacheResized)
        return answer


def test_a_resize_is_done_and_told() -> None:
    rig = Rig()
    answer = rig.resize(1, 4)
    assert replace(answer, stall_s=0.0, safe_point_wait_s=0.0) == CacheResized(
        generation=1,
        outcome=ResizeOutcome.DONE,
        slots_count=4,
        slots_before_count=8,
        committed_bytes=400,
        committed_before_bytes=800,
        moved_count=1,
        dropped_count=2,
    )
    assert rig.resize(2, 4).outcome is ResizeOutcome.UNCHANGED


def test_a_repeated_generation_is_answered_again_and_done_once() -> None:
    rig = Rig()
    first = rig.resize(1, 4)
    assert rig.resize(1, 4) == first
    assert rig.cache.sizes == [4]


def test_an_older_generation_is_not_done() -> None:
    rig = Rig()
    rig.resize(5, 4)
    late = rig.resize(3, 12)
    assert (late.outcome, late.slots_count) == (ResizeOutcome.SUPERSEDED, 4)
    assert rig.cache.sizes == [4]


def test_of_those_that_wait_together_only_the_newest_is_done() -> None:
    rig = Rig()
    answers = rig.do(
        ResizeCache(generation=1, slots_count=16),
        VerifyCache(request_id="v"),
        ResizeCache(generation=2, slots_count=2),
    )
    assert [type(answer) for answer in answers] == [CacheResized, CacheVerified, CacheResized]
    assert [a.outcome for a in answers if isinstance(a, CacheResized)] == [
        ResizeOutcome.SUPERSEDED,
        ResizeOutcome.DONE,
    ]
    assert rig.cache.sizes == [2]


def test_what_was_deferred_can_be_tried_again() -> None:
    rig = Rig()
    rig.cache.deferred = "a prefill uses slot 7"
    answer = rig.resize(1, 4)
    assert answer.outcome is ResizeOutcome.DEFERRED
    assert answer.note == ("a prefill uses slot 7. The rest is done when the command comes again.")
    rig.cache.deferred = ""
    assert rig.resize(1, 4).outcome is ResizeOutcome.DONE
    assert rig.cache.sizes == [4, 4]


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (ResourceError("no room", reason=Reason.DEVICE_MEMORY), Reason.DEVICE_MEMORY, "no room"),
        (ZeroDivisionError("oops"), Reason.INTERNAL, "ZeroDivisionError: oops"),
        (MemoryError(), Reason.HOST_MEMORY, "MemoryError: "),
    ],
)
def test_errors_are_answers_and_the_next_command_works(
    error: Exception, reason: Reason, message: str
) -> None:
    rig = Rig()
    rig.cache.error = error
    answer = rig.resize(1, 4)
    assert (answer.outcome, answer.slots_count) == (ResizeOutcome.FAILED, 8)
    assert (answer.error_reason, answer.error_message) == (reason, message)
    (told,) = rig.do(VerifyCache(request_id="v"))
    assert told == CacheVerified(request_id="v", error_reason=reason, error_message=message)
    rig.cache.error = None
    assert rig.resize(1, 4).outcome is ResizeOutcome.DONE


def test_a_difference_is_named_by_layer_and_expert() -> None:
    (answer,) = Rig().do(VerifyCache(request_id="v"))
    assert isinstance(answer, CacheVerified)
    assert (answer.compared_count, answer.compared_bytes) == (2, 200)
    assert answer.differences == (
        SlotDifference(layer_index=2, expert_index=1, slot_index=3, offset_bytes=64),
    )


def test_an_engine_without_a_cache_says_so() -> None:
    sent: list[CacheAnswer] = []
    commands = CacheCommands(None, send=sent.append, log=LOG)
    commands.take(ResizeCache(generation=1, slots_count=4))
    commands.take(VerifyCache(request_id="v"))
    commands.run()
    text = "this engine has no expert cache: backend cpu"
    first, second = sent
    assert isinstance(first, CacheResized)
    assert [replace(first, stall_s=0.0, safe_point_wait_s=0.0), second] == [
        CacheResized(
            generation=1,
            outcome=ResizeOutcome.FAILED,
            error_reason=Reason.DEVICE_UNUSABLE,
            error_message=text,
        ),
        CacheVerified(request_id="v", error_reason=Reason.DEVICE_UNUSABLE, error_message=text),
    ]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 16)), max_size=4).map(tuple),
        max_size=6,
    )
)
def test_every_command_has_one_answer_and_generations_only_rise(
    turns: list[tuple[tuple[int, int], ...]],
) -> None:
    """A generation stands for one size, as control sends it."""
    rig = Rig()
    size_of = {generation: size for turn in turns for generation, size in reversed(turn)}
    newest = 0
    for turn in turns:
        done_count = len(rig.cache.sizes)
        generations = [generation for generation, _ in turn]
        newest = max([newest, *generations])
        answers = rig.do(
            *(ResizeCache(generation=one, slots_count=size_of[one]) for one in generations)
        )
        assert [a.generation for a in answers if isinstance(a, CacheResized)] == generations
        assert rig.cache.sizes[done_count:] in ([], [size_of[newest]] if newest else [])
        if newest:
            assert rig.cache.state.slots_count == size_of[newest]


def test_a_comparison_shows_progress_while_it_runs() -> None:
    marks: list[None] = []
    commands = CacheCommands(
        FakeCache(), send=lambda _: None, log=LOG, progress=lambda: marks.append(None)
    )
    commands.take(VerifyCache(request_id="v"))
    commands.run()
    assert len(marks) == 2
