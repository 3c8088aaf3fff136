"""Sweeps of the real engine: many prompts at once, given up, failed, and begun again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freetokend.core.errors import FreetokenError
from freetokend.experts.cache import ExpertCache
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import GenerateRequest
from tests.enginehost.broken_sweeps import serve_after_failure, serve_given_up, whole
from tests.enginehost.cells import Pinned, Shaped, Split, serve_swept, shaped_engine
from tests.enginehost.local_engine import ask, local_engine, serve

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
    running, prompts = requests()
    served = serve_given_up(shaped.built, [*running, *prompts], shaped.cache, least_slots=0)
    assert served.tokens == expected


def test_one_that_fails_holds_nothing_and_the_next_is_right(
    shaped: Shaped, expected: dict[str, list[int]]
) -> None:
    _, prompts = requests()
    error = pytest.raises(FreetokenError, match="page")
    served = serve_after_failure(shaped.built, prompts, shaped.cache, error)
    assert served.tokens == {one.request_id: expected[one.request_id] for one in prompts}
