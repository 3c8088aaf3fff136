"""Everything that can be known to be wrong before a byte of the model is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from freetokend.control import check_control
from freetokend.core.config import ResolvedConfig
from freetokend.core.errors import ConfigError, ModelDataError
from freetokend.core.host_facts import HostMemory
from freetokend.core.model_config import refuse_unserved
from freetokend.core.units import format_bytes
from freetokend.daemon.http import check_http
from freetokend.ftw.index import INDEX_FILE, FtwIndex, read_index
from freetokend.link.control_side import LinkServer
from freetokend.native.pool import create_pool_file, pool_length_bytes
from freetokend.policy.layer_overrides import parse_layers
from freetokend.policy.memory import MemoryDemand, require_host_memory
from freetokend.policy.vram_budget import check_slots_count
from freetokend.serving.model_text import load_model_text


def check_model(directory: Path) -> FtwIndex:
    """The index of an FTW directory. Raises `ModelDataError` that says what is there instead."""
    if not directory.is_dir():
        raise ModelDataError(
            f"the model directory {directory} does not exist or may not be read: check "
            "[model] path (--model)"
        )
    if not (directory / INDEX_FILE).exists():
        raise ModelDataError(_what_is_there(directory))
    index = read_index(directory)
    refuse_unserved(index.architecture)
    return index


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


def check_cache(config: ResolvedConfig, index: FtwIndex | None) -> None:
    """Raises `ConfigError` for what no device could make of the settings of the expert cache with
    this model: layers that it does not have, more slots than experts, or than the memory that was
    set for them holds. `index` is None for a scripted engine, which has no model."""
    engine = config.engine
    try:
        bank = None if index is None else index.expert_bank
        parse_layers(engine.layers, None if bank is None else bank.moe_layers_count)
        if bank is None or not engine.slots_count:
            return
        check_slots_count(engine.slots_count, bank.experts_count)
        slots_bytes = engine.slots_count * bank.record_bytes
        if 0 < engine.device_bytes < slots_bytes:
            raise ConfigError(
                f"engine.slots_count = {engine.slots_count} takes {format_bytes(slots_bytes)}, and "
                f"engine.device_bytes is {format_bytes(engine.device_bytes)}, which also has to "
                "hold the KV pages. Lower the one or raise the other.",
                param="engine.slots_count",
            )
    except ConfigError as error:
        origin = next(one.origin for one in config.values() if one.key == error.param)
        raise ConfigError(f"{origin}: {error.message}", param=error.param) from None


def check_start(config: ResolvedConfig, index: FtwIndex | None) -> None:
    """Raises what a start by this user would, in its order, of addresses, directories, the group
    and the tokenizer. Leaves nothing behind; a service that runs already is not in the way.

    `index` is None for a scripted engine, which has no pool.
    """
    check_http(config.http.host, config.http.port)
    link_dir = Path(config.service.runtime_dir) / "link"
    sockets = (Path(config.control.admin_socket), Path(config.control.monitor_socket))
    with _made_for_now(link_dir, *(socket.parent for socket in sockets)):
        LinkServer(link_dir).prepare()
        if index is not None:
            directory = config.pool.directory or None
            create_pool_file(
                "freetoken-check", index.region_bytes, index.identity, directory
            ).close()
        check_control(config)
    load_model_text(Path(config.model.path))


@contextlib.contextmanager
def _made_for_now(*directories: Path) -> Iterator[None]:
    """Removes in the end those of `directories` and of their parents that are missing now."""
    around = {path for one in directories for path in (one, *one.parents)}
    missing = [path for path in around if not os.path.lexists(path)]
    try:
        yield
    finally:
        # Deepest first. One that somebody uses by now is not empty, and stays.
        for path in sorted(missing, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()
