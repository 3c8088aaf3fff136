"""Everything that can be known to be wrong before a byte of the model is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from freetokend.core.errors import ModelDataError, Reason, ResourceError
from freetokend.ftw.index import INDEX_FILE, FtwIndex, read_index
from freetokend.native.pool import pool_length_bytes
from freetokend.policy.memory import HostMemory, MemoryDemand, require_host_memory

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")


def check_model(directory: Path) -> FtwIndex:
    """The index of an FTW directory. Raises `ModelDataError` that says what is there instead."""
    if not directory.is_dir():
        raise ModelDataError(
            f"the model directory {directory} does not exist or may not be read: check "
            "[model] path (--model)"
        )
    if not (directory / INDEX_FILE).exists():
        raise ModelDataError(_what_is_there(directory))
    return read_index(directory)


def _what_is_there(directory: Path) -> str:
    if (directory / "config.json").exists() and any(directory.glob("*.safetensors")):
        return (
            f"{directory} is a Hugging Face checkpoint: convert it once with "
            f"`freetokenctl ftw convert {directory} {directory}.ftw` and serve {directory}.ftw"
        )
    return (
        f"{directory} holds no model: there is no {INDEX_FILE} in it; "
        "make an FTW directory with `freetokenctl ftw convert`"
    )


def check_memory(index: FtwIndex, memory: HostMemory) -> None:
    """Raises `ResourceError` with the arithmetic when the pool and the headroom do not fit.

    Keys, values and workspace are sized by the engine into what is left, and checked there.
    """
    require_host_memory(memory, MemoryDemand(pool_bytes=pool_length_bytes(index.region_bytes)))


def read_host_memory(
    max_pool_bytes: int, *, proc: Path = _PROC, cgroup_root: Path = _CGROUP
) -> HostMemory:
    """What this process may take now; `max_pool_bytes` is the configured cap (0: none).

    Raises `ResourceError` when MemAvailable cannot be read: a guess could take the machine down.
    """
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            available_bytes = int(line.split()[1]) * 1024
            break
    else:
        raise ResourceError(
            f"MemAvailable cannot be read from {proc / 'meminfo'}, so it is unknown how much "
            "memory may be used: make /proc visible to the service",
            reason=Reason.HOST_MEMORY,
        )
    left = [
        left_bytes
        for cgroup in _own_cgroups(proc, cgroup_root)
        if (left_bytes := _left_bytes(cgroup)) is not None
    ]
    return HostMemory(
        mem_available_bytes=available_bytes,
        cgroup_available_bytes=min(left, default=None),
        cap_bytes=max_pool_bytes or None,
    )


def _own_cgroups(proc: Path, root: Path) -> Iterator[Path]:
    """This process's cgroup (v2) and its ancestors: a limit may stand at any of them."""
    for line in _lines(proc / "self" / "cgroup"):
        if line.startswith("0::/"):
            own = root / line.removeprefix("0::/")
            yield own
            yield from (parent for parent in own.parents if parent.is_relative_to(root))


def _left_bytes(cgroup: Path) -> int | None:
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # The kernel drops clean file pages before it refuses.
    reclaimable = 0
    for line in _lines(cgroup / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            reclaimable = int(value)
    return max(limit - max(used - reclaimable, 0), 0)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
