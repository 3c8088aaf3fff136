"""Recording at the engine's end: what is told of steps, and what never happens to them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from freetokend.core import logs
from freetokend.core.errors import FreetokenError, Reason
from freetokend.engine.work import SamplingParams, SequenceWork, StepOutcome, StepWork, Sweep
from freetokend.enginehost import trace_control
from freetokend.enginehost.routed_steps import routed_steps
from freetokend.enginehost.trace_control import (
    STEP_CAPACITY_IDS,
    TraceCommands,
    Traced,
    no_experts,
)
from freetokend.link.messages import Shutdown, StepReport
from freetokend.link.trace_messages import (
    RoutedRows,
    StartTrace,
    StopTrace,
    TracedStep,
    TraceEnded,
    TraceMessage,
    TraceStarted,
)
from freetokend.traces.trace import SKIPPED, Phase
from tests.enginehost.fake_tap import SHAPE, FakeTap, TappedEcho, chosen, feed, traced
from tests.enginehost.test_loop import Rig
from tests.scheduler.paged_echo import solo_tokens
from tests.scheduler.support import request
from tests.scheduler.sweep_echo import SweepEchoEngine

STARTED = TraceStarted(
    trace_id="t",
    layers_count=3,
    experts_per_layer_count=200,
    experts_per_token_count=2,
    source="echo",
)


def sequence(key: int, token_ids: Sequence[int], draw_index: int | None) -> SequenceWork:
    return SequenceWork(
        key=key,
        token_ids=token_ids,
        first_position=0,
        pages=array("i", [0]),
        sampling=SamplingParams(),
        draw_index=draw_index,
    )


def work(*sequences: tuple[Sequence[int], int | None]) -> StepWork:
    return StepWork(sequences=tuple(sequence(key, *one) for key, one in enumerate(sequences)))


def ids(rows: RoutedRows) -> np.ndarray:
    return np.frombuffer(rows.expert_ids, dtype="<u2").reshape(3, rows.rows_count, 2)


class Desk:
    """Commands without a loop."""

    def __init__(self, what: Traced | FreetokenError, waiting_bytes: int = 0) -> None:
        self.sent: list[TraceMessage] = []
        self.waiting_bytes = waiting_bytes
        self.commands = TraceCommands(
            what,
            send=self.sent.append,
            waiting_bytes=lambda: self.waiting_bytes,
            log=logs.logger("freetokend.test"),
        )

    def start(self, trace_id: str = "t") -> TraceMessage:
        self.commands.take(StartTrace(trace_id=trace_id))
        return self.sent[-1]

    def step(self, tap: FakeTap, one: StepWork) -> None:
        self.commands.step_begins()
        for layer in range(3):
            feed(tap, one, layer)
        self.commands.step_ended(one)


def test_a_mixed_step_is_told_as_its_prompts_and_its_tokens() -> None:
    tap = FakeTap()
    tap.start(100)
    # writes, reads to its end, reads on, writes, reads its only token
    mixed = work(([9], 4), ([1, 2, 3], 0), ([4, 5], None), ([8], 1), ([7], 0))
    for layer in range(3):
        feed(tap, mixed, layer)
    read, written = routed_steps(mixed, tap.take(), SHAPE)
    assert (read.phase, written.phase) == (Phase.PREFILL, Phase.DECODE)
    for layer in range(2):
        assert np.array_equal(read.ids[layer], chosen(layer, [1, 2, 3, 4, 5, 7]))
    expected = chosen(2, [0, 0, 3, 0, 0, 7])
    expected[[0, 1, 3, 4]] = SKIPPED
    assert np.array_equal(read.ids[2], expected)
    for layer in range(3):
        assert np.array_equal(written.ids[layer], chosen(layer, [9, 8]))


@pytest.mark.parametrize(
    ("layers", "told"),
    [((0, 1), "layers"), ((0, 1, 1), "layers"), ((0, 1, 2, 0), "layers"), ((), "layers")],
)
def test_a_step_that_was_not_seen_whole_is_not_told(layers: tuple[int, ...], told: str) -> None:
    tap, one = FakeTap(), work(([1, 2], 0))
    tap.start(100)
    for layer in layers:
        feed(tap, one, layer)
    with pytest.raises(ValueError, match=told):
        routed_steps(one, tap.take(), SHAPE)


def test_rows_that_no_token_stands_for_are_a_fault() -> None:
    tap, one = FakeTap(), work(([1, 2, 3], 0))
    tap.start(100)
    for layer in range(3):
        tap.route(layer, chosen(layer, [1, 2]))
    with pytest.raises(ValueError, match=r"2 rows of a step of 3 tokens, of which 1"):
        routed_steps(one, tap.take(), SHAPE)


def test_nothing_is_kept_or_told_unless_a_recording_is_on() -> None:
    tap = FakeTap()
    desk = Desk(traced(tap))
    desk.step(tap, work(([1], 1)))
    assert desk.start() == STARTED
    assert tap.capacity_ids == STEP_CAPACITY_IDS
    desk.step(tap, work(([1], 1)))
    desk.commands.take(StopTrace(trace_id="another"))
    desk.step(tap, work(([2], 1)))
    desk.commands.take(StopTrace(trace_id="t"))
    desk.commands.take(StopTrace(trace_id="t"))
    assert tap.capacity_ids == 0
    desk.step(tap, work(([3], 1)))
    _, first, second = desk.sent
    assert isinstance(first, TracedStep)
    assert isinstance(second, TracedStep)
    assert ids(first.parts[0])[0].tolist() == [[1, 100]]
    assert ids(second.parts[0])[0].tolist() == [[2, 100]]


def test_a_second_recording_and_a_model_without_experts_are_refused() -> None:
    desk = Desk(traced(FakeTap()))
    desk.start()
    refused = desk.start("u")
    assert isinstance(refused, TraceStarted)
    assert refused.error_reason is Reason.QUEUE_FULL
    refusal = no_experts()
    told = Desk(refusal).start()
    assert isinstance(told, TraceStarted)
    assert (told.error_reason, told.error_message) == (refusal.reason, refusal.message)
    tap = FakeTap()
    tap.error = MemoryError()
    failed = Desk(traced(tap)).start()
    assert isinstance(failed, TraceStarted)
    assert failed.error_reason is Reason.INTERNAL


def test_a_slow_reader_ends_the_recording_with_whole_steps() -> None:
    tap = FakeTap()
    desk = Desk(traced(tap), waiting_bytes=trace_control.WAITING_BYTES - 12)
    desk.start()
    desk.step(tap, work(([1], 1)))
    desk.waiting_bytes += 1
    desk.step(tap, work(([1], 1)))
    desk.step(tap, work(([1], 1)))
    _, told, ended = desk.sent
    assert isinstance(told, TracedStep)
    assert told.ids_bytes == 12
    assert isinstance(ended, TraceEnded)
    assert ended.error_reason is Reason.QUEUE_FULL
    assert tap.capacity_ids == 0
    assert desk.start("u") == TraceStarted(
        trace_id="u",
        layers_count=3,
        experts_per_layer_count=200,
        experts_per_token_count=2,
        source="echo",
    )


def test_a_step_without_room_and_one_that_makes_no_sense_end_the_recording() -> None:
    tap = FakeTap()
    desk = Desk(traced(tap))
    desk.start()
    tap.overflowed = True
    desk.step(tap, work(([1], 1)))
    assert isinstance(desk.sent[-1], TraceEnded)
    assert desk.sent[-1].error_reason is Reason.HOST_MEMORY
    tap.overflowed = False
    desk.start()
    desk.commands.step_ended(work(([1], 1)))  # the tap has seen nothing
    assert isinstance(desk.sent[-1], TraceEnded)
    assert desk.sent[-1].error_reason is Reason.INTERNAL


def test_the_loop_tells_every_step_before_its_report_and_serves_on() -> None:
    tap = FakeTap()
    engine = TappedEcho(tap)
    rig = Rig(
        engine,
        StartTrace(trace_id="t"),
        request("a", [1, 2, 3], 6),
        request("b", [4, 5], 6),
        Shutdown(drain=True),
        traced=traced(tap),
    )
    told: list[int] = []

    def on_report(report: StepReport) -> None:
        told.append(len(rig.link.traced))
        if report.step_index == 2:
            engine.fails_left = 1  # behind its first layer; both are computed again, alone

    rig.link.on_report = on_report
    assert rig.loop.run() == 0
    assert rig.tokens() == {"a": solo_tokens((1, 2, 3), 6), "b": solo_tokens((4, 5), 6)}
    first, *steps = rig.link.traced
    assert first == STARTED
    assert [
        sum(part.rows_count for part in step.parts)
        for step in steps
        if isinstance(step, TracedStep)
    ] == [one.tokens_count for one in engine.steps]
    assert len(steps) == len(engine.steps)
    assert {one.tokens_count for one in engine.steps} == {5, 2, 1}
    assert told[0] == 2, "the sizes and the first step come before its report"


class TappedSweeps(SweepEchoEngine):
    """Shows the routing of sweeps to one tap, that of steps to the other."""

    def __init__(self, steps: FakeTap, sweeps: FakeTap) -> None:
        super().__init__(4, sweep_from_tokens=20, layers_count=SHAPE.layers_count)
        self.steps_tap, self.sweeps_tap = steps, sweeps
        self.during: dict[int, Rig] = {}

    def run(self, work: StepWork) -> StepOutcome:
        for layer in range(SHAPE.layers_count):
            feed(self.steps_tap, work, layer)
        return super().run(work)

    def begin_sweep(self, work: StepWork) -> Sweep:
        return _TappedSweep(self, super().begin_sweep(work), work)


class _TappedSweep:
    def __init__(self, engine: TappedSweeps, sweep: Sweep, work: StepWork) -> None:
        self._engine, self._sweep, self._work, self._layer = engine, sweep, work, 0

    def advance(self) -> StepOutcome | None:
        feed(self._engine.sweeps_tap, self._work, self._layer)
        self._layer += 1
        if self._layer in self._engine.during:
            self._engine.during[self._layer].source.put(StartTrace(trace_id="t"))
        return self._sweep.advance()

    def abandon(self) -> None:
        self._sweep.abandon()


@pytest.mark.parametrize("late", [False, True])
def test_a_sweep_is_told_whole_or_not_at_all(late: bool) -> None:
    steps, sweeps = FakeTap(), FakeTap()
    engine = TappedSweeps(steps, sweeps)
    rig = Rig(
        engine,
        *(() if late else (StartTrace(trace_id="t"),)),
        request("reader", range(30), 3),
        Shutdown(drain=True),
        sweep_tokens=100,
        traced=traced(steps, sweeps),
    )
    if late:
        engine.during[1] = rig
    assert rig.loop.run() == 0
    assert rig.tokens() == {"reader": solo_tokens(tuple(range(30)), 3)}
    told = [one for one in rig.link.traced if isinstance(one, TracedStep)]
    assert len(rig.link.traced) == len(told) + 1
    sizes = [[(part.is_prefill, part.rows_count) for part in one.parts] for one in told]
    assert sizes == [*([] if late else [[(True, 30)]]), [(False, 1)], [(False, 1)]]
    if not late:
        assert ids(told[0].parts[0])[2, -1].tolist() == [29, 102]
        assert (ids(told[0].parts[0])[2, :-1] == SKIPPED).all()
