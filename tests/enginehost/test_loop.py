"""The main loop on the echo engine and a link that only records."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest

from freetokend.core import logs
from freetokend.core.errors import InternalError, Reason, ResourceError
from freetokend.engine.work import StepOutcome, StepWork
from freetokend.enginehost.bandwidth_control import BandwidthCommands, BandwidthParts, Slices
from freetokend.enginehost.cache_control import CacheCommands
from freetokend.enginehost.faults import MOST_FAILURES_IN_A_ROW, step_fault
from freetokend.enginehost.inbox import Inbox, Incoming
from freetokend.enginehost.loop import LoopCommands, StepLoop
from freetokend.enginehost.probe import TokenProbe
from freetokend.enginehost.trace_control import TraceCommands, Traced, no_experts
from freetokend.kvcache.allocator import PageAllocator
from freetokend.link.bandwidth_messages import (
    BandwidthMeasured,
    BandwidthMessage,
    MeasureBandwidth,
)
from freetokend.link.messages import (
    CacheAnswer,
    CacheResized,
    CacheVerified,
    Cancel,
    Disconnected,
    EngineMessage,
    EngineSettings,
    EngineStats,
    FinishReason,
    ResizeCache,
    SequenceUpdate,
    SetLogLevel,
    Shutdown,
    StepReport,
    VerifyCache,
)
from freetokend.link.trace_messages import TracedStep, TraceEnded, TraceMessage, TraceStarted
from freetokend.policy.bandwidth_profile import Figure, FigureName
from freetokend.scheduler.limits import SchedulerLimits
from freetokend.scheduler.scheduler import Scheduler
from tests.enginehost.fake_cache import FakeCache
from tests.scheduler.paged_echo import VOCAB_SIZE, PagedEchoEngine, solo_tokens
from tests.scheduler.support import request

POISON = 96


class RecordingLink:
    """Keeps what the loop says; `script` may react to each report, as control would."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.answers: list[CacheAnswer] = []
        self.traced: list[TraceMessage] = []
        self.busy: list[bool] = []
        self.progress_count = 0
        self.on_report = lambda report: None

    def send(self, message: EngineMessage) -> None:
        if isinstance(message, CacheResized | CacheVerified):
            self.answers.append(message)
            return
        if isinstance(message, TraceStarted | TracedStep | TraceEnded):
            self.traced.append(message)
            return
        assert isinstance(message, StepReport)
        self.reports.append(message)
        self.on_report(message)

    def progress(self, count: int = 1) -> None:
        self.progress_count += count

    def set_busy(self, busy: bool) -> None:
        self.busy.append(busy)


class Rig:
    """A loop with everything around it."""

    def __init__(
        self,
        engine: PagedEchoEngine | None = None,
        *messages: Incoming,
        cache: FakeCache | None = None,
        sweep_tokens: int = 0,
        traced: Traced | None = None,
        beside: Callable[[], bool] = lambda: False,
        bandwidth: BandwidthCommands | None = None,
    ) -> None:
        self.source: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        for message in messages:
            self.source.put(message)
        self.engine = engine or PagedEchoEngine(4)
        self.allocator = PageAllocator(64)
        self.link = RecordingLink()
        self.inbox = Inbox(self.source)
        limits = SchedulerLimits(
            max_running_count=4,
            max_waiting_count=8,
            step_tokens=16,
            servable_context_tokens=256,
            vocab_size=VOCAB_SIZE,
            page_tokens=4,
            sweep_tokens=sweep_tokens,
        )
        self.loop = StepLoop(
            inbox=self.inbox,
            link=self.link,
            scheduler=Scheduler(limits, self.allocator, fresh_seed=lambda: 1),
            engine=self.engine,
            probe=TokenProbe(self.engine, self.allocator, 1).run,
            gauges=lambda stats: replace(stats, pool_bytes=77),
            log=logs.logger("freetokend.test"),
            commands=LoopCommands(
                beside=beside,
                bandwidth=bandwidth,
                cache=CacheCommands(cache, send=self.link.send, log=logs.logger("freetokend.test")),
                traces=TraceCommands(
                    traced or no_experts(),
                    send=self.link.send,
                    waiting_bytes=lambda: 0,
                    log=logs.logger("freetokend.test"),
                ),
            ),
        )

    def updates(self) -> list[SequenceUpdate]:
        return [update for report in self.link.reports for update in report.outputs]

    def tokens(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = defaultdict(list)
        for update in self.updates():
            tokens[update.request_id].extend(update.token_ids)
        return tokens

    def ends(self) -> dict[str, SequenceUpdate]:
        return {one.request_id: one for one in self.updates() if one.finish_reason is not None}


def test_a_drain_finishes_what_was_accepted_and_exits_zero() -> None:
    rig = Rig(None, request("a", [1, 2], 5), request("b", [3], 9), Shutdown(drain=True))
    assert rig.loop.run() == 0
    assert rig.tokens() == {"a": solo_tokens((1, 2), 5), "b": solo_tokens((3,), 9)}
    assert rig.allocator.used_count == 0
    assert rig.link.busy[-1] is False


def test_one_report_per_step_with_statistics() -> None:
    rig = Rig(None, request("a", [1, 2], 3), Shutdown(drain=True))
    rig.loop.run()
    steps = [report for report in rig.link.reports if report.outputs]
    assert [len(report.outputs) for report in steps] == [1, 1, 1]
    assert [report.step_index for report in rig.link.reports] == list(
        range(1, len(rig.link.reports) + 1)
    )
    last = rig.link.reports[-1].stats
    assert (last.steps_count, last.prefill_tokens_count, last.decode_tokens_count) == (3, 2, 3)
    assert last.kv_pages_total_count == 64
    assert last.pool_bytes == 77
    assert last.step_s > 0
    assert rig.link.progress_count == 3


def test_how_fast_prompts_are_computed_is_told() -> None:
    rig = Rig(None, request("a", [1] * 40, 3), request("b", [2] * 30, 2), Shutdown(drain=True))
    rig.loop.run()
    pending = [report.stats.prefill_pending_tokens_count for report in rig.link.reports]
    assert max(pending) >= 40
    assert pending[-1] == 0
    assert rig.link.reports[-1].stats.prefill_tokens_per_s > 0


def test_shutdown_without_drain_ends_everything_now() -> None:
    rig = Rig(None, request("a", [1], 50), request("late", [1], 50))

    def stop(report: StepReport) -> None:
        if report.stats.steps_count == 3:
            rig.source.put(Shutdown(drain=False))

    rig.link.on_report = stop
    assert rig.loop.run() == 0
    assert {end.error_reason for end in rig.ends().values()} == {Reason.DRAINING}
    assert set(rig.ends()) == {"a", "late"}
    assert rig.loop.stats().steps_count == 3


def test_a_second_shutdown_does_not_wait_for_the_drain() -> None:
    rig = Rig(None, request("a", [1], 200), Shutdown(drain=True))

    def insist(report: StepReport) -> None:
        if report.stats.steps_count == 2:
            rig.source.put(Shutdown(drain=False))

    rig.link.on_report = insist
    assert rig.loop.run() == 0
    assert rig.loop.stats().steps_count == 2


def test_control_gone_ends_the_loop_with_a_code_of_its_own() -> None:
    rig = Rig(None, request("a", [1], 50), Disconnected(cause="closed"))
    assert rig.loop.run() == 69
    assert rig.inbox.stop.is_set()


def test_a_cancel_takes_effect_before_the_next_step() -> None:
    rig = Rig(None, request("a", [1], 50))

    def cancel(report: StepReport) -> None:
        if report.stats.steps_count == 2 and "a" not in rig.ends():
            rig.source.put(Cancel(request_id="a"))
            rig.source.put(Shutdown(drain=True))

    rig.link.on_report = cancel
    rig.loop.run()
    assert rig.ends()["a"].finish_reason is FinishReason.CANCELLED
    assert rig.ends()["a"].completion_tokens == 2
    assert rig.loop.stats().steps_count == 2


def test_a_refusal_is_told_without_a_step() -> None:
    rig = Rig(None, request("empty", []))

    def stop(report: StepReport) -> None:
        if report.outputs:
            rig.source.put(Shutdown(drain=True))

    rig.link.on_report = stop
    rig.loop.run()
    assert rig.ends()["empty"].error_reason is Reason.INVALID_REQUEST
    assert rig.engine.steps == []


def test_an_idle_loop_waits_and_wakes() -> None:
    rig = Rig()
    thread = threading.Thread(target=rig.loop.run)
    thread.start()
    done = threading.Event()

    def note(report: StepReport) -> None:
        if "a" in rig.ends():
            done.set()

    rig.link.on_report = note
    rig.source.put(request("a", [1], 3))
    assert done.wait(20)
    rig.source.put(Shutdown(drain=True))
    thread.join(20)
    assert not thread.is_alive()
    # nothing was computed or told while there was nothing to do
    assert rig.loop.stats().steps_count == 3
    assert len(rig.link.reports) <= 5


def test_a_poisoned_request_fails_alone_and_the_service_goes_on() -> None:
    rig = Rig(
        PagedEchoEngine(4, poison_ids=frozenset({POISON})),
        request("good", [1, 2], 6),
        request("bad", [POISON], 6),
        SetLogLevel(level="nonsense"),
        EngineSettings(model="again"),
        Shutdown(drain=True),
    )
    assert rig.loop.run() == 0
    assert rig.ends()["bad"].error_reason is Reason.ENGINE_FAILED
    assert rig.tokens()["good"] == solo_tokens((1, 2), 6)


class BrokenEngine(PagedEchoEngine):
    """Fails every step after the first ones."""

    def __init__(self, sound_steps_count: int) -> None:
        super().__init__(4)
        self._left = sound_steps_count

    def run(self, work: StepWork) -> StepOutcome:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the device is gone")
        return super().run(work)


def test_a_broken_engine_is_found_by_its_probe() -> None:
    rig = Rig(BrokenEngine(2), request("a", [1], 50))
    with pytest.raises(InternalError, match=r"the device is gone.*single known token"):
        rig.loop.run()
    assert rig.allocator.used_count == 0


def test_many_failures_in_a_row_are_the_engines_fault() -> None:
    rig = Rig(
        PagedEchoEngine(4, poison_ids=frozenset({POISON})),
        *(request(f"r{index}", [POISON], 2) for index in range(MOST_FAILURES_IN_A_ROW)),
    )
    with pytest.raises(InternalError, match="8 requests in a row failed"):
        rig.loop.run()
    assert len(rig.engine.steps) > MOST_FAILURES_IN_A_ROW


def test_a_success_between_failures_starts_the_count_again() -> None:
    messages: list[Incoming] = []
    for index in range(2 * MOST_FAILURES_IN_A_ROW):
        token = POISON if index % 2 else 1
        messages.append(request(f"r{index}", [token], 1))
    rig = Rig(PagedEchoEngine(4, poison_ids=frozenset({POISON})))
    left = iter(messages)

    def feed(report: StepReport) -> None:
        if report.stats.running_count + report.stats.waiting_count == 0:
            rig.source.put(next(left, Shutdown(drain=True)))

    rig.link.on_report = feed
    rig.source.put(next(left))
    assert rig.loop.run() == 0
    assert len(rig.ends()) == 2 * MOST_FAILURES_IN_A_ROW


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc] DefaultCPUAllocator: can't allocate memory"), True),
        (ResourceError("no memory for working buffers"), True),
        (ResourceError("unusable", reason=Reason.DEVICE_UNUSABLE), False),
        (ValueError("shape\nsecond line"), False),
    ],
)
def test_allocation_failures_are_told_from_others(error: Exception, memory: bool) -> None:
    fault = step_fault(error)
    assert fault.memory is memory
    assert fault.message
    assert "\n" not in fault.message


def test_peeking_while_loading_loses_no_message() -> None:
    source: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
    inbox = Inbox(source)
    source.put(request("a", [1]))
    source.put(Shutdown(drain=True))
    inbox.peek()
    assert not inbox.stop.is_set()
    source.put(Shutdown(drain=False))
    inbox.peek()
    assert inbox.stop.is_set()
    taken = [inbox.take(wait=False) for _ in range(4)]
    assert [type(one).__name__ for one in taken] == [
        "GenerateRequest",
        "Shutdown",
        "Shutdown",
        "NoneType",
    ]


def test_stats_without_steps() -> None:
    rig = Rig()
    assert rig.loop.stats() == EngineStats(
        kv_pages_total_count=64,
        pool_bytes=77,
        servable_context_tokens=rig.loop.stats().servable_context_tokens,
    )


def test_cache_commands_are_done_between_steps_and_change_no_token() -> None:
    cache = FakeCache()
    rig = Rig(None, request("a", [1, 2], 6), Shutdown(drain=True), cache=cache)

    def shrink(report: StepReport) -> None:
        if report.stats.steps_count in (2, 4):
            count = report.stats.steps_count
            rig.source.put(ResizeCache(generation=count, slots_count=count))

    rig.link.on_report = shrink
    assert rig.loop.run() == 0
    assert cache.sizes == [2, 4]
    assert rig.tokens() == {"a": solo_tokens((1, 2), 6)}


def test_an_idle_loop_answers_at_once_and_without_a_cache_refuses() -> None:
    rig = Rig(None, VerifyCache(request_id="v"), ResizeCache(generation=1, slots_count=3))
    rig.source.put(Shutdown(drain=False))
    assert rig.loop.run() == 0
    assert [answer.error_message for answer in rig.link.answers] == [
        "this engine has no expert cache: backend cpu"
    ] * 2


def test_a_request_ends_a_measurement_and_is_served() -> None:
    def endless() -> Slices:
        slices = 0
        while True:
            slices += 1
            if slices == 3:
                rig.source.put(request("a", [5], max_new_tokens=2))
            yield Figure(name=FigureName.HOST_READ, value=1e9)

    sent: list[BandwidthMessage] = []

    def note(message: BandwidthMessage) -> None:
        sent.append(message)

    bandwidth = BandwidthCommands(
        BandwidthParts(parts={"memory": endless}), send=note, log=logs.logger("freetokend.test")
    )
    rig = Rig(None, MeasureBandwidth(run_id="r", limit_s=60.0), bandwidth=bandwidth)
    rig.link.on_report = lambda report: (
        rig.source.put(Shutdown(drain=False)) if rig.ends() else None
    )
    assert rig.loop.run() == 0
    measured = sent[-1]
    assert isinstance(measured, BandwidthMeasured)
    assert measured.interrupted == "a request came"
    # the slice during which it came was the last one
    assert len(measured.figures) == 3
    assert rig.ends()["a"].finish_reason is FinishReason.LENGTH


def test_what_is_done_beside_goes_on_between_steps_and_while_nothing_is_asked() -> None:
    """Once per turn while steps are computed; to its end while the loop would wait."""
    seen: list[int] = []
    stop_at = 9

    def beside() -> bool:
        seen.append(len(rig.link.reports))
        if len(seen) == stop_at:
            rig.source.put(Shutdown(drain=False))
        return len(seen) < stop_at

    rig = Rig(None, request("a", [5], max_new_tokens=3), beside=beside)
    assert rig.loop.run() == 0
    assert len(seen) == stop_at
    assert seen[:4] == [0, 1, 2, 3]
    assert len(rig.link.reports) <= 5
