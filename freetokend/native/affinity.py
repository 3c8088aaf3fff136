"""Which cpus the calling thread runs on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from freetokend.core.errors import ConfigError


@contextmanager
def pinned_thread(cpu: int) -> Iterator[None]:
    """The calling thread on one cpu: an executor pins its other threads, not this one.

    Threads that it starts inside inherit that. OSError where the process may not use the cpu.
    """
    thread_id = threading.get_native_id()
    before = os.sched_getaffinity(thread_id)
    os.sched_setaffinity(thread_id, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(thread_id, before)


def require_usable(cpus: Iterable[int]) -> None:
    """ConfigError for a cpu that this process may not use (absent, offline, not of its cgroup)."""
    for cpu in sorted(set(cpus)):
        try:
            with pinned_thread(cpu):
                pass
        except OSError as error:
            raise ConfigError(
                f"cpu {cpu} is not one that this process may use ({error.strerror}). "
                "Choose others, or widen the service's AllowedCPUs."
            ) from error
