"""A real engine in this process: tiny checkpoint -> FTW -> pool -> built engine, no link."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from freetokend.core.host_facts import HostMemory
from freetokend.enginehost.attach import AttachedPool, attach_pool
from freetokend.enginehost.build import build_engine
from freetokend.enginehost.built import BuiltEngine
from freetokend.ftw.convert import convert
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import EngineSettings, GenerateRequest, Sampling, SequenceUpdate
from freetokend.native.lifeline import ReceivedPool
from freetokend.native.pool import create_pool_file

CONTEXT_TOKENS = 16_384  # of the tiny models here
PLENTY = HostMemory(mem_available_bytes=8 << 30)


def converted(source: Path, target: Path) -> FtwDirectory:
    convert(source, target, progress=lambda _: None)
    return FtwDirectory(target)


@contextmanager
def new_pool(directory: FtwDirectory) -> Iterator[ReceivedPool]:
    index = directory.index
    pool = create_pool_file("freetoken-pool-test", index.region_bytes, index.identity)
    try:
        yield ReceivedPool(name=pool.name, length_bytes=pool.length_bytes, fd=pool.fd)
    finally:
        os.close(pool.fd)


def attach(
    pool: ReceivedPool,
    directory: FtwDirectory,
    memory: HostMemory = PLENTY,
    nodes: tuple[int, ...] = (),
) -> AttachedPool:
    return attach_pool(
        pool,
        directory,
        memory,
        progress=lambda _done, _total: None,
        cancel=threading.Event(),
        nodes=nodes,
    )


@contextmanager
def local_engine(
    directory: FtwDirectory, *, threads_count: int = 2, **settings: int | str
) -> Iterator[BuiltEngine]:
    """A built engine over a pool of its own; nothing of it may be used afterwards."""
    cpus = tuple(sorted(os.sched_getaffinity(0))[:threads_count])
    with new_pool(directory) as pool:
        attached = attach(pool, directory)
        with attached.mapping as mapping:
            built = build_engine(
                directory,
                mapping.region_address,
                EngineSettings(model="tiny", **settings),  # type: ignore[arg-type]
                cpus,
                PLENTY,
            )
            try:
                yield built
            finally:
                if built.cache is not None:
                    built.cache.close()


def ask(
    request_id: str,
    prompt: Iterable[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    ignore_eos: bool = True,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(temperature=0.0),
        ignore_eos=ignore_eos,
    )


class Served:
    """What the requests of one run got."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, SequenceUpdate] = {}

    def take(self, updates: Iterable[SequenceUpdate]) -> None:
        for update in updates:
            self.tokens[update.request_id].extend(update.token_ids)
            if update.finish_reason is not None:
                assert update.request_id not in self.ends
                self.ends[update.request_id] = update


def step(built: BuiltEngine, served: Served) -> bool:
    """One step; False when there was nothing to do."""
    work = built.scheduler.plan()
    if work is None:
        return False
    built.scheduler.commit(built.engine.run(work))
    built.scheduler.check_integrity()
    served.take(built.scheduler.take_updates())
    return True


def serve(
    built: BuiltEngine, requests: Iterable[GenerateRequest], *, steps_between: int = 0
) -> Served:
    """Submit (with so many steps between two arrivals) and run until all are answered."""
    served = Served()
    for request in requests:
        built.scheduler.submit(request)
        for _ in range(steps_between):
            step(built, served)
    while step(built, served):
        pass
    served.take(built.scheduler.take_updates())
    return served
