"""Everything that can be known to be wrong before a byte of the model is read."""

from __future__ import annotations

from pathlib import Path

from freetokend.core.errors import ModelDataError
from freetokend.core.host_facts import HostMemory
from freetokend.ftw.index import INDEX_FILE, FtwIndex, read_index
from freetokend.native.pool import pool_length_bytes
from freetokend.policy.memory import MemoryDemand, require_host_memory


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
