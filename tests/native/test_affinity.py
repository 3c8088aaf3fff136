"""Threads are where they are said to be, or nothing starts."""

from __future__ import annotations

import os
import threading

import pytest

from freetokend.core.errors import ConfigError
from freetokend.native.affinity import pinned_thread, require_usable
from freetokend.native.executor import Executor

CPUS = sorted(os.sched_getaffinity(0))


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def test_every_worker_is_on_its_cpu_and_the_caller_where_it_was() -> None:
    before, mine = threads(), os.sched_getaffinity(0)
    wanted = [CPUS[0], CPUS[-1], CPUS[0]]
    with Executor(wanted):
        found = [os.sched_getaffinity(thread) for thread in sorted(threads() - before)]
    assert found == [{cpu} for cpu in wanted[1:]]
    assert os.sched_getaffinity(0) == mine


def test_a_thread_is_pinned_inside_and_free_again_outside() -> None:
    mine = os.sched_getaffinity(threading.get_native_id())

    def fail_inside() -> None:
        with pinned_thread(CPUS[-1]):
            assert os.sched_getaffinity(threading.get_native_id()) == {CPUS[-1]}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert os.sched_getaffinity(threading.get_native_id()) == mine


def test_a_cpu_that_cannot_be_had_is_refused() -> None:
    absent = 1000
    mine = os.sched_getaffinity(0)
    for make in (lambda: require_usable([CPUS[0], absent]), lambda: Executor([CPUS[0], absent])):
        with pytest.raises(ConfigError, match=f"cpu {absent} is not one that this process may use"):
            make()
    assert os.sched_getaffinity(0) == mine
    with pinned_thread(CPUS[0]):  # what the thread has at the moment says nothing
        require_usable(CPUS)
