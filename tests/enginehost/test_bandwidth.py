"""Measuring bandwidths in slices: what is measured, and that a request ends it."""

from __future__ import annotations

import os
import queue
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from freetokend.core.errors import Reason
from freetokend.core.logs import logger
from freetokend.enginehost.bandwidth_control import (
    BandwidthCommands,
    BandwidthParts,
    NotMeasurableError,
    Slices,
)
from freetokend.enginehost.bandwidth_parts import MeasuredMachine, bandwidth_parts
from freetokend.link.bandwidth_messages import (
    BandwidthMeasured,
    BandwidthMessage,
    BandwidthProgress,
    MeasureBandwidth,
)
from freetokend.policy.bandwidth_profile import Figure, FigureName
from tests.experts.cache_rig import record_bank

LINK_BYTES_PER_S = 20e6
CPUS = tuple(sorted(os.sched_getaffinity(0))[:2])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def commands(
    parts: dict[str, Callable[[], Slices]], clock: Callable[[], float] = time.monotonic
) -> tuple[BandwidthCommands, list[BandwidthMessage]]:
    sent: list[BandwidthMessage] = []
    made = BandwidthCommands(
        BandwidthParts(parts=parts), send=sent.append, log=logger(__name__), clock=clock
    )
    return made, sent


def run(made: BandwidthCommands) -> None:
    slices_count = 0
    while made.is_busy:
        made.slice()
        slices_count += 1
        assert slices_count < 10_000


def figure(value: float, name: FigureName = FigureName.HOST_READ) -> Figure:
    return Figure(name=name, value=value)


def a_part() -> Slices:
    yield None
    yield figure(5e9)


def endless() -> Slices:
    while True:
        yield figure(1e9)


def broken() -> Slices:
    yield None
    raise ZeroDivisionError("no such thing")


def absent() -> Slices:
    yield from ()
    raise NotMeasurableError("there is no disk")


def test_parts_are_told_and_measured_in_their_order() -> None:
    made, sent = commands({"one": a_part, "two": a_part, "three": a_part})
    made.take(MeasureBandwidth(run_id="r", parts=("three", "one")), idle=True)
    run(made)
    *progress, measured = sent
    assert progress == [BandwidthProgress(run_id="r", part=part) for part in ("one", "three")]
    assert isinstance(measured, BandwidthMeasured)
    assert measured.figures == (figure(5e9), figure(5e9))
    assert measured.interrupted == ""
    assert measured.parts_left == ()


def test_a_part_that_fails_is_noted_and_the_others_go_on() -> None:
    made, sent = commands({"broken": broken, "absent": absent, "one": a_part})
    made.take(MeasureBandwidth(run_id="r"), idle=True)
    run(made)
    measured = sent[-1]
    assert isinstance(measured, BandwidthMeasured)
    assert measured.notes == (
        "broken: ZeroDivisionError: no such thing",
        "absent: there is no disk",
    )
    assert measured.figures == (figure(5e9),)


def test_a_request_ends_it_with_what_was_measured_and_gives_back_what_it_held() -> None:
    closed: list[bool] = []

    def held() -> Slices:
        try:
            yield figure(2e9)
            yield None
        finally:
            closed.append(True)

    made, sent = commands({"held": held, "later": a_part})
    made.take(MeasureBandwidth(run_id="r"), idle=True)
    made.slice()
    made.interrupt("a request came")
    assert closed == [True]
    assert not made.is_busy
    measured = sent[-1]
    assert isinstance(measured, BandwidthMeasured)
    assert measured.interrupted == "a request came"
    assert measured.figures == (figure(2e9),)
    assert measured.parts_left == ("held", "later")


def test_it_ends_at_its_limit() -> None:
    clock = Clock()

    def slow() -> Slices:
        while True:
            clock.now_s += 0.5
            yield None

    made, sent = commands({"slow": slow}, clock)
    made.take(MeasureBandwidth(run_id="r", limit_s=2.0), idle=True)
    run(made)
    measured = sent[-1]
    assert isinstance(measured, BandwidthMeasured)
    assert "limit of 2 s" in measured.interrupted
    assert measured.duration_s == 2.0


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (MeasureBandwidth(run_id="x", parts=("no",)), Reason.INVALID_REQUEST),
        (MeasureBandwidth(run_id="x", limit_s=0.0), Reason.INVALID_REQUEST),
        (MeasureBandwidth(run_id="x", limit_s=float("nan")), Reason.INVALID_REQUEST),
        (MeasureBandwidth(run_id="x", limit_s=1e9), Reason.INVALID_REQUEST),
        (MeasureBandwidth(run_id="x"), Reason.QUEUE_FULL),
    ],
)
def test_what_cannot_begin_is_refused(command: MeasureBandwidth, reason: Reason) -> None:
    made, sent = commands({"endless": endless})
    made.take(MeasureBandwidth(run_id="r"), idle=True)
    made.take(command, idle=True)
    assert isinstance(sent[-1], BandwidthMeasured)
    assert (sent[-1].run_id, sent[-1].error_reason) == ("x", reason)
    assert made.is_busy


def test_while_somebody_is_served_nothing_is_measured() -> None:
    made, sent = commands({"endless": endless})
    made.take(MeasureBandwidth(run_id="r"), idle=False)
    assert not made.is_busy
    assert isinstance(sent[-1], BandwidthMeasured)
    assert sent[-1].interrupted == "requests are being served"


def test_the_host_device_is_measured_with_its_own_experts(tmp_path: Path) -> None:
    bank = record_bank(layers=3, experts=8)
    file = tmp_path / "model.ftw"
    file.write_bytes(b"\1" * (5 << 20))
    machine = MeasuredMachine(
        mapped=bank.mapped,
        region_bytes=len(bank.memory),
        cpus=CPUS,
        numerics="exact",
        link_bytes_per_s=LINK_BYTES_PER_S,
        fills=True,
        file=file,
    )
    made, sent = commands(dict(bandwidth_parts(machine).parts))
    made.take(MeasureBandwidth(run_id="r", limit_s=60.0), idle=True)
    took_s = []
    while made.is_busy:
        began_s = time.perf_counter()
        made.slice()
        took_s.append(time.perf_counter() - began_s)
    measured = sent[-1]
    assert isinstance(measured, BandwidthMeasured)
    assert measured.interrupted == ""
    found = {(one.name, one.threads_count): one.value for one in measured.figures}
    names = {name for name, _ in found}
    expected = set(FigureName) - {FigureName.FILL_PAGEABLE, FigureName.DISK_READ}
    # a file system in memory cannot be read directly, and a note says so
    assert expected <= names
    assert (FigureName.DISK_READ in names) != bool(measured.notes)
    assert {threads for name, threads in found if name is FigureName.CPU} == set(
        range(1, len(CPUS) + 1)
    )
    # the link keeps to its rate whatever the machine does
    assert found[FigureName.FILL, 0] <= 1.3 * LINK_BYTES_PER_S
    assert found[FigureName.FILL_BESIDE, 0] <= 1.05 * LINK_BYTES_PER_S
    # a busy machine may hold up single slices
    assert statistics.median(took_s) < 0.025
    assert queue.SimpleQueue().empty()
