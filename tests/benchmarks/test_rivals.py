"""A rival that dies or refuses becomes a note that says why, and the benchmark goes on."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from benchmarks.layer_rivals import Rivals
from benchmarks.peers.cache import PeerUnavailableError
from benchmarks.peers.child import Child
from benchmarks.rounds import Burst, Plan, play_rivals

PLAN = Plan(rounds_count=3, burst_s=0.0, ceiling_s=0.0)


class Steady:
    """A side whose every burst is the same."""

    def __init__(self, name: str) -> None:
        self.name = name

    def burst(self, seconds: float) -> Burst:
        return Burst(rate=2.0, cpu_share=1.0)


def scripted(name: str = "rival") -> Child:
    cpus = sorted(os.sched_getaffinity(0))[:1]
    return Child(name, "tests.benchmarks.scripted_rival", cpus)


def opened(name: str, bursts_left: int, ending: str) -> Child:
    child = scripted(name)
    child.ask("open", bursts_left=bursts_left, ending=ending)
    return child


@pytest.mark.parametrize(
    ("ending", "wanted"),
    [("abort", "rival was ended by SIGABRT"), ("exit", "rival ended with status 3")],
)
def test_the_end_of_a_rival_is_told_with_its_last_lines(ending: str, wanted: str) -> None:
    with opened("rival", 0, ending) as child:
        with pytest.raises(PeerUnavailableError, match=wanted) as caught:
            child.burst(0.0)
        assert "no such instruction here" in str(caught.value)
        assert child.ended


def test_a_dead_rival_can_be_asked_and_closed() -> None:
    child = opened("rival", 0, "abort")
    for _ in range(3):  # from the second on the request finds no reader and stays in the buffer
        with pytest.raises(PeerUnavailableError, match="SIGABRT"):
            child.burst(0.0)
    child.close()
    child.close()


def test_a_rival_that_dies_while_loading_is_left_out() -> None:
    with ExitStack() as stack:
        rivals = Rivals(stack)
        rivals.add("dead", scripted, {"bursts_left": -1, "ending": "abort"})
        rivals.add("refusing", scripted, {"bursts_left": -1, "ending": "refuse"})
        rivals.add("good", scripted, {})
        assert [rival.program for rival in rivals.loaded] == ["good"]
        assert [rival.program for rival in rivals.batch(1)] == ["good"]
    assert len(rivals.notes) == 2
    assert "SIGABRT" in rivals.notes[0]
    assert "not with these weights" in rivals.notes[1]


def test_a_rival_that_dies_with_one_batch_is_not_asked_for_the_next() -> None:
    with ExitStack() as stack:
        rivals = Rivals(stack)
        rivals.add("dying", scripted, {"bursts_left": 0, "ending": "abort"})
        assert rivals.batch(1) == []
        assert rivals.batch(32) == []
    assert len(rivals.notes) == 1
    assert "left out with 1 tokens" in rivals.notes[0]


@pytest.mark.parametrize("ending", ["abort", "refuse"])
def test_rounds_go_on_without_a_rival_that_fails_in_the_middle(ending: str) -> None:
    notes: list[str] = []
    with opened("failing", 2, ending) as failing, opened("lasting", 1 << 30, "") as lasting:
        outcome = play_rivals(Steady("ours"), [failing, lasting], Steady("ceiling"), PLAN, notes)
    assert outcome.names == ("ours", "lasting", "ceiling")
    assert len(outcome.rounds) == 3
    assert outcome.row("case", "ours", "lasting", "layers/s", 1.5).verdict == "pass"
    assert len(notes) == 1
    assert "failing" in notes[0]
