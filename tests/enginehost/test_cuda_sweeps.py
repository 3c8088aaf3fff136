"""Prompts that stream whole layers through the slots of a GPU, on one that copies late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from freetokend.enginehost.built import BuiltEngine
from freetokend.experts.gpu.device_cache import DeviceCache
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import GenerateRequest
from tests.enginehost.broken_sweeps import serve_after_failure, serve_given_up, sweeping, whole
from tests.enginehost.cells import serve_swept
from tests.enginehost.cpu_platform import CpuPlatform, engine_on
from tests.enginehost.local_engine import ask, serve

# Of four MoE layers with eight experts.
EXPERTS, ALL_SLOTS, TWO_LAYERS = 8, 32, 16
PROMPTS = tuple(
    tuple(range(start, start + length)) for start, length in ((3, 40), (40, 45), (9, 20), (70, 50))
)


def requests() -> tuple[list[GenerateRequest], list[GenerateRequest]]:
    """Two that decode and four prompts."""
    running = [ask(f"d{index}", range(10 * index, 10 * index + 7), 16) for index in range(2)]
    return running, [ask(f"p{index}", prompt, 5) for index, prompt in enumerate(PROMPTS)]


@contextmanager
def cuda_engine(
    deep: FtwDirectory, backend: str, *, pinned_share: float = 1.0, **more: int | str
) -> Iterator[tuple[BuiltEngine, DeviceCache]]:
    given: dict[str, int | str] = {
        "max_context_tokens": 96,
        "max_running_count": 6,
        "kv_bytes": 4 << 20,
        "slots_count": 20,
        "step_tokens": 32,  # so that a layer of a sweep is computed in parts
        "sweep_tokens": 120,
        "backend": backend,
        **more,
    }
    with engine_on(CpuPlatform(pinned_share=pinned_share), deep, **given) as built:
        assert isinstance(built.cache, DeviceCache)
        yield built, built.cache


@pytest.fixture(scope="module")
def expected(deep: FtwDirectory) -> dict[str, list[int]]:
    """By steps alone."""
    with cuda_engine(deep, "hybrid") as (built, _):
        running, prompts = requests()
        return dict(serve(built, [*running, *prompts]).tokens)


@pytest.mark.parametrize("backend", ["hybrid", "offload"])
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((2, *range(15, 19), ALL_SLOTS), id="few"),
        pytest.param(range(2, ALL_SLOTS + 1), id="every", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_steps_for_every_number_of_slots(
    deep: FtwDirectory, expected: dict[str, list[int]], backend: str, counts: Sequence[int]
) -> None:
    beside_steps = 0 if backend == "hybrid" else 2
    with cuda_engine(deep, backend) as (built, cache):
        for slots_count in counts:
            cache.resize(slots_count)
            has_room = slots_count >= TWO_LAYERS + beside_steps
            assert cache.can_sweep is has_room
            before = cache.counters().streamed_count
            served, sweeps = serve_swept(built, *requests(), steps_between=slots_count % 3)
            assert served.tokens == expected
            assert sweeps == 2
            if slots_count < ALL_SLOTS:
                assert (cache.counters().streamed_count > before) is has_room
            assert built.allocator.used_count == 0
            whole(cache)


def test_what_lies_in_slots_is_not_streamed_again(deep: FtwDirectory) -> None:
    with cuda_engine(deep, "offload", slots_count=ALL_SLOTS) as (built, cache):
        serve_swept(built, *requests())
        assert cache.counters().resident_count == ALL_SLOTS
        assert cache.counters().streamed_count <= ALL_SLOTS
        before = cache.counters()
        served, _ = serve_swept(built, [], [ask("again", PROMPTS[0], 4)])
        assert len(served.tokens["again"]) == 4
        now = cache.counters()
        assert (now.streamed_count, now.fills_count) == (before.streamed_count, before.fills_count)
        assert built.expert_executions() > 0


@pytest.mark.parametrize("backend", ["hybrid", "offload"])
@pytest.mark.parametrize("steps_between", [0, 2])
def test_resizes_between_two_layers_change_no_token(
    deep: FtwDirectory, expected: dict[str, list[int]], backend: str, steps_between: int
) -> None:
    with cuda_engine(deep, backend) as (built, cache):
        sizes = iter((17, ALL_SLOTS, 2, 20, 18, 3, 31, 16))

        def resize(_: int) -> None:
            cache.resize(next(sizes, 24))
            whole(cache)

        served, _ = serve_swept(built, *requests(), between=resize, steps_between=steps_between)
        assert served.tokens == expected
        whole(cache)


def test_layers_that_are_not_pinned_run_on_the_cpu_in_a_sweep_too(
    deep: FtwDirectory, expected: dict[str, list[int]]
) -> None:
    for share in (0.0, 0.6):
        with cuda_engine(deep, "hybrid", pinned_share=share) as (built, cache):
            assert cache.can_sweep is (share > 0)
            served, _ = serve_swept(built, *requests())
            assert served.tokens == expected
            whole(cache)


def test_one_given_up_in_the_middle_is_computed_again(
    deep: FtwDirectory, expected: dict[str, list[int]]
) -> None:
    with cuda_engine(deep, "offload") as (built, cache):
        running, prompts = requests()
        served = serve_given_up(built, [*running, *prompts], cache, least_slots=2)
        assert served.tokens == expected


def test_one_that_fails_holds_nothing_and_the_next_is_right(
    deep: FtwDirectory, expected: dict[str, list[int]]
) -> None:
    with cuda_engine(deep, "hybrid", sweep_tokens=300) as (built, cache):
        _, prompts = requests()
        error = pytest.raises((IndexError, RuntimeError))
        served = serve_after_failure(built, prompts, cache, error)
        assert served.tokens == {one.request_id: expected[one.request_id] for one in prompts}
        whole(cache)


def test_where_sweeps_begin_is_found_by_what_is_measured(deep: FtwDirectory) -> None:
    with cuda_engine(deep, "hybrid", slots_count=18) as (built, cache):
        from_tokens = sweeping(built).sweep_from_tokens
        assert 0 <= from_tokens <= 120
        cache.resize(TWO_LAYERS - 1)
        assert sweeping(built).sweep_from_tokens == 0
        cache.resize(18)
        assert sweeping(built).sweep_from_tokens == from_tokens
    with cuda_engine(deep, "hybrid", slots_count=4) as (built, cache):
        assert sweeping(built).sweep_from_tokens == 0
        assert cache.counters().streamed_count == 0
        cache.resize(TWO_LAYERS)  # has its kernels compiled before there is a prompt
        # But for what the proof has left there.
        streamed_count = cache.counters().streamed_count
        assert 0 < streamed_count <= EXPERTS
        cache.resize(4)
        cache.resize(TWO_LAYERS)
        assert cache.counters().streamed_count == streamed_count
    with cuda_engine(deep, "hybrid", slots_count=ALL_SLOTS) as (built, _):
        assert sweeping(built).sweep_from_tokens == 0  # everything has its slot
