"""A pool that is pinned while it is served from: the CPU first, then one layer after the other."""

from __future__ import annotations

import logging

import pytest

from freetokend.core import logs
from freetokend.enginehost.process import _pinning
from freetokend.experts.gpu.device_cache import DeviceCache
from freetokend.ftw.reader import FtwDirectory
from tests.enginehost.cpu_platform import CpuPlatform, engine_on
from tests.enginehost.local_engine import Served, ask, serve, step

PROMPT = [1, 5, 9, 2, 7]
SIZES: dict[str, int | str] = {
    "backend": "hybrid",
    "slots_count": 10,
    "max_context_tokens": 128,
    "max_running_count": 4,
    "kv_bytes": 1 << 20,
}


def test_layers_become_fillable_one_by_one_without_a_new_graph(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, **SIZES) as built:
        expected = serve(built, [ask("a", PROMPT, 24)]).tokens["a"]
    platform = CpuPlatform()
    with engine_on(platform, deep, late=True, **SIZES) as built:
        cache = built.cache
        assert isinstance(cache, DeviceCache)
        assert built.pinning is cache
        assert sum(cache.fillable) == 1
        pinned_bytes = [cache.pinned_bytes]
        assert serve(built, [ask("b", PROMPT, 24)]).tokens["b"] == expected
        layers = cache.counters().layers
        assert layers[0].fills_count > 0
        assert [layer.fills_count for layer in layers[1:]] == [0, 0, 0]
        assert all(layer.cpu_count for layer in layers[1:])
        captures = platform.backend.captures_count
        assert captures > 0
        seen = set()
        served = Served()
        built.scheduler.submit(ask("a", PROMPT, 24))
        while cache.pin():
            seen.add(cache.fillable)
            pinned_bytes.append(cache.pinned_bytes)
            step(built, served)
        while step(built, served):
            pass
        assert served.tokens["a"] == expected
        assert serve(built, [ask("c", PROMPT, 24)]).tokens["c"] == expected
        assert all(cache.fillable)
        assert {sum(flags) for flags in seen} >= {1, 2, 3}
        assert pinned_bytes == sorted(set(pinned_bytes))
        assert all(layer.fills_count for layer in cache.counters().layers)
        assert platform.backend.captures_count == captures
        assert (cache.pin(), cache.pin_note) == (False, "")
        cache.check_integrity()


def test_what_stays_pageable_is_told_and_runs_on_the_cpu(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, **SIZES) as built:
        expected = serve(built, [ask("a", PROMPT, 24)]).tokens["a"]
    with engine_on(CpuPlatform(pinned_share=0.7), deep, **SIZES) as built:
        cache = built.cache
        assert isinstance(cache, DeviceCache)
        count = sum(cache.fillable)
        assert 0 < count < 4
        assert cache.pin_note == (
            f"{count} of 4 layers are pinned, and the CPU executes the others: the rest stays "
            "pageable"
        )
        assert serve(built, [ask("a", PROMPT, 24)]).tokens["a"] == expected
        fills = [layer.fills_count > 0 for layer in cache.counters().layers]
        assert fills == [at < count for at in range(4)]


def test_a_layer_that_the_cpu_is_to_execute_stays_so(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, layers="1=cpu", **SIZES) as built:
        assert isinstance(built.cache, DeviceCache)
        assert built.cache.fillable == (True, False, True, True)


def test_nothing_is_pinned_while_layers_of_a_sweep_are_held(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, late=True, **(SIZES | {"slots_count": 20})) as built:
        cache = built.cache
        assert isinstance(cache, DeviceCache)
        cache.prefetch(0)
        before = cache.pinned_bytes
        assert [cache.pin() for _ in range(3)] == [True] * 3
        assert cache.pinned_bytes == before
        cache.let_go()
        cache.pin()
        assert cache.pinned_bytes > before


@pytest.mark.parametrize(("share", "level"), [(1.0, logging.INFO), (0.5, logging.WARNING)])
def test_the_journal_says_what_became_of_it(
    deep: FtwDirectory, caplog: pytest.LogCaptureFixture, share: float, level: int
) -> None:
    platform = CpuPlatform(pinned_share=share)
    # what other tests left of the log's level does not matter
    listening = caplog.at_level(logging.INFO, "freetokend")
    with engine_on(platform, deep, late=True, **SIZES) as built, listening:
        pin = _pinning(built, logs.logger("freetokend.test"))
        while pin():
            pass
        told = [record for record in caplog.records if "pool-registered" in record.getMessage()]
        assert [record.levelno for record in told] == [level]
