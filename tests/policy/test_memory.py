"""Host memory preflight: the tightest limit decides, and the sentence holds the sum."""

from __future__ import annotations

import pytest

from freetokend.core.errors import Reason, ResourceError
from freetokend.core.host_facts import HostMemory
from freetokend.policy.memory import (
    MemoryDemand,
    StepShape,
    host_memory_preflight,
    require_host_memory,
    step_workspace_bytes,
)

GIB = 1 << 30


def wants(pool: int, paid: int = 0) -> MemoryDemand:
    return MemoryDemand(
        pool_bytes=pool * GIB,
        pool_paid_bytes=paid * GIB,
        kv_bytes=2 * GIB,
        workspace_bytes=GIB,
        headroom_bytes=GIB,
    )


@pytest.mark.parametrize(
    ("memory", "demand", "fits", "limit_name"),
    [
        (HostMemory(mem_available_bytes=14 * GIB), wants(10), True, "MemAvailable"),
        (HostMemory(mem_available_bytes=14 * GIB - 1), wants(10), False, "MemAvailable"),
        (
            HostMemory(mem_available_bytes=99 * GIB, cgroup_available_bytes=13 * GIB),
            wants(10),
            False,
            "the cgroup's memory limit",
        ),
        (
            HostMemory(mem_available_bytes=14 * GIB, cgroup_available_bytes=99 * GIB),
            wants(10),
            True,
            "MemAvailable",
        ),
        # a pool that was found in memory is paid already
        (HostMemory(mem_available_bytes=4 * GIB), wants(10, paid=10), True, "MemAvailable"),
        (HostMemory(mem_available_bytes=4 * GIB), wants(10, paid=99), True, "MemAvailable"),
        (
            HostMemory(mem_available_bytes=99 * GIB, cap_bytes=10 * GIB - 1),
            wants(10),
            False,
            "pool.max_bytes",
        ),
        (HostMemory(mem_available_bytes=99 * GIB, cap_bytes=10 * GIB), wants(10), True, ""),
    ],
)
def test_preflight(memory: HostMemory, demand: MemoryDemand, fits: bool, limit_name: str) -> None:
    preflight = host_memory_preflight(memory, demand)
    assert preflight.fits is fits
    if limit_name:
        assert preflight.limit_name == limit_name


def test_the_refusal_holds_the_arithmetic() -> None:
    with pytest.raises(ResourceError) as caught:
        require_host_memory(HostMemory(mem_available_bytes=8 * GIB), wants(10))
    assert caught.value.reason is Reason.HOST_MEMORY
    assert (
        "pool 10.00 GiB + KV 2.00 GiB + workspace 1.00 GiB + headroom 1.00 GiB = 14.00 GiB, "
        "MemAvailable allows 8.00 GiB" in caught.value.message
    )


def test_the_workspace_grows_with_what_a_step_holds() -> None:
    shape = {
        "step_tokens": 512,
        "max_running_count": 64,
        "hidden_size": 576,
        "threads_count": 2,
        "token_bytes": 11_000,
        "output_bytes": 200_000,
        "widest_size": 576,
        "experts_per_token_count": 2,
        "expert_size": 1536,
        "vocab_size": 49_152,
    }
    base = step_workspace_bytes(StepShape(**shape))
    # the logits of 64 rows and their copies are 25 MB, the experts' results of 512 tokens 2.4 MB
    assert 28_000_000 < base < 200_000_000
    for name, value in shape.items():
        assert step_workspace_bytes(StepShape(**{**shape, name: value * 2})) > base
