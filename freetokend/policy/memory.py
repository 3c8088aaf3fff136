"""Host memory preflight: does what the service wants fit, before a byte is read?

Pure arithmetic over measured values. `None` means "no such limit"; an unknown MemAvailable is not
a number either and is refused rather than guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import Reason, ResourceError
from freetokend.core.host_facts import HostMemory

GIB: Final = 1 << 30
MIB: Final = 1 << 20
# The household's other programs: below this the kernel starts to reclaim file caches in earnest.
DEFAULT_HEADROOM_BYTES: Final = 768 << 20


def gib(value_bytes: int) -> str:
    """Bytes for people, in GiB with two digits; what would have less than two of them, in MiB."""
    if 0 < abs(value_bytes) < GIB // 10:
        return f"{value_bytes / MIB:.2f} MiB"
    return f"{value_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """What the service wants. pool_paid_bytes: pool pages that already hold memory (re-attach)."""

    pool_bytes: int
    pool_paid_bytes: int = 0
    kv_bytes: int = 0
    workspace_bytes: int = 0
    headroom_bytes: int = DEFAULT_HEADROOM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPreflight:
    """The verdict: what is still to be taken, the tightest limit, what is left, the arithmetic."""

    fits: bool
    needed_bytes: int
    limit_bytes: int
    limit_name: str
    left_bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What decides the size of one step's temporary memory.

    token_bytes, output_bytes: what the step program's buffers take per token, and per token whose
    logits are wanted; widest_size: columns of the widest activation that a matrix is applied to.
    """

    step_tokens: int
    max_running_count: int
    threads_count: int
    token_bytes: int
    output_bytes: int
    widest_size: int
    hidden_size: int
    experts_per_token_count: int
    expert_size: int
    vocab_size: int


def step_workspace_bytes(shape: StepShape) -> int:
    """Upper bound of what one step allocates besides keys and values.

    Per token: the program's buffers, the activations arranged for a product (fp32 and their sums),
    and of each routed expert its inputs and inner activations in that arrangement and its fp32
    result. Per sampled row: its buffers. Per thread: a weight and an index of each token of the
    vocabulary, to sample from. Memory that grows takes a quarter more than asked.
    """
    per_token = (
        shape.token_bytes
        + 5 * shape.widest_size
        + shape.experts_per_token_count * (9 * shape.hidden_size + 5 * shape.expert_size)
    )
    grown_bytes = shape.step_tokens * per_token + shape.max_running_count * shape.output_bytes
    return grown_bytes + -(-grown_bytes // 4) + shape.threads_count * 8 * shape.vocab_size


def host_memory_preflight(memory: HostMemory, demand: MemoryDemand) -> MemoryPreflight:
    """Compare the demand that is not yet paid with min(MemAvailable, cgroup) and the pool cap."""
    unpaid_pool_bytes = max(demand.pool_bytes - demand.pool_paid_bytes, 0)
    needed_bytes = (
        unpaid_pool_bytes + demand.kv_bytes + demand.workspace_bytes + demand.headroom_bytes
    )
    limit_bytes, limit_name = memory.mem_available_bytes, "MemAvailable"
    cgroup_bytes = memory.cgroup_available_bytes
    if cgroup_bytes is not None and cgroup_bytes < limit_bytes:
        limit_bytes, limit_name = cgroup_bytes, "the cgroup's memory limit"
    arithmetic = (
        f"pool {gib(unpaid_pool_bytes)} + KV {gib(demand.kv_bytes)} + workspace "
        f"{gib(demand.workspace_bytes)} + headroom {gib(demand.headroom_bytes)} = "
        f"{gib(needed_bytes)}, {limit_name} allows {gib(limit_bytes)}"
    )
    fits = needed_bytes <= limit_bytes
    if memory.cap_bytes is not None and demand.pool_bytes > memory.cap_bytes:
        fits, limit_bytes, limit_name = False, memory.cap_bytes, "pool.max_bytes"
        arithmetic = f"pool {gib(demand.pool_bytes)}, pool.max_bytes allows {gib(memory.cap_bytes)}"
    return MemoryPreflight(
        fits=fits,
        needed_bytes=needed_bytes,
        limit_bytes=limit_bytes,
        limit_name=limit_name,
        left_bytes=limit_bytes - needed_bytes,
        arithmetic=arithmetic,
    )


def require_host_memory(memory: HostMemory, demand: MemoryDemand) -> MemoryPreflight:
    """As `host_memory_preflight`; raises ResourceError with the arithmetic if it does not fit."""
    preflight = host_memory_preflight(memory, demand)
    if not preflight.fits:
        raise ResourceError(
            f"The model does not fit in this machine's memory: {preflight.arithmetic}. "
            "Close other programs, raise the limit, or choose a smaller model.",
            reason=Reason.HOST_MEMORY,
        )
    return preflight
