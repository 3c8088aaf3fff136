"""Sweeps of the real engine: many prompts at once, given up, failed, and begun again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from freetokend.core.errors import FreetokenError
from freetokend.engine.work import StepWork, SweepEngine
from freetokend.enginehost.built import BuiltEngine
from freetokend.experts.cache import ExpertCache
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import GenerateRequest
from tests.enginehost.cells import Pinned, Shaped, Split, serve_swept, shaped_engine
from tests.enginehost.local_engine import Served, ask, local_engine, serve, step

PROMPTS = tuple(
    tuple(range(start, start + length))
    for start, length in ((3, 130), (40, 64), (9, 33), (70, 200))
)


def requests() -> tuple[list[GenerateRequest], list[GenerateRequest]]:
    """Two that decode and four prompts."""
    running = [ask(f"d{index}", range(10 * index, 10 * index + 7), 80) for index in range(2)]
    return running, [ask(f"p{index}", prompt, 10) for index, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(deep: FtwDirectory) -> dict[str, list[int]]:
    """Each alone, without a cache."""
    with local_engine(deep, backend="cpu") as built:
        return {
            one.request_id: serve(built, [one]).tokens[one.request_id]
            for part in requests()
            for one in part
        }


@pytest.fixture
def shaped(deep: FtwDirectory) -> Iterator[Shaped]:
    with shaped_engine(deep, Pinned.ALL, Split.BOTH) as made:
        made.cache.resize(20)
        yield made


def whole(cache: ExpertCache) -> None:
    cache.check_integrity()
    assert cache.verify().differences == ()


def sweeping(built: BuiltEngine) -> SweepEngine:
    assert isinstance(built.engine, SweepEngine)
    return built.engine


@pytest.mark.parametrize("steps_between", [0, 1, 3])
def test_all_waiting_prompts_share_a_sweep_beside_steps(
    shaped: Shaped, expected: dict[str, list[int]], steps_between: int
) -> None:
    sizes = iter((17, 32, 16, 31))
    served, sweeps = serve_swept(
        shaped.built,
        *requests(),
        between=lambda _: whole_after_resize(shaped.cache, next(sizes)),
        steps_between=steps_between,
    )
    assert served.tokens == expected
    assert sweeps == 1
    assert shaped.built.allocator.used_count == 0
    whole(shaped.cache)


def whole_after_resize(cache: ExpertCache, slots_count: int) -> None:
    cache.resize(slots_count)
    whole(cache)


def test_a_prompt_longer_than_a_sweep_takes_several(
    deep: FtwDirectory, expected: dict[str, list[int]]
) -> None:
    with local_engine(
        deep, device="host", backend="offload", slots_count=16, sweep_tokens=100
    ) as built:
        served, sweeps = serve_swept(built, *requests())
        assert served.tokens == expected
        assert sweeps >= sum(map(len, PROMPTS)) // 100


def test_one_given_up_in_the_middle_is_computed_again(
    shaped: Shaped, expected: dict[str, list[int]]
) -> None:
    built, (running, prompts) = shaped.built, requests()
    served = Served()
    for request in (*running, *prompts):
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
        whole(shaped.cache)
        shaped.cache.resize(0)  # nothing is held: every slot can go
        shaped.cache.resize(20)
    while step(built, served):
        pass
    served.take(built.scheduler.take_updates())
    assert served.tokens == expected


def broken(work: StepWork) -> StepWork:
    """The same with pages that do not exist."""
    return StepWork(
        sequences=tuple(
            replace(one, pages=array("i", [1 << 20] * len(one.pages))) for one in work.sequences
        )
    )


def test_one_that_fails_holds_nothing_and_the_next_is_right(
    shaped: Shaped, expected: dict[str, list[int]]
) -> None:
    built, (_, prompts) = shaped.built, requests()
    for request in prompts:
        built.scheduler.submit(request)
    built.scheduler.set_sweep_from(2)
    work = built.scheduler.plan_sweep()
    assert work is not None
    sweep = sweeping(built).begin_sweep(broken(work))
    with pytest.raises(FreetokenError, match="page"):
        sweep.advance()
    shaped.cache.resize(0)
    shaped.cache.resize(20)
    whole(shaped.cache)
    sweep = sweeping(built).begin_sweep(work)
    while (outcome := sweep.advance()) is None:
        pass
    built.scheduler.commit_sweep(outcome)
    served = Served()
    while step(built, served):
        pass
    served.take(built.scheduler.take_updates())
    assert served.tokens == {one.request_id: expected[one.request_id] for one in prompts}
