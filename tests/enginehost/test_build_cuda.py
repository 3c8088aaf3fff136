"""The engine of a GPU put together without one: the same tokens whatever is in slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freetokend.core.errors import ConfigError, Reason, ResourceError
from freetokend.enginehost.backend import Device, GpuPresence, choose_device, uses_cuda
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.cuda_platform import SlotOps
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.device_cache import DeviceCache
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import EngineSettings
from freetokend.policy.backend_choice import LayerBranch
from tests.enginehost.cpu_platform import CpuPlatform, engine_on
from tests.enginehost.given_rates import rated
from tests.enginehost.local_engine import ask, local_engine, serve

PROMPTS = ([1, 5, 9, 2, 7], [3, 3, 8], [4, 1, 1, 6, 2, 9, 5, 7, 8, 2, 1, 3])
NEW_TOKENS = 24


def cache_of(built: BuiltEngine) -> DeviceCache:
    assert isinstance(built.cache, DeviceCache)
    return built.cache


def tokens(built: BuiltEngine) -> dict[str, list[int]]:
    requests = [ask(str(at), prompt, NEW_TOKENS) for at, prompt in enumerate(PROMPTS)]
    return dict(serve(built, requests, steps_between=2).tokens)


def settings(**more: int | str) -> dict[str, int | str]:
    sizes = {"max_context_tokens": 128, "max_running_count": 4, "kv_bytes": 1 << 20}
    return {"backend": "hybrid", **sizes, **more}


def test_tokens_depend_on_no_slot_split_or_pinning(
    deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = deep.index.expert_bank
    rated(monkeypatch, deep, link=20e9, cpu=20e9, slot=1e12)
    found = []
    for backend, slots, share in (
        ("hybrid", 2, 1.0),
        ("hybrid", bank.experts_count // 2, 0.6),
        ("hybrid", bank.experts_count, 1.0),
        ("hybrid", 4, 0.0),
        ("offload", 2, 1.0),
        ("offload", bank.experts_count // 2, 1.0),
    ):
        platform = CpuPlatform(pinned_share=share)
        with engine_on(platform, deep, **settings(backend=backend, slots_count=slots)) as built:
            found.append(tokens(built))
            cache = cache_of(built)
            cache.check_integrity()
            counters = cache.counters()
            assert (counters.slots_count, built.device) == (slots, "cuda")
            assert cache.verify().differences == ()
            cpu_count = sum(layer.cpu_count for layer in counters.layers)
            assert (cpu_count > 0) == (backend == "hybrid")
            assert (counters.fills_count > 0) == (share > 0)
            assert built.expert_executions() > 0
            assert platform.backend.captures_count > 0
            assert built.finished_ops() > 0
            assert built.backend is not None
            assert built.backend.backend == ("offload" if backend == "offload" else "hybrid")
        assert platform.registration is not None
        assert platform.registration.closed
    assert all(one == found[0] for one in found)


def test_most_tokens_are_the_cpus(deep: FtwDirectory) -> None:
    """Sums in another order may choose another token where two are as good as each other."""
    with engine_on(CpuPlatform(), deep, **settings(slots_count=8)) as built:
        ours = tokens(built)
    with local_engine(deep, max_context_tokens=128, max_running_count=4) as built:
        theirs = tokens(built)
    assert [ours[one][0] for one in ours] == [theirs[one][0] for one in ours]


def test_a_resize_in_the_middle_changes_no_token(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, **settings(backend="offload", slots_count=8)) as built:
        before = tokens(built)
        cache = cache_of(built)
        for slots_count in (2, 20, 5):
            assert cache.resize(slots_count).slots_count == slots_count
            cache.check_integrity()
            assert tokens(built) == before
        with pytest.raises(ResourceError, match="needs 2 slots or more, not 1"):
            cache.resize(1)
        assert tokens(built) == before


@pytest.mark.parametrize("share", [0.6, 0.0])
def test_offload_leaves_layers_that_are_not_pinned_to_the_cpu(
    deep: FtwDirectory, share: float
) -> None:
    asked = settings(backend="offload", slots_count=8)
    with engine_on(CpuPlatform(), deep, **asked) as built:
        expected = tokens(built)
        q = cache_of(built).counters().fill_counts
        assert q == (tuple(range(9)),) * 5
    with engine_on(CpuPlatform(pinned_share=share), deep, **asked) as built:
        assert tokens(built) == expected
        assert built.backend is not None
        assert built.backend.backend == "offload"
        assert built.backend.notes == ("the rest stays pageable",)
        pinned = sum(cache_of(built).fillable)
        assert (0 < pinned < 4) if share else pinned == 0
        assert f"{4 - pinned} of 4 layers are not pinned" in built.backend.reason
        assert built.cache_description is not None
        runs = built.cache_description.layer_runs
        filled = [LayerBranch.FILL] * bool(share)
        assert [run.branch for run in runs] == [*filled, LayerBranch.CPU]
        counters = cache_of(built).counters()
        assert counters.fill_counts == (q if share else ((0,) * 9,) * 5)
        assert (counters.fills_count > 0) == bool(share)
        assert sum(layer.cpu_count for layer in counters.layers) > 0


@pytest.mark.parametrize(("backend", "usual"), [("hybrid", "split"), ("offload", "fill")])
def test_layers_can_have_a_branch_of_their_own(
    deep: FtwDirectory, backend: str, usual: str
) -> None:
    asked = settings(backend=backend, slots_count=6)
    with engine_on(CpuPlatform(), deep, **asked) as built:
        expected = tokens(built)
    with engine_on(CpuPlatform(), deep, **asked, layers="1=cpu,3=fill") as built:
        # A prompt of the proof can need more experts than there are slots.
        before = cache_of(built).counters().layers[3]
        assert tokens(built) == expected
        assert built.cache_description is not None
        runs = built.cache_description.layer_runs
        branches = [run.branch.value for run in runs for _ in range(run.layers_count)]
        assert branches == [usual, "cpu", usual, "fill"]
        layers = cache_of(built).counters().layers
        assert layers[1].fills_count == 0 < layers[1].cpu_count
        assert layers[3].cpu_count == before.cpu_count
        assert layers[3].fills_count > before.fills_count
    with (
        pytest.raises(ConfigError, match="no MoE layer 4"),
        engine_on(CpuPlatform(), deep, **settings(layers="4=cpu")),
    ):
        pass


def test_settings_reach_the_device(deep: FtwDirectory) -> None:
    platform = CpuPlatform()
    with engine_on(platform, deep, **settings(slots_count=6, attention="triton")):
        assert platform.asked_attention == "triton"


def test_status_has_the_kernels_and_why_they_were_chosen(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, **settings(slots_count=6)) as built:
        assert built.kernel.startswith("triton_rows and triton_tiles with ")
        assert built.backend is not None
        reason = built.backend.reason
        assert "triton_rows up to 16 tokens (few tokens per expert: the time is that" in reason
        assert "by triton_tiles beyond (many tokens per expert: mma of warps; bf16 as it" in reason
        assert "attention by dense pages" in reason


def test_a_gpu_without_kernels_is_refused_before_anything_is_taken(deep: FtwDirectory) -> None:
    platform = CpuPlatform()
    platform.capability = (7, 5)
    with (
        pytest.raises(ResourceError, match=r"compute capability 7\.5 cannot execute experts"),
        engine_on(platform, deep, **settings()),
    ):
        pass
    assert platform.registration is None


def test_both_branches_are_measured_alone_and_beside_each_other(deep: FtwDirectory) -> None:
    with engine_on(CpuPlatform(), deep, **settings(slots_count=8)) as built:
        assert built.cache_description is not None
        source = built.cache_description.fill_rate_source
        assert "GB/s alone and" in source
        assert "beside the CPU" in source
        assert "beside fills" in source


class IdlePlatform(CpuPlatform):
    """Its fills end well and move nothing."""

    def new_ops(
        self, mapped: MappedBank, pool: SlotPool, *, rows_capacity: int, top_k: int
    ) -> SlotOps:
        ops = super().new_ops(mapped, pool, rows_capacity=rows_capacity, top_k=top_k)
        return replace(ops, fill=lambda _fills, _count: None)


@pytest.mark.parametrize("backend", ["hybrid", "offload"])
def test_a_device_that_copies_nothing_is_refused(deep: FtwDirectory, backend: str) -> None:
    platform = IdlePlatform()
    with (
        pytest.raises(ResourceError, match="no GPU at all does not hold what is copied") as caught,
        engine_on(platform, deep, **settings(backend=backend)),
    ):
        pass
    assert caught.value.reason is Reason.DEVICE_UNUSABLE
    assert platform.registration is not None
    assert platform.registration.closed


def test_what_does_not_fit_is_refused_with_the_numbers(deep: FtwDirectory) -> None:
    with (
        pytest.raises(ResourceError, match="dense weights"),
        engine_on(CpuPlatform(free_bytes=1 << 20), deep, **settings()),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="fast"),
        engine_on(CpuPlatform(), deep, **settings(numerics="fast")),
    ):
        pass


def test_a_gpu_is_used_where_it_is_asked_for_and_there() -> None:
    asked = EngineSettings(model="m", device="cuda")
    assert choose_device(asked, GpuPresence(names=("NVIDIA H200",))) is Device.CUDA
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and its driver: no NVIDIA GPU"):
        choose_device(asked, GpuPresence())
    assert uses_cuda(asked)
    assert not uses_cuda(EngineSettings(model="m", device="cuda", backend="cpu"))
    assert not uses_cuda(EngineSettings(model="m"))
