"""A host function or a doorbell: the quicker one, and a doorbell only where it works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.enginehost.cpu_start import choose_start
from tests.experts.gpu.immediate import Forked, ImmediateDriver
from tests.support.recorded_graphs import RepeatingBackend

FUNCTION_S = 30e-6


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Bell:
    """A doorbell that takes so long, or fails when it is asked for."""

    def __init__(self, clock: Clock, call_s: float, failure: str = "") -> None:
        self._clock, self._call_s, self._failure = clock, call_s, failure
        self.in_step = False

    def begin_step(self) -> None:
        self.in_step = True

    def call(self, moe_layer_index: int, stream: Any) -> None:
        assert self.in_step
        self._clock.advance(self._call_s)

    def end_step(self) -> None:
        self.in_step = False
        if self._failure:
            raise InternalError(self._failure)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def forked(clock: Clock) -> Iterator[Forked]:
    one = Forked.begin(ImmediateDriver(before_function=lambda: clock.advance(FUNCTION_S)))
    yield one
    one.end()


@pytest.mark.parametrize(
    ("bell_us", "failure", "chosen", "reason"),
    [
        (12, "", True, "a doorbell (12 µs a layer; a host function takes 30)"),
        (31, "", False, "a host function (30 µs a layer; a doorbell takes 31)"),
        (12, "too late", False, "a host function (30 µs a layer; a doorbell failed: too late)"),
    ],
)
def test_the_quicker_way_is_chosen(
    clock: Clock, forked: Forked, bell_us: int, failure: str, *, chosen: bool, reason: str
) -> None:
    bell = Bell(clock, bell_us * 1e-6, failure)
    told = choose_start(
        forked.fork,
        bell,
        forked.buffers,
        RepeatingBackend(),
        torch.device("cpu"),
        lambda: None,
        clock,
    )
    assert told == reason
    assert forked.fork.doorbell is (bell if chosen else None)
    assert not bell.in_step
    assert forked.branch.executions_count == 0
