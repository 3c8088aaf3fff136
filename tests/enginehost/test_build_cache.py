"""Settings become a cache: memory divided with the arithmetic, sizes honoured or refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freetokend.core.errors import ConfigError, Reason, ResourceError
from freetokend.core.host_facts import HostMemory
from freetokend.device.arena import ArenaError
from freetokend.device.host_arena import HostArena
from freetokend.enginehost import build_cache as build_module
from freetokend.enginehost.backend import BackendChoice
from freetokend.enginehost.build import KV_ELEMENT_BYTES, PAGE_TOKENS, read_model_facts
from freetokend.enginehost.build_cache import (
    CachedExperts,
    CacheInputs,
    build_cache,
    plan_host_device,
)
from freetokend.enginehost.kv_plan import kv_plan_of
from freetokend.experts import cache as cache_module
from freetokend.experts.bank import MappedBank
from freetokend.experts.fill import FillLink
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import EngineSettings
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvShape
from freetokend.policy.vram_budget import VramPlan
from tests.enginehost.local_engine import attach, new_pool

GIB, MIB = 1 << 30, 1 << 20
PLENTY = HostMemory(mem_available_bytes=8 * GIB)
WORKSPACE_BYTES = 10 * MIB
LOST = "others have it"
EXPERTS = 32  # of `deep`: 4 layers of 8, 2 per token
TOP_K, LAYER = 2, 8

New = Callable[..., CacheInputs]


@pytest.fixture(scope="module")
def base(deep: FtwDirectory) -> Iterator[CacheInputs]:
    with (
        new_pool(deep) as pool,
        Executor(sorted(os.sched_getaffinity(0))[:1]) as executor,
        attach(pool, deep).mapping as mapping,
    ):
        yield CacheInputs(
            mapped=MappedBank(bank=deep.index.expert_bank, region_address=mapping.region_address),
            facts=read_model_facts(deep),
            settings=EngineSettings(model="tiny"),
            executor=executor,
            numerics="exact",
            sweep_tokens=4096,
        )


@pytest.fixture
def new(base: CacheInputs) -> New:
    def inputs(**settings: Any) -> CacheInputs:
        return replace(base, settings=EngineSettings(model="tiny", device="host", **settings))

    return inputs


@pytest.fixture
def shape(base: CacheInputs) -> KvShape:
    return KvShape(
        layers_count=base.facts.layers_count,
        kv_heads_count=base.facts.kv_heads_count,
        head_size=base.facts.head_size,
        element_bytes=KV_ELEMENT_BYTES,
        page_tokens=PAGE_TOKENS,
    )


Plan = Callable[..., VramPlan]


@pytest.fixture
def plan(new: New, shape: KvShape) -> Plan:
    def planned(memory: HostMemory = PLENTY, **settings: Any) -> VramPlan:
        return plan_host_device(new(**settings), shape, WORKSPACE_BYTES, memory)

    return planned


def test_left_to_itself_it_holds_about_a_third_of_the_experts(
    plan: Plan, base: CacheInputs
) -> None:
    found = plan()
    assert int(0.37 * EXPERTS) <= found.slots_count <= EXPERTS
    assert found.servable_context_tokens == base.facts.max_context_tokens
    assert plan(slots_count=5).slots_count == 5


@pytest.mark.parametrize("slots_count", [1, TOP_K, TOP_K + 1, 16, EXPERTS])
def test_a_number_of_slots_is_met_exactly(plan: Plan, slots_count: int) -> None:
    assert plan(slots_count=slots_count).slots_count == slots_count
    assert plan(slots_count=slots_count, device_bytes=GIB).slots_count == slots_count


@pytest.mark.parametrize("slots_count", [EXPERTS + 1, 10_000])
def test_more_slots_than_experts_are_refused(plan: Plan, slots_count: int) -> None:
    with pytest.raises(ConfigError, match=f"{slots_count}.*{EXPERTS} experts") as caught:
        plan(slots_count=slots_count)
    assert caught.value.param == "engine.slots_count"


def test_slots_that_do_not_fit_are_refused_with_the_sum(plan: Plan, base: CacheInputs) -> None:
    record_bytes = base.bank.record_bytes
    device_bytes = 4 * MIB
    slots_count = EXPERTS
    assert slots_count * record_bytes <= device_bytes  # it is the KV beside them that is too much
    with pytest.raises(ConfigError, match="cannot be met") as caught:
        plan(device_bytes=device_bytes, slots_count=slots_count, kv_bytes=16 * MIB)
    message = caught.value.message
    assert "engine.slots_count = 32" in message
    assert "32 of 32 slots" in message
    assert f"engine.device_bytes = {device_bytes} is too little" in message
    assert caught.value.param == "engine.device_bytes"


def test_a_device_that_the_machine_has_no_memory_for_is_refused(plan: Plan) -> None:
    for memory in (
        HostMemory(mem_available_bytes=2 * GIB),
        HostMemory(mem_available_bytes=8 * GIB, cgroup_available_bytes=2 * GIB),
    ):
        with pytest.raises(ResourceError) as caught:
            plan(memory, device_bytes=2 * GIB)
        message = caught.value.message
        for number in ("2.00 GiB", "10.00 MiB", "0.75 GiB", "engine.device_bytes"):
            assert number in message, message
        assert caught.value.reason is Reason.HOST_MEMORY
    with pytest.raises(ResourceError):
        plan(HostMemory(mem_available_bytes=700 * MIB))
    assert plan(HostMemory(mem_available_bytes=2 * GIB), device_bytes=GIB).slots_count == EXPERTS


def test_more_memory_never_means_fewer_slots(plan: Plan) -> None:
    before = 0
    for device_mib in range(8, 40, 2):
        found = plan(device_bytes=device_mib * MIB, max_context_tokens=2048)
        assert found.slots_count >= before
        assert found.slots_bytes + found.kv_bytes <= device_mib * MIB
        before = found.slots_count
    assert before == EXPERTS


def test_presets_say_what_the_device_is_used_for(plan: Plan) -> None:
    minimum = plan(preset="minimum", device_bytes=GIB)
    assert minimum.slots_count == LAYER
    chat = plan(preset="chat", device_bytes=GIB)
    assert chat.slots_count == EXPERTS
    agent = plan(preset="agent", device_bytes=GIB)
    assert agent.slots_count >= 2 * LAYER
    assert minimum.kv_pages_count <= chat.kv_pages_count <= agent.kv_pages_count
    with pytest.raises(ConfigError, match='"agent"'):
        plan(preset="agent", device_bytes=2 * MIB)


@pytest.mark.parametrize("preset", ["minimum", "chat", "agent"])
def test_a_device_of_no_stated_size_has_room_for_every_preset(plan: Plan, preset: str) -> None:
    assert plan(preset=preset).slots_count >= LAYER
    found = plan(preset=preset, kv_bytes=16 * MIB)
    assert 0 <= 16 * MIB - found.kv_bytes < found.kv_bytes // found.kv_pages_count


def built(inputs: CacheInputs, planned: VramPlan) -> CachedExperts:
    made = build_cache(inputs, planned)
    assert isinstance(made, CachedExperts)
    made.cache.close()
    return made


@pytest.mark.parametrize("backend", ["offload", "hybrid"])
def test_a_cache_has_what_was_planned_and_says_so(new: New, plan: Plan, backend: str) -> None:
    inputs = new(backend=backend, slots_count=9, layers="1=cpu,3=fill")
    made = build_cache(inputs, plan(slots_count=9))
    assert isinstance(made, CachedExperts)
    try:
        counters = made.cache.counters()
        assert (counters.slots_count, counters.slots_capacity) == (9, EXPERTS)
        assert made.description.slots_count == 9
        usual = "fill" if backend == "offload" else "split"
        branches = [
            run.branch for run in made.description.layer_runs for _ in range(run.layers_count)
        ]
        assert [branch.value for branch in branches] == [usual, "cpu", usual, "fill"]
        assert all(run.reason for run in made.description.layer_runs)
        assert made.backend.backend == backend
        assert made.backend.reason
    finally:
        made.cache.close()


def test_fused_has_every_expert_from_the_start_or_is_refused(new: New, plan: Plan) -> None:
    made = build_cache(new(backend="fused"), plan(slots_count=EXPERTS))
    assert isinstance(made, CachedExperts)
    try:
        assert made.cache.counters().resident_count == EXPERTS
        assert made.sweep_from_tokens == 0
        made.cache.check_integrity()
    finally:
        made.cache.close()
    with pytest.raises(ConfigError, match="there are 9 slots") as caught:
        build_cache(new(backend="fused"), plan(slots_count=9))
    assert caught.value.param == "engine.backend"
    with pytest.raises(ConfigError, match="every expert has a slot"):
        build_cache(new(backend="fused", layers="0=cpu"), plan(slots_count=EXPERTS))


def test_auto_takes_the_least_estimate_and_names_the_others(new: New, plan: Plan) -> None:
    # a link of a dial-up modem: every expert is better executed where it is
    choice = build_cache(new(backend="auto", link_bytes_per_s=100_000), plan(slots_count=9))
    assert isinstance(choice, BackendChoice)
    assert choice.backend == "cpu"
    for name in ("fused is not possible", "offload", "hybrid"):
        assert name in choice.reason


@pytest.mark.parametrize(
    ("key", "value"),
    [("slots_count", 9), ("preset", "chat"), ("sweep_tokens", 512), ("layers", "0=fill")],
)
def test_auto_does_not_drop_what_only_a_cache_can_honour(
    new: New, plan: Plan, key: str, value: int | str
) -> None:
    made = built(new(backend="auto", link_bytes_per_s=100_000, **{key: value}), plan(slots_count=9))
    assert made.backend.backend in ("offload", "hybrid")
    assert f"cpu is not possible: engine.{key} is set" in made.backend.reason


def test_auto_has_misses_where_layers_say_what_becomes_of_them(new: New, plan: Plan) -> None:
    made = built(new(backend="auto", layers="0=cpu"), plan(slots_count=EXPERTS))
    assert made.backend.backend in ("offload", "hybrid")
    assert "fused is not possible: engine.layers is set" in made.backend.reason


@pytest.mark.parametrize(
    ("backend", "layers", "row"),
    [
        ("offload", "", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("hybrid", "0-3=fill", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("hybrid", "0-3=cpu", [0] * 9),
        ("hybrid", "0=cpu,1=fill", [0, 2, 2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_the_table_that_is_shown_is_the_one_in_use(
    new: New, plan: Plan, backend: str, layers: str, row: list[int]
) -> None:
    made = build_cache(new(backend=backend, layers=layers, slots_count=9), plan(slots_count=9))
    assert isinstance(made, CachedExperts)
    try:
        made.cache.set_fill_counts([[0] + [2] * LAYER])
        assert list(made.cache.counters().fill_counts[0]) == row
    finally:
        made.cache.close()


def test_a_sweep_begins_where_it_pays_and_nowhere_else(new: New, plan: Plan) -> None:
    slow = new(backend="hybrid", slots_count=16, link_bytes_per_s=1_000_000)
    short = replace(slow, sweep_tokens=64)  # a sweep of so few is not worth a pool over this link
    assert built(short, plan(slots_count=16)).sweep_from_tokens == 0
    nothing = new(backend="hybrid", slots_count=16, layers="0-3=cpu")
    assert built(nothing, plan(slots_count=16)).sweep_from_tokens == 0
    filling = new(backend="offload", slots_count=16)
    assert 0 < built(filling, plan(slots_count=16)).sweep_from_tokens <= filling.sweep_tokens


class CrampedArena(HostArena):
    """Memory of which a plan thought that there is more."""

    room_bytes = 0

    def grow_to(self, length_bytes: int) -> None:
        if length_bytes > self.room_bytes:
            raise ArenaError(LOST, asked_bytes=length_bytes, available_bytes=self.room_bytes)
        super().grow_to(length_bytes)


def cramp(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """From after the measurements on."""
    arenas = iter((HostArena, CrampedArena))
    monkeypatch.setattr(CrampedArena, "room_bytes", room_bytes)

    def arena(capacity_bytes: int) -> HostArena:
        return next(arenas)(capacity_bytes)

    monkeypatch.setattr(build_module, "HostArena", arena)


@pytest.mark.parametrize(("room", "slots_count"), [(8, 4), (5, 4), (2, 2)])
def test_slots_that_nobody_has_room_for_any_more_become_fewer(
    new: New, plan: Plan, monkeypatch: pytest.MonkeyPatch, room: int, slots_count: int
) -> None:
    planned = replace(plan(), slots_count=18)
    inputs = new(backend="hybrid")
    cramp(monkeypatch, room * inputs.bank.record_bytes)
    made = build_cache(inputs, planned)
    assert isinstance(made, CachedExperts)
    try:
        assert made.description.slots_count == made.cache.slots_count == slots_count
        assert (
            made.backend.notes[-1] == f"{slots_count} of the 18 slots planned could be had: {LOST}"
        )
        made.cache.check_integrity()
    finally:
        made.cache.close()


def test_slots_that_were_asked_for_or_fit_no_token_are_refused_instead(
    new: New, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = new(backend="hybrid")
    for settings in ({"slots_count": 9}, {}):
        cramp(monkeypatch, inputs.bank.record_bytes)
        with pytest.raises(ArenaError, match=LOST):
            build_cache(new(backend="hybrid", **settings), replace(plan(), slots_count=9))


@pytest.fixture
def copies_from_elsewhere(monkeypatch: pytest.MonkeyPatch, base: CacheInputs) -> Iterator[None]:
    """A link whose copies end well and bring other bytes than the pool has."""
    region = np.zeros(base.bank.record_offset_bytes(EXPERTS - 1) + base.bank.record_bytes, np.uint8)
    elsewhere = MappedBank(bank=base.bank, region_address=region.ctypes.data)

    def lying(
        mapped: MappedBank, pool: SlotPool, *, rate_bytes_per_s: float | None = None
    ) -> FillLink:
        del mapped
        return FillLink(elsewhere, pool, rate_bytes_per_s=rate_bytes_per_s)

    monkeypatch.setattr(cache_module, "FillLink", lying)
    yield
    del region  # it had to live as long


@pytest.mark.usefixtures("copies_from_elsewhere")
def test_a_device_that_does_not_hold_what_was_copied_is_not_served_from(
    new: New, plan: Plan
) -> None:
    with pytest.raises(ResourceError, match="4 of 4 experts") as caught:
        build_cache(new(backend="hybrid"), plan(slots_count=16))
    assert caught.value.reason is Reason.DEVICE_UNUSABLE
    assert 'engine.backend to "cpu"' in caught.value.message
    choice = build_cache(new(backend="auto"), plan(slots_count=EXPERTS))
    assert isinstance(choice, BackendChoice)
    assert choice.backend == "cpu"
    assert "differ from the pool" in choice.reason
    assert choice.notes == ()
    choice = build_cache(new(backend="auto", slots_count=9), plan(slots_count=9))
    assert isinstance(choice, BackendChoice)
    assert choice.backend == "cpu"
    assert choice.notes[0].startswith("engine.slots_count has no effect: ")


@pytest.mark.parametrize("slots_count", [1, 3, EXPERTS])
def test_a_sample_of_every_part_of_the_pool_is_compared(
    new: New, plan: Plan, slots_count: int
) -> None:
    made = build_cache(new(backend="hybrid"), plan(slots_count=slots_count))
    assert isinstance(made, CachedExperts)
    try:
        report = made.cache.fill_sample()
        assert report.differences == ()
        assert report.compared_count >= min(slots_count, 4)
        resident = [layer for layer in range(4) if made.cache.residents(layer).any()]
        assert len(resident) == min(slots_count, 4)
        assert slots_count < 2 or {0, 3} <= set(resident)
    finally:
        made.cache.close()


def test_layers_that_do_not_exist_are_refused_before_anything_is_measured(
    new: New, plan: Plan
) -> None:
    with pytest.raises(ConfigError, match="no MoE layer 4") as caught:
        build_cache(new(backend="hybrid", layers="4=cpu"), plan(slots_count=9))
    assert caught.value.param == "engine.layers"


def test_the_kv_part_is_that_of_the_plan(plan: Plan, shape: KvShape) -> None:
    found = plan(device_bytes=16 * MIB, max_context_tokens=1024)
    kv = kv_plan_of(found, shape)
    assert kv.pages_count == found.kv_pages_count
    assert kv.kv_bytes == kv.pages_count * shape.page_bytes <= found.kv_bytes
    assert kv.servable_context_tokens == found.servable_context_tokens == 1024
    assert kv.limited_by == "engine.max_context_tokens"
