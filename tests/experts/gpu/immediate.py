"""Streams that do at once what is queued: the order of calls is the order of work."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from freetokend.experts.cpu import bank_experts
from freetokend.experts.gpu.cpu_fork import CpuWork, HostBuffers, StreamFork
from freetokend.native.cpu_branch import CpuBranch
from freetokend.native.executor import Executor
from tests.experts.gpu.bf16_banks import bf16_bank
from tests.experts.slot_support import RandomBank

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 4, 2, 3
HIDDEN, INTER = 64, 32


class ImmediateDriver:
    """A `StreamDriver` without a device. before_function: is called before a host function."""

    def __init__(self, before_function: Callable[[], object] = lambda: None) -> None:
        self._before_function = before_function

    def new_stream(self) -> int:
        return 0

    def destroy_stream(self, stream: Any) -> None:
        pass

    def new_event(self) -> int:
        return 0

    def destroy_event(self, event: Any) -> None:
        pass

    def record(self, event: Any, stream: Any) -> None:
        pass

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def copy_to_host_async(
        self, host_address: int, device_address: int, length_bytes: int, stream: Any
    ) -> None:
        ctypes.memmove(host_address, device_address, length_bytes)

    def copy_to_device_async(
        self, device_address: int, host_address: int, length_bytes: int, stream: Any
    ) -> None:
        ctypes.memmove(device_address, host_address, length_bytes)

    def launch_host_function(self, function_address: int, argument: int, stream: Any) -> None:
        self._before_function()
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function_address)(argument)


@dataclass(frozen=True, slots=True)
class Forked:
    """A fork over a small bank, with what it needs."""

    fork: StreamFork
    branch: CpuBranch
    buffers: HostBuffers
    executor: Executor
    bank: RandomBank

    @classmethod
    def begin(cls, driver: ImmediateDriver) -> Forked:
        bank = bf16_bank(layers=LAYERS, experts=EXPERTS, hidden=HIDDEN, inter=INTER)
        executor = Executor(sorted(os.sched_getaffinity(0))[:1])
        buffers = HostBuffers.make(
            tokens_capacity=TOKENS, top_k=TOP_K, hidden_size=HIDDEN, pinned=False
        )
        experts = bank_experts(bank.mapped.bank, bank.mapped.region_address)
        branch = CpuBranch(executor, experts, buffers.addresses())
        return cls(StreamFork(driver, branch, buffers, lambda: 0), branch, buffers, executor, bank)

    def end(self) -> None:
        self.branch.close()
        self.executor.close()


def random_work(seed: int) -> CpuWork:
    """Of a layer; some pairs are not the CPU's."""
    random = torch.Generator().manual_seed(seed)
    return CpuWork(
        x=torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(),
        ids=torch.randint(-1, EXPERTS, (TOKENS, TOP_K), generator=random).int(),
        weights=torch.rand(TOKENS, TOP_K, generator=random),
        tokens=torch.tensor([TOKENS - seed % 2], dtype=torch.int32),
    )
