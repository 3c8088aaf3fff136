"""The main loop with a sweep in flight, on the echo engine."""

from __future__ import annotations

import pytest

from freetokend.core.errors import InternalError, Reason
from freetokend.engine.work import StepOutcome, StepWork, Sweep
from freetokend.enginehost.faults import MOST_FAILURES_IN_A_ROW
from freetokend.enginehost.inbox import Incoming
from freetokend.link.messages import Cancel, Disconnected, FinishReason, Shutdown, StepReport
from tests.enginehost.test_loop import Rig
from tests.scheduler.paged_echo import solo_tokens
from tests.scheduler.support import request
from tests.scheduler.sweep_echo import SweepEchoEngine

POISON = 96


class ControlledEngine(SweepEchoEngine):
    """Puts messages into the inbox while layer number N (from 1) is computed."""

    def __init__(
        self,
        *,
        layers_count: int = 4,
        failing_sweeps: frozenset[int] = frozenset(),
        poison_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(
            4,
            sweep_from_tokens=20,
            layers_count=layers_count,
            failing_sweeps=failing_sweeps,
            poison_ids=poison_ids,
        )
        self.during: dict[int, list[Incoming]] = {}
        self.rig: Rig | None = None

    def begin_sweep(self, work: StepWork) -> Sweep:
        assert self.rig is not None
        assert self.rig.link.busy[-1], "nor one that never begins"
        return ControlledSweep(self, super().begin_sweep(work))

    def layers_done_count(self) -> int:
        return self.events.count("layer")


class ControlledSweep:
    def __init__(self, engine: ControlledEngine, sweep: Sweep) -> None:
        self._engine = engine
        self._sweep = sweep

    def advance(self) -> StepOutcome | None:
        assert self._engine.rig is not None
        assert self._engine.rig.link.busy[-1], "a layer that never ends must be noticed"
        for message in self._engine.during.get(self._engine.layers_done_count() + 1, ()):
            self._engine.rig.source.put(message)
        return self._sweep.advance()

    def abandon(self) -> None:
        self._sweep.abandon()


def rig_of(engine: ControlledEngine, *messages: Incoming, sweep_tokens: int = 100) -> Rig:
    rig = Rig(engine, *messages, sweep_tokens=sweep_tokens)
    engine.rig = rig
    return rig


def test_a_sweep_is_computed_a_layer_per_turn_and_told_at_its_end() -> None:
    engine = ControlledEngine()
    rig = rig_of(engine, request("a", [1] * 30, 2), Shutdown(drain=True))
    assert rig.loop.run() == 0
    assert engine.events == ["begin", *["layer"] * 4, "end", "step"]
    assert rig.tokens() == {"a": solo_tokens((1,) * 30, 2)}
    # the sweep's end, the step, the end of the drain
    assert [len(report.outputs) for report in rig.link.reports] == [1, 1, 0]
    assert rig.link.progress_count == 5
    assert rig.link.busy[-1] is False
    assert rig.allocator.used_count == 0


def test_running_streams_get_a_token_between_two_layers() -> None:
    engine = ControlledEngine()
    rig = rig_of(engine, request("talker", [1, 2], 9))

    def feed(report: StepReport) -> None:
        if report.step_index == 1:
            rig.source.put(request("reader", range(40), 2))
            rig.source.put(Shutdown(drain=True))

    rig.link.on_report = feed
    rig.loop.run()
    assert engine.events[:11] == ["step", "begin", *["step", "layer"] * 4, "end"]
    told = [[one.request_id for one in report.outputs] for report in rig.link.reports[1:6]]
    assert told == [["talker"]] * 4 + [["reader"]]
    assert rig.tokens()["reader"] == solo_tokens(tuple(range(40)), 2)


def test_a_request_that_arrives_during_a_sweep_starts_after_the_layer() -> None:
    engine = ControlledEngine()
    engine.during = {2: [request("short", [7] * 3, 2), Shutdown(drain=True)]}
    rig = rig_of(engine, request("a", [1] * 30, 2))
    rig.loop.run()
    assert engine.events[:8] == ["begin", *["layer"] * 2, "step", "layer", "step", "layer", "end"]
    assert list(rig.ends()) == ["short", "a"]


def test_a_cancel_during_a_sweep_is_answered_after_the_layer() -> None:
    engine = ControlledEngine()
    engine.during = {2: [Cancel(request_id="gone"), Shutdown(drain=True)]}
    rig = rig_of(engine, request("gone", [1] * 30, 2), request("stays", [2] * 9, 2))
    layers_at_report: list[int] = []
    rig.link.on_report = lambda report: layers_at_report.append(engine.layers_done_count())
    rig.loop.run()
    assert layers_at_report[:2] == [2, 4]
    assert rig.link.reports[0].outputs[0].finish_reason is FinishReason.CANCELLED
    assert rig.link.busy[:2] == [True, True]
    assert rig.tokens()["stays"] == solo_tokens((2,) * 9, 2)
    assert "abandon" not in engine.events


def test_a_sweep_for_nobody_is_abandoned_and_the_loop_waits_again() -> None:
    engine = ControlledEngine()
    engine.during = {2: [Cancel(request_id="a")]}
    rig = rig_of(engine, request("a", [1] * 30, 2))

    def stop(report: StepReport) -> None:
        if report.outputs:
            rig.source.put(Shutdown(drain=True))

    rig.link.on_report = stop
    assert rig.loop.run() == 0
    assert engine.events == ["begin", "layer", "layer", "abandon"]
    assert rig.allocator.used_count == 0
    assert rig.link.busy[-1] is False


@pytest.mark.parametrize("ending", [Shutdown(drain=False), Disconnected(cause="closed")])
def test_an_end_without_drain_abandons_the_sweep_after_the_layer(ending: Incoming) -> None:
    engine = ControlledEngine()
    engine.during = {3: [ending]}
    rig = rig_of(engine, request("a", [1] * 30, 2), request("b", [1] * 30, 2))
    assert rig.loop.run() == (0 if isinstance(ending, Shutdown) else 69)
    assert engine.events == ["begin", *["layer"] * 3, "abandon"]
    if isinstance(ending, Shutdown):
        assert {end.error_reason for end in rig.ends().values()} == {Reason.DRAINING}
        assert rig.allocator.used_count == 0


@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_sweep_is_computed_in_steps(number: int) -> None:
    """It does not begin, or its last layer fails."""
    engine = ControlledEngine(failing_sweeps=frozenset({number}))
    engine.sweeps.extend([StepWork(sequences=())] * (number - 1))
    rig = rig_of(engine, request("a", [1] * 30, 2), Shutdown(drain=True))
    assert rig.loop.run() == 0
    assert engine.events.count("begin") == 1
    assert rig.tokens()["a"] == solo_tokens((1,) * 30, 2)


def test_a_poisoned_prompt_of_a_sweep_fails_alone() -> None:
    engine = ControlledEngine(poison_ids=frozenset({POISON}))
    rig = rig_of(
        engine,
        request("good", [1] * 30, 2),
        request("bad", [POISON], 2),
        Shutdown(drain=True),
    )
    assert rig.loop.run() == 0
    assert rig.ends()["bad"].error_reason is Reason.ENGINE_FAILED
    assert rig.tokens()["good"] == solo_tokens((1,) * 30, 2)


def test_sweeps_that_fail_in_a_row_are_the_engines_fault() -> None:
    engine = ControlledEngine(failing_sweeps=frozenset(range(1, 100)))
    rig = rig_of(engine, *(request(f"r{index}", [1] * 30, 1) for index in range(8)))

    def feed(report: StepReport) -> None:
        for update in report.outputs:
            rig.source.put(request(f"{update.request_id}'", [1] * 30, 1))

    rig.link.on_report = feed
    with pytest.raises(InternalError, match="8 sweeps in a row failed"):
        rig.loop.run()
    assert len(engine.sweeps) == MOST_FAILURES_IN_A_ROW


def test_sweeps_too_large_for_the_memory_are_not_the_engines_fault() -> None:
    engine = ControlledEngine()
    engine.sweep_from_tokens = 1
    engine.largest_sweep_tokens = 0
    rig = rig_of(engine, request("a", [1] * 250, 2), Shutdown(drain=True), sweep_tokens=1 << 20)
    assert rig.loop.run() == 0
    assert rig.tokens()["a"] == solo_tokens((1,) * 250, 2)
    assert len(engine.sweeps) >= MOST_FAILURES_IN_A_ROW


def test_a_sweep_that_works_starts_the_count_of_failures_again() -> None:
    engine = ControlledEngine(failing_sweeps=frozenset(range(1, 100, 2)))
    rig = rig_of(engine)
    left = iter(request(f"r{index}", [1] * 30, 1) for index in range(2 * MOST_FAILURES_IN_A_ROW))

    def feed(report: StepReport) -> None:
        if report.stats.running_count + report.stats.waiting_count == 0:
            rig.source.put(next(left, Shutdown(drain=True)))

    rig.link.on_report = feed
    rig.source.put(next(left))
    assert rig.loop.run() == 0
    assert len(engine.sweeps) == len(rig.ends()) == 2 * MOST_FAILURES_IN_A_ROW


def test_a_failed_step_beside_a_sweep_fails_one_request_only() -> None:
    engine = ControlledEngine(poison_ids=frozenset({POISON}))
    engine.during = {1: [request("bad", [POISON], 2)], 4: [Shutdown(drain=True)]}
    rig = rig_of(engine, request("a", [1] * 30, 2))
    assert rig.loop.run() == 0
    assert rig.ends()["bad"].error_reason is Reason.ENGINE_FAILED
    assert rig.tokens()["a"] == solo_tokens((1,) * 30, 2)
    assert "fault" not in engine.events


def test_the_loop_asks_the_engine_for_the_crossover_before_each_sweep() -> None:
    engine = ControlledEngine()
    engine.sweep_from_tokens = 0
    rig = rig_of(engine, request("a", [1] * 30, 1))

    def feed(report: StepReport) -> None:
        if "a" in rig.ends() and "b" not in rig.ends():
            engine.sweep_from_tokens = 5
            rig.source.put(request("b", [1] * 6, 1))
            rig.source.put(Shutdown(drain=True))

    rig.link.on_report = feed
    rig.loop.run()
    assert [work.tokens_count for work in engine.sweeps] == [6]
