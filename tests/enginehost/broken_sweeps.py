"""Sweeps that do not come to their end, on an engine of any device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from freetokend.engine.work import StepWork, SweepEngine
from freetokend.enginehost.built import BuiltEngine
from freetokend.experts.slot_checks import VerifyReport
from freetokend.experts.slot_pool import ResizeResult
from freetokend.link.messages import GenerateRequest
from tests.enginehost.local_engine import Served, step


class Cache(Protocol):
    """What is the same of the caches of all devices."""

    def resize(self, slots_count: int) -> ResizeResult: ...

    def check_integrity(self) -> None: ...

    def verify(self) -> VerifyReport: ...


def whole(cache: Cache) -> None:
    """Nothing is where it should not be, and every byte is the pool's."""
    cache.check_integrity()
    assert cache.verify().differences == ()


def sweeping(built: BuiltEngine) -> SweepEngine:
    """The engine, which can sweep."""
    assert isinstance(built.engine, SweepEngine)
    return built.engine


def serve_given_up(
    built: BuiltEngine, requests: Sequence[GenerateRequest], cache: Cache, *, least_slots: int
) -> Served:
    """Give sweeps up at once, after one layer and after three; then serve all by steps.

    After each nothing may be held: the cache can shrink to `least_slots`.
    """
    served = Served()
    for request in requests:
        built.scheduler.submit(request)
    for advances in (0, 1, 3):
        built.scheduler.set_sweep_from(2)
        work = built.scheduler.plan_sweep()
        assert work is not None
        sweep = sweeping(built).begin_sweep(work)
        for _ in range(advances):
            assert sweep.advance() is None
            step(built, served)
        sweep.abandon()
        built.scheduler.sweep_abandoned()
        built.scheduler.check_integrity()
        whole(cache)
        cache.resize(least_slots)
        cache.resize(20)
    return _finish(built, served)


def serve_after_failure(
    built: BuiltEngine,
    prompts: Sequence[GenerateRequest],
    cache: Cache,
    error: AbstractContextManager[object],
) -> Served:
    """A sweep that fails in its first layer, then the same one well."""
    for request in prompts:
        built.scheduler.submit(request)
    built.scheduler.set_sweep_from(2)
    work = built.scheduler.plan_sweep()
    assert work is not None
    sweep = sweeping(built).begin_sweep(_broken(work))
    with error:
        sweep.advance()
    cache.resize(0)
    cache.resize(20)
    whole(cache)
    sweep = sweeping(built).begin_sweep(work)
    while (outcome := sweep.advance()) is None:
        pass
    built.scheduler.commit_sweep(outcome)
    return _finish(built, Served())


def _finish(built: BuiltEngine, served: Served) -> Served:
    while step(built, served):
        pass
    served.take(built.scheduler.take_updates())
    return served


def _broken(work: StepWork) -> StepWork:
    """The same with pages that do not exist."""
    return StepWork(
        sequences=tuple(
            replace(one, pages=array("i", [1 << 20] * len(one.pages))) for one in work.sequences
        )
    )
