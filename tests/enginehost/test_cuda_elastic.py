"""KV pages, sleep and wake of an engine as on a GPU, whose captured steps stay good throughout."""

from __future__ import annotations

import itertools

import pytest

from freetokend.core.errors import ResourceError
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.kv_control import KvControl
from freetokend.enginehost.probe import TokenProbe
from freetokend.enginehost.resizing import resize, sizes_of
from freetokend.enginehost.sleeping import ElasticSleeper
from freetokend.experts.gpu.device_cache import DeviceCache
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import ResizeOutcome
from tests.enginehost.cpu_platform import CpuPlatform, engine_on
from tests.enginehost.local_engine import Served, ask, serve, step

PROMPTS = ([1, 5, 9, 2, 7], [3, 3, 8], [4, 1, 1, 6, 2, 9, 5, 7, 8, 2, 1, 3])
NEW_TOKENS = 40
SIZES: dict[str, int | str] = {
    "max_context_tokens": 256,
    "max_running_count": 4,
    "kv_bytes": 1 << 20,
}


def parts(built: BuiltEngine) -> tuple[DeviceCache, KvControl]:
    assert isinstance(built.cache, DeviceCache)
    assert built.kv is not None
    return built.cache, built.kv


def tokens(built: BuiltEngine) -> dict[str, list[int]]:
    requests = [ask(str(at), prompt, NEW_TOKENS) for at, prompt in enumerate(PROMPTS)]
    return dict(serve(built, requests, steps_between=2).tokens)


@pytest.mark.parametrize("backend", ["hybrid", "offload"])
def test_pages_and_slots_change_between_any_two_steps(deep: FtwDirectory, backend: str) -> None:
    with engine_on(CpuPlatform(), deep, backend=backend, slots_count=8, **SIZES) as built:
        expected = tokens(built)
        cache, kv = parts(built)
        assert kv.capacity_count > kv.pages_count
        pages = itertools.cycle((20, 3, 32, 9, 5))
        slots = itertools.cycle((8, 24, 3, 16))
        served, outcomes = Served(), set()
        for at, prompt in enumerate(PROMPTS):
            built.scheduler.submit(ask(str(at), prompt, NEW_TOKENS))
        while step(built, served):
            answer = resize(
                cache, kv, generation=1, slots_count=next(slots), kv_pages_count=next(pages)
            )
            outcomes.add(answer.outcome)
            cache.check_integrity()
        assert dict(served.tokens) == expected
        assert ResizeOutcome.DONE in outcomes
        memory = kv.pages_count + 1  # of padding
        assert kv.committed_bytes == memory * deep_page_bytes(built)


def deep_page_bytes(built: BuiltEngine) -> int:
    assert built.memory is not None
    return built.memory.kv_page_bytes


@pytest.mark.parametrize("backend", ["hybrid", "offload"])
def test_it_sleeps_and_wakes_with_its_graphs(deep: FtwDirectory, backend: str) -> None:
    platform = CpuPlatform()
    with engine_on(platform, deep, backend=backend, slots_count=8, **SIZES) as built:
        expected = tokens(built)
        cache, kv = parts(built)
        captures_count = platform.backend.captures_count
        computed: list[float] = []
        probe = TokenProbe(built.engine, built.allocator, 1)
        sleeper = ElasticSleeper(
            cache, kv, built.scheduler, lambda: computed.append(probe.run()), built.trim
        )
        for _ in range(2):
            sleeper.release()
            assert platform.is_released
            now = sizes_of(cache, kv)
            assert (now.slots_bytes, now.kv_pages_count, now.kv_bytes) == (0, 0, 0)
            if backend == "offload":
                with pytest.raises(ResourceError, match="needs 2 slots or more, not 1"):
                    sleeper.acquire(1, 16)
                assert sizes_of(cache, kv) == now
            sleeper.acquire(5, 16)
            assert tokens(built) == expected
        assert len(computed) == 2, "a token was computed each time before it counted as awake"
        assert platform.backend.captures_count == captures_count
