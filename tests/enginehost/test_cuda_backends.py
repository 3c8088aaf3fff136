"""Which backend an engine on a GPU has, and how many slots: by rates and room that are given."""

from __future__ import annotations

import pytest
import torch

from freetokend.core.errors import ConfigError, Reason, ResourceError
from freetokend.device.arena import Arena, ArenaError, rounded_up
from freetokend.device.host_arena import HostArena
from freetokend.enginehost import cuda_slots
from freetokend.enginehost.cuda_budget import plan_device
from freetokend.enginehost.cuda_platform import AttentionStore, KvNeeds
from freetokend.experts.gpu.device_cache import DeviceCache
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import EngineSettings
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.fill_table import fill_table
from freetokend.policy.vram_budget import VramFacts, VramPlan
from tests.enginehost.cpu_platform import CpuPlatform, engine_on
from tests.enginehost.given_rates import rated
from tests.enginehost.local_engine import ask, local_engine, serve

GB = 1e9
EXPERTS, LAYERS, TOP_K, LAYER = 32, 4, 2, 8  # of `deep`
PROMPT = [1, 5, 9, 2, 7]
SIZES: dict[str, int | str] = {
    "max_context_tokens": 128,
    "max_running_count": 4,
    "kv_bytes": 1 << 20,
}


@pytest.mark.parametrize(
    ("slots", "link", "cpu", "expected"),
    [
        (EXPERTS, 10 * GB, 20 * GB, "fused"),
        (8, 20 * GB, 20 * GB, "hybrid"),
        (8, 50 * GB, 0.01 * GB, "offload"),
    ],
)
def test_auto_takes_the_least_estimate_and_names_the_others(
    deep: FtwDirectory,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    link: float,
    cpu: float,
    expected: str,
) -> None:
    rates = rated(monkeypatch, deep, link=link, cpu=cpu, slot=1000 * GB)
    with engine_on(CpuPlatform(), deep, slots_count=slots, **SIZES) as built:
        assert built.backend is not None
        assert built.backend.backend == expected
        assert built.backend.reason.startswith("estimated ")
        others = {"fused", "offload", "hybrid", "cpu"} - {expected}
        assert all(f"; {other} " in built.backend.reason for other in others)
        assert isinstance(built.cache, DeviceCache)
        table = built.cache.counters().fill_counts
        q_is_m = (tuple(range(LAYER + 1)),) * 5
        assert table == (fill_table(rates, LAYER) if expected == "hybrid" else q_is_m)
        assert fill_table(rates, LAYER) != q_is_m or expected == "offload"
        found = serve(built, [ask("a", PROMPT, 8)]).tokens["a"]
    monkeypatch.undo()
    with engine_on(CpuPlatform(), deep, backend="hybrid", slots_count=3, **SIZES) as built:
        assert serve(built, [ask("a", PROMPT, 8)]).tokens["a"] == found


def test_auto_does_without_slots_where_the_cpu_is_faster(
    deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rated(monkeypatch, deep, link=0.001 * GB, cpu=20 * GB, slot=0.001 * GB)
    platform = CpuPlatform()
    with engine_on(platform, deep, **SIZES) as built:
        assert built.cache is None
        assert built.backend is not None
        assert built.backend.backend == "cpu"
        assert "hybrid" in built.backend.reason
        assert platform.registration is not None
        assert platform.registration.closed
        assert platform.transfers.is_closed
        found = serve(built, [ask("a", PROMPT, 8)]).tokens["a"]
    with local_engine(deep, max_context_tokens=128, max_running_count=4) as built:
        assert serve(built, [ask("a", PROMPT, 8)]).tokens["a"] == found


def test_with_nothing_pinned_auto_leaves_every_layer_to_the_cpu(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(pinned_share=0.0), deep, slots_count=EXPERTS, **SIZES) as built:
        assert built.backend is not None
        assert built.backend.backend == "hybrid"
        assert "4 of 4 layers are not pinned, and the CPU executes them" in built.backend.reason
        assert built.backend.notes == ("the rest stays pageable",)
        assert built.cache_description is not None
        assert [run.branch for run in built.cache_description.layer_runs] == [LayerBranch.CPU]


def test_fused_is_refused_with_the_sum_where_not_all_experts_fit(deep: FtwDirectory) -> None:
    platform = CpuPlatform()
    with (
        pytest.raises(ConfigError, match=r"all 32 experts take .* there are 9 slots") as caught,
        engine_on(platform, deep, backend="fused", slots_count=9, **SIZES),
    ):
        pass
    assert caught.value.param == "engine.backend"
    assert platform.registration is not None
    assert platform.registration.registered_bytes == 0
    assert platform.registration.closed


def test_fused_has_every_expert_before_the_first_step(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, backend="fused", **SIZES) as built:
        assert isinstance(built.cache, DeviceCache)
        before = built.cache.counters()
        assert (before.slots_count, before.resident_count) == (EXPERTS, EXPERTS)
        assert built.cache.verify().differences == ()
        assert built.cache.verify().compared_count == EXPERTS
        assert serve(built, [ask("a", PROMPT, 8)]).tokens["a"]
        after = built.cache.counters()
        assert after.fills_count == before.fills_count == EXPERTS
        assert sum(layer.misses_count for layer in after.layers) == 0
        built.cache.check_integrity()


class CrampedArena(HostArena):
    """Memory of which a plan thought that there is more."""

    room_bytes = 0

    def grow_to(self, length_bytes: int) -> None:
        if length_bytes > self.room_bytes:
            message = "others have it"
            raise ArenaError(message, asked_bytes=length_bytes, available_bytes=self.room_bytes)
        super().grow_to(length_bytes)


class CrampedPlatform(CpuPlatform):
    """Its slots find room for so many records."""

    def __init__(self, record_bytes: int, records: int) -> None:
        super().__init__()
        self._room_bytes = record_bytes * records

    def new_arena(self, reserved_bytes: int) -> Arena:
        arena = CrampedArena(reserved_bytes)
        arena.room_bytes = self._room_bytes
        return arena


@pytest.mark.parametrize(("room", "slots"), [(20, 16), (9, 8), (2, 2)])
def test_slots_that_nobody_has_room_for_any_more_become_fewer(
    deep: FtwDirectory, room: int, slots: int
) -> None:
    platform = CrampedPlatform(deep.index.expert_bank.record_bytes, room)
    with engine_on(platform, deep, backend="hybrid", **SIZES) as built:
        assert isinstance(built.cache, DeviceCache)
        assert built.cache.slots_count == slots
        assert built.backend is not None
        note = f"{slots} of the 32 slots planned could be had: others have it"
        assert built.backend.notes == (note,)
        assert serve(built, [ask("a", PROMPT, 8)]).tokens["a"]
        built.cache.check_integrity()


@pytest.mark.parametrize("asked", [{"slots_count": 9}, {"backend": "fused"}, {}])
def test_slots_that_were_asked_for_or_fit_no_token_are_refused_instead(
    deep: FtwDirectory, asked: dict[str, int | str]
) -> None:
    platform = CrampedPlatform(deep.index.expert_bank.record_bytes, 1)
    with (
        pytest.raises(ArenaError, match="others have it"),
        engine_on(platform, deep, **(SIZES | {"backend": "hybrid"} | asked)),
    ):
        pass
    assert platform.transfers.is_closed


class FullPlatform(CpuPlatform):
    """No memory for keys and values."""

    def new_kv(self, needs: KvNeeds) -> AttentionStore:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_keys_and_values_without_memory_are_refused_in_words(deep: FtwDirectory) -> None:
    with (
        pytest.raises(ResourceError, match="no memory for keys and values any more") as caught,
        engine_on(FullPlatform(), deep, **SIZES),
    ):
        pass
    assert caught.value.reason is Reason.DEVICE_MEMORY


CHUNK_BYTES = 8 << 20


class CoarseArena(HostArena):
    """Memory that comes in chunks of many pages."""

    @property
    def granularity_bytes(self) -> int:
        return CHUNK_BYTES

    def grow_to(self, length_bytes: int) -> None:
        super().grow_to(rounded_up(length_bytes, CHUNK_BYTES))

    def shrink_to(self, length_bytes: int) -> None:
        super().shrink_to(rounded_up(length_bytes, CHUNK_BYTES))


class CoarsePlatform(CpuPlatform):
    """Its slots come in chunks."""

    def new_arena(self, reserved_bytes: int) -> Arena:
        return CoarseArena(rounded_up(reserved_bytes, CHUNK_BYTES))


def test_the_plan_has_the_bytes_that_the_slots_take(
    deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[VramPlan] = []

    def planned(facts: VramFacts, settings: EngineSettings) -> VramPlan:
        plans.append(plan_device(facts, settings))
        return plans[-1]

    monkeypatch.setattr(cuda_slots, "plan_device", planned)
    with engine_on(CoarsePlatform(), deep, backend="hybrid", slots_count=9, **SIZES) as built:
        assert isinstance(built.cache, DeviceCache)
        assert built.cache.counters().committed_bytes == plans[0].slots_bytes == CHUNK_BYTES
        assert plans[0].kv_bytes == 2 << 20
