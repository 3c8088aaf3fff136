"""The experts' kernels beside float64 and the executor; run with TRITON_INTERPRET=1.

    python -m tests.experts.gpu.interpreted SEED [FORMAT...]

Says in JSON how far off they are. The interpreter replaces kernels when their module is imported:
hence a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from freetokend.core.errors import InternalError
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.experts.gpu.slot_experts import SlotExperts
from freetokend.experts.reference import TorchExpertDispatch
from freetokend.native.executor import Executor
from tests.experts.gpu.slots import Slots, random_slots

Row = dict[str, str | float]

PATHS = ("decode", "prefill")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
# Hidden and expert size: odd ones, and runs of groups of which the last fills no header.
SIZES = {
    "bf16": (70, 37),
    "fp8_block": (20, 134),
    "mxfp4": (32, 160),
    "nvfp4": (80, 48),
    "int4_g32_f16": (32, 160),
    "int4_g64_bf16_zp": (64, 128),
    "int4_g128_f16": (128, 128),
    "int8_g32_f16_zp": (32, 160),
    "int8_g64_bf16": (64, 128),
    "q4_K": (256, 256),
    "q6_K": (256, 256),
}
# A repeated expert, and pairs that are computed elsewhere.
IDS = ((1, 1), (-3, 0))
FEW_IDS = ((1, -1),)


def patch_once() -> None:
    """Calls among our functions without patching Triton's language again, which is most of what
    the interpreter does: their kernel has done it."""
    patching = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("freetokend."):
            return self.rewrite()(*args, **kwargs)
        return patching(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def inputs(
    slots: Slots, seed: int, ids: tuple[tuple[int, ...], ...], *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x bf16 [T, H], ids int32 [T, k] and weights fp32 [T, k]."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.tensor(ids, dtype=torch.int32)
    x = torch.randn(len(ids), slots.bank.hidden_size, generator=generator) * scale
    weights = torch.rand(experts.shape, generator=generator) + 0.1
    return x.bfloat16(), experts, weights


def run(
    path: str, kernels: SlotExperts, x: torch.Tensor, physical: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """y [T, k, H] of a call that finds something in it, and nothing in the middle."""
    kernels.middle.fill_(float("nan"))
    y = torch.full((*physical.shape, x.shape[1]), 7.0)
    getattr(kernels, path)(x, physical, w, y)
    return y


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||"""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def measure(path: str, slots: Slots, seed: int, executor: Executor, scale: float = 1.0) -> Row:
    """One call: each product by itself against float64, and the sum of a token's pairs against
    the executor and the torch oracle."""
    # The width of the K formats makes many programs.
    few = slots.bank.format.endswith("_K")
    x, ids, weights = inputs(slots, seed, FEW_IDS if few else IDS, scale=scale)
    kernels = slots.kernels(top_k=ids.shape[1], tokens=len(ids))
    y = run(path, kernels, x, slots.physical(ids), weights)
    middle_off, down_off = 0.0, 0.0
    for token, k in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, k])
        middle = kernels.middle[token, k, : slots.bank.intermediate_size]
        exact = slots.middle(expert, x[token])
        # In units of the last place of bf16, or of what is lost by cancelling.
        unit = exact.abs() * 2.0**-8 + exact.abs().max() * 2.0**-20
        middle_off = max(middle_off, float(((middle.double() - exact).abs() / unit).max()))
        wanted = weights[token, k].double() * slots.down(expert, middle)
        down_off = max(down_off, off(y[token, k], wanted))
    absent = y[ids < 0]
    assert absent.numel() > 0
    assert bool((absent == 0).all())
    sums = y.sum(1)
    cpu = CpuExpertDispatch(executor, slots.mapped).dispatch(0, x, ids.clamp(min=-1), weights)
    oracle = TorchExpertDispatch(slots.mapped, torch.float32).dispatch(
        0, x, ids.clamp(min=-1), weights
    )
    return {
        "path": path,
        "middle_units": middle_off,
        "down": down_off,
        "executor": off(sums, cpu),
        "oracle": off(sums, oracle),
    }


def all_formats(names: list[str], seed: int, executor: Executor) -> list[Row]:
    rows = []
    for name in names or SIZES:
        slots = random_slots(name, SIZES[name], seed, has_bias=name != "q6_K")
        for path in PATHS:
            rows.append({"case": name, **measure(path, slots, seed, executor)})
    return rows


def all_activations(seed: int, executor: Executor) -> list[Row]:
    rows = []
    for activation in ACTIVATIONS:
        # The paths share what stands between the products.
        for path, limit in zip(PATHS, (0.0, 0.75), strict=True):
            slots = random_slots("bf16", (18, 17), seed, activation=activation, limit=limit)
            row = measure(path, slots, seed, executor, scale=3.0)
            rows.append({"case": f"{activation} {limit}", **row})
    return rows


def the_batch_and_the_slot_change_no_bit(seed: int) -> None:
    ids = ((0, 1), (2, 0), (1, 2))
    here = random_slots("int4_g32_f16", (32, 32), seed)
    there = random_slots("int4_g32_f16", (32, 32), seed, slot_of=(1, 5, 0), gap_bytes=64)
    x, experts, w = inputs(here, seed, ids)
    for path in PATHS:
        kernels = here.kernels(top_k=2, tokens=3)
        together = run(path, kernels, x, here.physical(experts), w)
        moved = there.kernels(top_k=2, tokens=3)
        assert torch.equal(run(path, moved, x, there.physical(experts), w), together), path
        one = slice(1, 2)
        alone = run(path, kernels, x[one], here.physical(experts[one]), w[one])
        assert torch.equal(alone[0], together[1]), path


def more_pairs_than_a_tile_holds(seed: int) -> None:
    """Tiles that end within a slot's pairs, and both paths alike to roundings of fp32."""
    slots = random_slots("bf16", (16, 16), seed)
    ids = tuple((0, 1) if token < 18 else (0, -1) for token in range(21))
    x, experts, w = inputs(slots, seed, ids)
    kernels = slots.kernels(top_k=2, tokens=21)
    tiles = run("prefill", kernels, x, slots.physical(experts), w)
    middle = kernels.middle.clone()
    rows = run("decode", kernels, x, slots.physical(experts), w)
    same = (middle == kernels.middle).all(-1) & (experts >= 0)
    assert int(same.sum()) > 10
    assert off(tiles[same], rows[same]) < 1e-6
    assert off(tiles, rows) < 2e-3


def slots_beyond_32_bits(seed: int) -> None:
    """Slot number times stride from 2^31 and from 2^32 on."""
    slots = random_slots("bf16", (16, 16), seed, slot_of=(0, 2, 4), gap_bytes=1 << 30)
    assert slots.slot_bytes * 2 > 1 << 31
    assert slots.slot_bytes * 4 > 1 << 32
    near = random_slots("bf16", (16, 16), seed)
    x, ids, w = inputs(slots, seed, ((0, 1), (2, -1)))
    for path in PATHS:
        wanted = run(path, near.kernels(top_k=2, tokens=2), x, near.physical(ids), w)
        got = run(path, slots.kernels(top_k=2, tokens=2), x, slots.physical(ids), w)
        assert torch.equal(got, wanted), path


def no_tokens_and_kept_pairs(seed: int) -> None:
    slots = random_slots("bf16", (18, 17), seed)
    kernels = slots.kernels(top_k=2, tokens=2)
    x, ids, w = inputs(slots, seed, ((0, -1), (-2, 1)))
    for path in PATHS:
        empty = run(path, kernels, x[:0], ids[:0], w[:0])
        assert empty.shape == (0, 2, 18)
        y = torch.full((2, 2, 18), 7.0)
        getattr(kernels, path)(x, slots.physical(ids), w, y, keep_others=True)
        assert bool((y[ids < 0] == 7.0).all())
        assert torch.equal(y[ids >= 0], run(path, kernels, x, slots.physical(ids), w)[ids >= 0])


def what_the_host_can_refuse(seed: int) -> None:
    """Slots that do not exist, and tensors, addresses and sizes that do not fit."""
    slots = random_slots("bf16", (18, 17), seed)
    kernels = slots.kernels(top_k=2, tokens=2)
    x, ids, w = inputs(slots, seed, ((0, 1), (2, 1)))
    physical = slots.physical(ids)
    y = torch.zeros((2, 2, 18))
    calls: list[Callable[[], object]] = []
    for path in PATHS:
        call = getattr(kernels, path)
        for slot in (5, 1 << 20, (1 << 31) - 1):
            hostile = physical.clone()
            hostile[1, 1] = slot
            calls.append(partial(call, x, hostile, w, y))
        twice = [torch.cat((tensor, tensor)) for tensor in (x, physical, w, y)]
        calls += [
            partial(call, x.float(), physical, w, y),
            partial(call, x[:, :17], physical, w, y),
            partial(call, x, physical.long(), w, y),
            partial(call, x, physical, w[:1], y),
            partial(call, x, physical, w, y[:, :1]),
            partial(call, *twice),
        ]
    count = torch.ones(1, dtype=torch.int32)
    made = partial(SlotExperts, slots.bank, slots_count=count, tokens_capacity=1, top_k=1)
    record_bytes = slots.bank.record_bytes
    for base, stride in ((32, record_bytes), (64, record_bytes - 64), (64, record_bytes + 1)):
        calls.append(partial(made, base_address=base, slot_bytes=stride))
    for number, refused in enumerate(calls):
        try:
            refused()
        except InternalError:
            continue
        raise AssertionError(f"call {number} was accepted")


def what_a_gpu_finds_out_for_itself(seed: int) -> None:
    """A slot that does not exist is not read: its pairs are NaN, all others are right."""
    slots = random_slots("bf16", (18, 17), seed)
    kernels = slots.kernels(top_k=2, tokens=2)
    x, ids, w = inputs(slots, seed, ((0, 1), (2, 1)))
    physical = slots.physical(ids)
    hostile = physical.clone()
    hostile[1, 0] = (1 << 31) - 2
    kernels._check_slots = lambda physical: None  # type: ignore[method-assign]
    for path in PATHS:
        wanted = run(path, kernels, x, physical, w)
        got = run(path, kernels, x, hostile, w)
        assert bool(got[1, 0].isnan().all())
        got[1, 0] = wanted[1, 0]
        assert torch.equal(got, wanted), path


def main(seed: int, names: list[str]) -> None:
    patch_once()
    the_batch_and_the_slot_change_no_bit(seed)
    more_pairs_than_a_tile_holds(seed)
    slots_beyond_32_bits(seed)
    no_tokens_and_kept_pairs(seed)
    what_the_host_can_refuse(seed)
    what_a_gpu_finds_out_for_itself(seed)
    with Executor(sorted(os.sched_getaffinity(0))[:1]) as executor:
        print(json.dumps(all_formats(names, seed, executor) + all_activations(seed, executor)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
