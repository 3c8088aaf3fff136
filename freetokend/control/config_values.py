"""The resolved configuration as it is shown: what was left to the engine has what it chose."""

from __future__ import annotations

from collections.abc import Iterator

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.config.resolved import ResolvedConfig
from freetokend.core.config.schema import AUTO
from freetokend.core.units import format_bytes
from freetokend.link.messages import EngineDescription, EngineSnapshot


def config_values(config: ResolvedConfig, snapshot: EngineSnapshot) -> list[pb.ConfigValue]:
    """Every key in the order of the schema. A value that is still "auto" stays so, for what is
    shown can be read back; what came of it is in its reason, from when an engine is ready."""
    chosen = {} if snapshot.description is None else dict(_chosen(snapshot.description))
    return [
        pb.ConfigValue(
            key=one.key,
            value=one.value,
            origin=one.origin,
            reason=_reason(one.reason, chosen.get(one.key, ""))
            if one.value == f'"{AUTO}"'
            else one.reason,
        )
        for one in config.values()
    ]


def _reason(reason: str, chosen: str) -> str:
    return f"now {chosen}; {reason}" if chosen else reason


def _chosen(engine: EngineDescription) -> Iterator[tuple[str, str]]:
    """Keys that an engine decides, and what a ready one says of them."""
    yield "engine.device", f"{engine.device} ({engine.device_name})"
    yield "engine.backend", f"{engine.backend}: {engine.backend_reason}"
    yield "engine.kv_bytes", format_bytes(engine.kv_bytes)
    yield "engine.max_context_tokens", f"{engine.servable_context_tokens} tokens"
    if engine.cache is not None:
        yield "engine.slots_count", f"{engine.cache.slots_count} at the start"
