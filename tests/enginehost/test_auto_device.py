"""A GPU that "auto" finds: used when it has proven itself, and else the CPU serves and says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from freetokend.core.errors import FreetokenError, Reason, ResourceError
from freetokend.core.model_config import RouterConfig, RouterScoring
from freetokend.device.arena import Arena, ArenaError
from freetokend.device.host_arena import HostArena
from freetokend.engine.graphs import CapturedGraph, GraphBackend
from freetokend.enginehost import build, proof
from freetokend.enginehost.backend import NO_GPUS, BackendChoice, GpuPresence
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.cuda_platform import (
    AttentionStore,
    ChosenFork,
    CudaPlatform,
    KvNeeds,
    SlotOps,
)
from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.cpu_fork import HostBuffers
from freetokend.experts.slot_pool import SlotPool
from freetokend.ftw.reader import FtwDirectory
from freetokend.native.cpu_branch import CpuBranch
from freetokend.native.routing_tap import Tapped, TappedLayer
from freetokend.policy.health import GPU_NOT_USED
from freetokend.tensor.program import Route
from freetokend.tensor.router import route
from tests.enginehost.cpu_platform import CpuPlatform, engine_on
from tests.enginehost.given_rates import rated
from tests.enginehost.local_engine import ask, local_engine, serve
from tests.support.late_transfers import LateTransfers

SIZES: dict[str, int | str] = {
    "max_context_tokens": 128,
    "max_running_count": 4,
    "kv_bytes": 1 << 20,
}
PROMPT = [1, 5, 9, 2, 7]


@pytest.fixture(autouse=True)
def fast_gpu(deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its rates a GPU is what "auto" takes."""
    rated(monkeypatch, deep, link=20e9, cpu=20e9, slot=1e12)


def first_tokens(built: BuiltEngine) -> list[int]:
    return serve(built, [ask("a", PROMPT, 8)]).tokens["a"]


def choice_of(built: BuiltEngine) -> BackendChoice:
    assert built.backend is not None
    return built.backend


@contextmanager
def auto(
    platform: CudaPlatform | Callable[[], CudaPlatform], deep: FtwDirectory, **more: int | str
) -> Iterator[BuiltEngine]:
    with engine_on(platform, deep, **{**SIZES, "device": "auto", **more}) as built:
        yield built


def assert_cpu(built: BuiltEngine, deep: FtwDirectory, why: str) -> None:
    """It serves, and it is said that a GPU does not, and why."""
    choice = choice_of(built)
    assert (built.cache, built.pinning, choice.backend) == (None, None, "cpu")
    assert built.device_name == ""
    assert choice.reason.startswith("the GPU cannot be used: ")
    assert why in choice.reason
    assert choice.notes[0] == f"{GPU_NOT_USED}: {choice.reason}."
    with local_engine(deep, max_context_tokens=128, max_running_count=4) as alone:
        assert first_tokens(built) == first_tokens(alone)


def assert_given_back(platform: CpuPlatform) -> None:
    assert platform.registration is not None
    assert platform.registration.closed
    assert platform.transfers.is_closed
    assert platform.arena is not None
    assert platform.arena.committed_bytes == 0
    assert platform.is_released


class NotingPlatform(CpuPlatform):
    """Keeps the memory of its slots in sight."""

    arena: Arena | None = None

    def new_arena(self, reserved_bytes: int) -> Arena:
        self.arena = HostArena(reserved_bytes)
        return self.arena


class WrongExperts(NotingPlatform):
    """Its slots compute another product."""

    factor = 1.25

    def new_ops(
        self, mapped: MappedBank, pool: SlotPool, *, rows_capacity: int, top_k: int
    ) -> SlotOps:
        ops = super().new_ops(mapped, pool, rows_capacity=rows_capacity, top_k=top_k)

        def slots(
            x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
        ) -> None:
            ops.slots(x, physical, weights * self.factor, y)

        return replace(ops, slots=slots)


class NoNumbers(WrongExperts):
    factor = float("nan")


class WrongReplays(GraphBackend):
    """Its graphs are of something else than was captured."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        return WrongGraph(run)


class WrongGraph:
    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run

    def replay(self) -> torch.Tensor:
        return self._run().flip(1)


class WrongGraphs(NotingPlatform):
    def new_backend(self) -> GraphBackend:
        return WrongReplays()


class LosingTransfers(LateTransfers):
    """Copies nothing from the second layer on that is streamed."""

    def begin(self, copy: Callable[[], None]) -> int:
        return super().begin(copy if not self.begun_count else lambda: None)


class WrongSweeps(NotingPlatform):
    def __init__(self) -> None:
        super().__init__()
        self.transfers = LosingTransfers()


def test_it_is_used_when_it_has_proven_itself(
    deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    compare = proof.relative_error

    def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        found = compare(ours, theirs)
        assert found <= proof.most_error(5)
        compared.append(f"{ours.shape[0]}")
        return found

    monkeypatch.setattr(proof, "relative_error", error)
    monkeypatch.setattr("freetokend.enginehost.build_cuda.sweep_from", lambda *_, **__: 8)
    platform, advanced = CpuPlatform(), []
    asked = {**SIZES, "device": "auto", "slots_count": 20}
    with engine_on(platform, deep, progress=lambda: advanced.append(1), **asked) as built:
        assert len(advanced) >= 2 * len(compared)
        assert (built.device, choice_of(built).backend) == ("cuda", "hybrid")
        assert choice_of(built).notes == ()
        assert compared == ["36", "1", "1", "36"]  # a prompt, two steps, a sweep
        assert platform.backend.captures_count == 1
        assert built.allocator.used_count == 0
        assert built.cache is not None
        built.cache.check_integrity()
        assert not platform.is_released
        found = first_tokens(built)
    with engine_on(CpuPlatform(), deep, backend="hybrid", slots_count=4, **SIZES) as built:
        assert first_tokens(built) == found


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (WrongExperts, "logits of a prompt differ by|a prompt has chosen other experts"),
        (NoNumbers, "a prompt"),
        (WrongGraphs, "logits of a decode step differ by"),
        (WrongSweeps, "logits of a sweep differ by|a sweep has chosen other experts"),
    ],
)
def test_one_that_computes_something_else_is_given_back(
    deep: FtwDirectory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], NotingPlatform],
    what: str,
) -> None:
    monkeypatch.setattr("freetokend.enginehost.build_cuda.sweep_from", lambda *_, **__: 8)
    rated(monkeypatch, deep, link=50e9, cpu=0.01e9, slot=1e12)  # for "offload", which pins first
    platform = make()
    with caplog.at_level(logging.WARNING), auto(platform, deep, slots_count=20) as built:
        why = "no GPU at all does not compute what the CPU does with the same weights: "
        assert_cpu(built, deep, why)
        assert any(one in choice_of(built).reason for one in what.split("|"))
        assert choice_of(built).notes[1].startswith("engine.slots_count has no effect: ")
        assert_given_back(platform)
    told = [one for one in caplog.records if one.getMessage() == "gpu-not-used"]
    assert [one.levelno for one in told] == [logging.WARNING]
    for asked in ({"device": "cuda"}, {"backend": "offload"}):
        platform = make()
        with (
            pytest.raises(ResourceError, match=what) as caught,
            auto(platform, deep, slots_count=20, **asked),
        ):
            pass
        assert caught.value.reason is Reason.DEVICE_UNUSABLE
        assert platform.registration is not None
        assert platform.registration.closed


class CrampedArena(HostArena):
    def grow_to(self, length_bytes: int) -> None:
        message = "others have it"
        raise ArenaError(message, asked_bytes=length_bytes, available_bytes=0)


class Cramped(NotingPlatform):
    def new_arena(self, reserved_bytes: int) -> Arena:
        self.arena = CrampedArena(reserved_bytes)
        return self.arena


class NoRoomForKv(NotingPlatform):
    def new_kv(self, needs: KvNeeds) -> AttentionStore:
        message = "CUDA out of memory"
        raise torch.OutOfMemoryError(message)


class NoRoomForBuffers(NotingPlatform):
    def new_ops(
        self, mapped: MappedBank, pool: SlotPool, *, rows_capacity: int, top_k: int
    ) -> SlotOps:
        message = "CUDA out of memory"
        raise torch.OutOfMemoryError(message)


class Faulty(NotingPlatform):
    """From a fault on it answers nothing but that there was one."""

    message = ""

    def new_fork(self, branch: CpuBranch, buffers: HostBuffers) -> ChosenFork:
        self.message = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(self.message)

    def synchronize(self) -> None:
        super().synchronize()
        if self.message:
            raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("make", "said", "more"),
    [
        (Cramped, "others have it", ""),
        (NoRoomForKv, "no memory for keys and values any more: CUDA out of memory", ""),
        (NoRoomForBuffers, "CUDA out of memory", ""),
        (Faulty, "illegal memory access", "; not all of the GPU was given back: CUDA error"),
    ],
)
def test_whatever_fails_on_the_way_is_the_reason(
    deep: FtwDirectory, make: Callable[[], NotingPlatform], said: str, more: str
) -> None:
    platform = make()
    with auto(platform, deep, slots_count=8) as built:
        assert_cpu(built, deep, said)
        assert more in choice_of(built).reason
        assert platform.is_released
        assert platform.arena is not None
        assert platform.arena.committed_bytes == 0
        assert platform.registration is None or platform.registration.closed
    with (
        pytest.raises((FreetokenError, RuntimeError), match=said),
        auto(make(), deep, slots_count=8, device="cuda"),
    ):
        pass


def no_torch() -> CudaPlatform:
    message = "torch 2.9.0+cpu cannot use a GPU: install a build of it for CUDA."
    raise ResourceError(message, reason=Reason.DEVICE_UNUSABLE)


def test_what_is_missing_is_the_reason(deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with auto(no_torch, deep) as built:
        assert_cpu(built, deep, "torch 2.9.0+cpu cannot use a GPU")
        assert choice_of(built).reason.endswith("for CUDA; present but not used: no GPU at all")
    old = CpuPlatform()
    old.capability = (7, 5)
    with auto(old, deep) as built:
        assert_cpu(built, deep, "compute capability 7.5")
        assert (old.registration, old.is_released) == (None, True)

    def missing(name: str) -> None:
        message = f"No module named 'triton' ({name})"
        raise ImportError(message)

    monkeypatch.setattr("freetokend.enginehost.build.importlib.import_module", missing)
    with auto(build._gpu_platform, deep) as built:
        assert_cpu(built, deep, "What a GPU is used with cannot be loaded: No module named")
    with (
        pytest.raises(ResourceError, match='extra "gpu"') as caught,
        auto(build._gpu_platform, deep, device="cuda"),
    ):
        pass
    assert caught.value.reason is Reason.DEVICE_UNUSABLE


@pytest.mark.parametrize(
    "asked",
    [
        {"slots_count": 9},
        {"preset": "chat"},
        {"sweep_tokens": 64},
        {"layers": "0=cpu"},
        {"attention": "triton"},
    ],
)
def test_sizes_that_cannot_be_honoured_have_no_effect(
    deep: FtwDirectory, asked: dict[str, int | str]
) -> None:
    with auto(no_torch, deep, **asked) as built:
        assert_cpu(built, deep, "torch 2.9.0+cpu")
        (key,) = asked
        assert choice_of(built).notes[1].startswith(f"engine.{key} has no effect: ")
        assert "torch 2.9.0+cpu" in choice_of(built).notes[1]


def test_settings_that_only_a_gpu_refuses_do_not_keep_the_cpu_from_serving(
    deep: FtwDirectory,
) -> None:
    with auto(CpuPlatform(), deep, layers="9=cpu") as built:
        assert_cpu(built, deep, "no MoE layer 9")
        assert choice_of(built).notes[1].startswith("engine.layers has no effect: ")


def test_where_the_cpu_is_estimated_faster_it_serves(
    deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rated(monkeypatch, deep, link=1e6, cpu=20e9, slot=1e6)
    platform = NotingPlatform()
    with auto(platform, deep) as built:
        assert (built.cache, choice_of(built).backend) == (None, "cpu")
        assert choice_of(built).reason.startswith("estimated ")
        assert_given_back(platform)


def test_nobody_asks_for_a_gpu_that_is_not_there(deep: FtwDirectory) -> None:
    def never() -> CudaPlatform:
        raise AssertionError

    mute = GpuPresence(device_nodes=("/dev/nvidia0",), problem="no driver")
    for gpus in (NO_GPUS, mute):
        with engine_on(never, deep, gpus=gpus, device="auto", **SIZES) as built:
            assert (built.cache, built.backend) == (None, None)
    with auto(never, deep, numerics="fast") as built:
        assert built.numerics in ("exact", "fast")
        assert built.backend is None
    for asked in ({"backend": "cpu"}, {"device": "none"}):
        with auto(never, deep, **asked) as built:
            assert built.cache is None


def routed(chosen: list[list[int]], tolerance: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of two tokens after a device has chosen."""
    router = RouterConfig(top_k=2, scoring=RouterScoring.SOFTMAX, renormalise=True)
    logits = torch.tensor([[4.0, 3.0, 2.99, 0.0], [0.0, 1.0, 3.0, 5.0]])
    ids, weights = route(logits, router)
    given = proof._GivenRouting("a GPU", tolerance)
    flat = np.asarray(chosen, dtype="<u2")
    layer = TappedLayer(moe_layer_index=0, tokens_count=2, experts_per_token=2)
    given.given("a prompt", Tapped(layers=(layer,), ids=flat.tobytes(), overflowed=False))
    buffers = {0: logits, 1: ids, 2: weights}
    given(Route(logits=0, router=router, ids=1, weights=2), buffers.__getitem__)
    return ids, weights


def test_of_experts_as_good_as_each_other_a_device_may_choose_either() -> None:
    ids, weights = routed([[0, 2], [3, 2]])
    assert ids.tolist() == [[0, 2], [3, 2]]
    expected = torch.tensor([4.0, 2.99]).softmax(0)
    assert torch.allclose(weights[0], expected)
    assert torch.equal(weights[1], routed([[0, 1], [3, 2]])[1][1])
    for wrong in ([[0, 3], [3, 2]], [[0, 1], [3, 1]], [[0, 0], [3, 2]], [[0, 9], [3, 2]]):
        with pytest.raises(ResourceError, match="a prompt has"):
            routed(wrong)
