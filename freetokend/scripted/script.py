"""The JSON script of a scripted engine: what it says of itself, which tokens it emits, how it dies.

Every key is optional; unknown keys are refused. Example:

    {"model": "echo", "tokens": {"kind": "echo"}, "step_s": 0.01,
     "faults": [{"at": "step", "step_index": 3, "action": "signal", "signal": 9, "once": true}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from freetokend.core.errors import ConfigError, Reason
from freetokend.link.messages import EngineDescription

_MAX_SCRIPT_BYTES: Final = 1 << 20


class TokenKind(StrEnum):
    """Where a request's tokens come from."""

    ECHO = "echo"  # the prompt's own tokens, once
    FIXED = "fixed"  # `token_ids`, once
    CYCLE = "cycle"  # `token_ids` over and over, until max_new_tokens


class FaultPoint(StrEnum):
    """When a fault strikes."""

    START = "start"  # before Hello
    LOAD = "load"  # half-way through loading
    STEP = "step"  # at the beginning of step `step_index`, counted from 1


class FaultAction(StrEnum):
    """What a fault does."""

    SIGNAL = "signal"  # the process sends itself `signal` (9: death, 19: everything freezes)
    EXIT = "exit"  # ends at once with `exit_code`, saying nothing
    FAIL = "fail"  # sends Failure(`reason`, `message`), then exits as that reason says
    HANG = "hang"  # the step never ends, heartbeats go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What every request is answered with. `token_ids` is not used by "echo"."""

    kind: TokenKind = TokenKind.ECHO
    token_ids: tuple[int, ...] = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The pretended loading: `chunks_count` progress messages, `chunk_s` apart."""

    total_bytes: int = 1 << 20
    chunks_count: int = 4
    chunk_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planned misfortune. `once`: only the first engine that runs this script file has it;
    `on_gpu`: only while the device that the script describes is a GPU, and may be used."""

    at: FaultPoint = FaultPoint.STEP
    step_index: int = 1
    action: FaultAction = FaultAction.SIGNAL
    signal: int = 9
    exit_code: int = 70
    reason: Reason = Reason.INTERNAL
    message: str = "the script says so"
    once: bool = False
    on_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCacheSetup:
    """A pretended expert cache of `layers_count` MoE layers.

    Each step each layer hits `hits_count` experts, fills `fills_count` and leaves `cpu_count` to
    the CPU. `damaged` slots: [layer, expert, slot, offset in bytes], named by every comparison.
    `resize_refusal`: the text with which every resize and waking fails; "" lets them be done.
    `kv_used_count`: of the KV pages, those that no resize can take.
    """

    slots_count: int = 8
    slots_capacity: int = 64
    layers_count: int = 2
    slot_bytes: int = 4096
    hits_count: int = 3
    fills_count: int = 1
    cpu_count: int = 0
    damaged: tuple[tuple[int, int, int, int], ...] = ()
    resize_refusal: str = ""
    kv_pages_count: int = 64
    kv_pages_capacity: int = 256
    kv_page_bytes: int = 4096
    kv_used_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One whole script. `gate` names a FIFO: each step first reads one byte from it, so that a
    test decides when a step happens. `prefill_steps_count` steps pass before a request's first
    token. `cache` None: an engine without one. `description` overrides fields of
    `EngineDescription`."""

    model: str = ""
    tokens: Tokens = Tokens()
    load: Load = Load()
    step_s: float = 0.0
    gate: str = ""
    prefill_steps_count: int = 0
    heartbeat_s: float = 1.0
    link_version: int = 0
    faults: tuple[Fault, ...] = ()
    cache: ScriptedCacheSetup | None = None
    description: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def read_script(path: Path) -> Script:
    """Parse a script file. Raises `ConfigError` naming the file and what is wrong in it."""
    try:
        if path.stat().st_size > _MAX_SCRIPT_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_SCRIPT_BYTES} bytes: not a script")
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the script {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the script {path} is not JSON: {error}") from None
    try:
        return parse_script(body)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the script {path}: {error}") from None


def parse_script(body: object) -> Script:
    """The parsed JSON as a `Script`. Raises ValueError naming the key."""
    values = _checked(body, Script, "script")
    if "tokens" in values:
        tokens = _checked(values["tokens"], Tokens, "tokens")
        if "kind" in tokens:
            tokens["kind"] = TokenKind(tokens["kind"])
        if "token_ids" in tokens:
            tokens["token_ids"] = tuple(int(token) for token in tokens["token_ids"])
        values["tokens"] = Tokens(**tokens)
        if not values["tokens"].token_ids:
            raise ValueError("tokens.token_ids: must not be empty")
    if "load" in values:
        values["load"] = Load(**_checked(values["load"], Load, "load"))
    if "faults" in values:
        values["faults"] = tuple(_parse_fault(entry) for entry in values["faults"])
    if "cache" in values:
        values["cache"] = _parse_cache(values["cache"])
    if "description" in values:
        values["description"] = _parse_description(values["description"])
    return Script(**values)


def _parse_fault(body: object) -> Fault:
    values = _checked(body, Fault, "faults")
    for key, kind in (("at", FaultPoint), ("action", FaultAction), ("reason", Reason)):
        if key in values:
            values[key] = kind(values[key])
    return Fault(**values)


def _parse_cache(body: object) -> ScriptedCacheSetup:
    values = _checked(body, ScriptedCacheSetup, "cache")
    if "damaged" in values:
        damaged = [tuple(int(number) for number in slot) for slot in values["damaged"]]
        if any(len(slot) != 4 for slot in damaged):
            raise ValueError("cache.damaged: must be a list of [layer, expert, slot, offset]")
        values["damaged"] = tuple(damaged)
    return ScriptedCacheSetup(**values)


def _parse_description(body: object) -> Mapping[str, Any]:
    known = {entry.name for entry in fields(EngineDescription)}
    if not isinstance(body, dict) or not known.issuperset(body):
        raise ValueError("description: must be an object with fields of EngineDescription")
    values = dict(body)
    if "notes" in values:
        values["notes"] = tuple(str(note) for note in values["notes"])
    return MappingProxyType(values)


def _checked(body: object, kind: type[Any], where: str) -> dict[str, Any]:
    """`body` as keyword arguments of `kind`: known keys, numbers where the default is one."""
    if not isinstance(body, dict):
        raise ValueError(f"{where}: must be an object")
    defaults = {entry.name: entry.default for entry in fields(kind)}
    for key, value in body.items():
        if key not in defaults:
            raise ValueError(f"{where}.{key}: unknown key; known are {', '.join(defaults)}")
        default = defaults[key]
        if default is MISSING or not isinstance(default, bool | int | float | str):
            continue
        number = isinstance(default, int | float) and not isinstance(default, bool)
        fits = (
            isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            if number
            else isinstance(value, bool if isinstance(default, bool) else str)
        )
        if not fits:
            raise ValueError(f"{where}.{key}: {value!r} does not fit (default {default!r})")
    return dict(body)
