"""Which CPUs the executor's threads are bound to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freetokend.core.host_facts import (
    HostFiles,
    allowed_cpus,
    cores_of,
    cpu_limit,
    cpu_quota_count,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoice:
    """The CPUs that the executor's threads are bound to, and why so many."""

    cpus: tuple[int, ...]
    reason: str


def choose_cpus(
    allowed: Sequence[int],
    core_of: Mapping[int, tuple[str, str]],
    quota_count: float | None,
    asked_count: int,
) -> CpuChoice:
    """One CPU per physical core first, then their siblings; never more than is allowed.

    `asked_count` 0: one thread per physical core. `core_of`: (package, core) of a CPU.
    """
    seen: set[tuple[str, str]] = set()
    first: list[int] = []
    siblings: list[int] = []
    for cpu in sorted(allowed):
        core = core_of.get(cpu, ("cpu", str(cpu)))
        (siblings if core in seen else first).append(cpu)
        seen.add(core)
    limit = cpu_limit(len(allowed), quota_count)
    wanted = asked_count or len(first)
    reason = f"{asked_count} were asked for" if asked_count else "one per physical core"
    if wanted > limit.count:
        wanted, reason = limit.count, f"{reason}, but {limit.reason}"
    return CpuChoice(cpus=tuple((first + siblings)[:wanted]), reason=reason)


def read_cpu_choice(files: HostFiles, asked_count: int) -> CpuChoice:
    """`choose_cpus` with what this process may use now."""
    allowed = allowed_cpus()
    return choose_cpus(allowed, cores_of(files, allowed), cpu_quota_count(files), asked_count)
