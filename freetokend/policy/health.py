"""The health registry: what is wrong or degraded, as one pure function of what is known.

Three questions are kept apart: *alive* (can the service come good by itself), *ready* (does it
take requests now), *progressing* (does the work at hand move). The same warnings feed the CLI,
the API, the metrics and the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from freetokend.core.units import format_bytes, format_seconds


class HealthState(StrEnum):
    """The engine's life, as far as health cares."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class Severity(StrEnum):
    """How bad a warning is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When a quantity becomes a warning."""

    # A layer sweep of a large model takes seconds and moves the progress mark each layer.
    stall_s: float = 15.0
    queue_ratio: float = 0.8
    kv_ratio: float = 0.95
    # Weights in 4 KiB pages read 4-9 % slower than in huge ones.
    huge_page_bytes: int = 2 << 20
    # A restart is news for so long; then its count and cause in status are enough.
    calm_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthInputs:
    """Everything that health is decided from.

    `served` is False until an engine was ready in this life: the fields after it are then unused.
    `healthy_for_s`: how long the present engine has been ready, 0 while it is not.
    """

    state: HealthState
    cause: str = ""
    restarts_count: int = 0
    healthy_for_s: float = 0.0
    next_restart_s: float | None = None
    busy: bool = False
    progress_age_s: float = 0.0
    running_count: int = 0
    waiting_count: int = 0
    max_waiting_count: int = 0
    http_host: str = "127.0.0.1"
    asked_context_tokens: int = 0
    load_stage: str = ""
    load_done_bytes: int = 0
    load_total_bytes: int = 0
    served: bool = False
    device: str = ""
    backend: str = ""
    notes: tuple[str, ...] = ()
    servable_context_tokens: int = 0
    pool_bytes: int = 0
    pool_page_bytes: int = 0
    pinned_bytes: int = 0
    pin_wanted: bool = True
    pin_done: bool = False
    pin_note: str = ""
    kv_pages_used_count: int = 0
    kv_pages_total_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthWarning:
    """One line of the registry; `code` is stable and a key of `CODES`."""

    code: str
    severity: Severity
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The three answers and the warnings, the worst first."""

    alive: bool
    ready: bool
    ready_reason: str
    progressing: bool
    warnings: tuple[HealthWarning, ...]


CODES: Final[Mapping[str, Severity]] = MappingProxyType(
    {
        "engine-failed": Severity.ERROR,
        "engine-restarting": Severity.ERROR,
        "engine-stalled": Severity.ERROR,
        "engine-was-restarted": Severity.WARNING,
        "queue-nearly-full": Severity.WARNING,
        "kv-nearly-full": Severity.WARNING,
        "pool-not-pinned": Severity.WARNING,
        "context-below-asked": Severity.WARNING,
        "gpu-not-used": Severity.WARNING,
        "http-exposed": Severity.WARNING,
        "engine-note": Severity.WARNING,
        "scripted-engine": Severity.WARNING,
        "host-device": Severity.WARNING,
        "draining": Severity.INFO,
        "pool-small-pages": Severity.INFO,
    }
)

# How the engine's note begins that names a GPU beside a CPU that serves.
GPU_NOT_USED: Final = "A GPU is present but the CPU serves"

# How an engine names ordinary memory in the place of a GPU.
HOST_DEVICE: Final = "host"

_ORDER: Final = (Severity.ERROR, Severity.WARNING, Severity.INFO)


def assess(inputs: HealthInputs, thresholds: Thresholds | None = None) -> Health:
    """The health of `inputs`; total, and the same for the same inputs."""
    limits = thresholds or Thresholds()
    stalled = inputs.busy and inputs.progress_age_s >= limits.stall_s
    found = [*_life(inputs, limits, stalled), *_load(inputs, limits), *_standing(inputs, limits)]
    warnings = [HealthWarning(code=code, severity=CODES[code], text=text) for code, text in found]
    return Health(
        alive=inputs.state not in (HealthState.FAILED, HealthState.STOPPED),
        ready=inputs.state is HealthState.READY,
        ready_reason=_ready_reason(inputs),
        progressing=not stalled,
        warnings=tuple(sorted(warnings, key=lambda warning: _ORDER.index(warning.severity))),
    )


def _ready_reason(inputs: HealthInputs) -> str:
    """Why no request is taken; empty when they are."""
    match inputs.state:
        case HealthState.READY:
            return ""
        case HealthState.STARTING:
            return "the engine is starting"
        case HealthState.LOADING:
            return _loading_text(inputs)
        case HealthState.DRAINING:
            return "draining: running requests finish, new ones are refused"
        case HealthState.RESTARTING:
            return "the engine ended and is being restarted"
        case HealthState.FAILED:
            return "the engine failed and is not restarted"
        case HealthState.STOPPED:
            return "the service is stopping"


def _loading_text(inputs: HealthInputs) -> str:
    if not inputs.load_total_bytes:
        stage = f" ({inputs.load_stage})" if inputs.load_stage else ""
        return f"the model is being loaded{stage}"
    done, total = inputs.load_done_bytes, inputs.load_total_bytes
    return f"the model is being loaded: {format_bytes(done)} of {format_bytes(total)}"


def _life(inputs: HealthInputs, limits: Thresholds, stalled: bool) -> Iterator[tuple[str, str]]:
    # What the engine said may be a sentence; here it is part of one.
    cause = inputs.cause.rstrip(". \n") or "no cause was given"
    match inputs.state:
        case HealthState.FAILED:
            yield (
                "engine-failed",
                f"The engine has ended and is not started again: {cause}. Read its "
                "log (as a service: `journalctl -u freetokend`), correct the cause, and start it "
                "again.",
            )
        case HealthState.RESTARTING:
            # While the process ends, nothing is decided: it may well not be started again.
            wait_s = inputs.next_restart_s
            when = "now" if not wait_s else f"in {format_seconds(wait_s)}"
            then = "" if wait_s is None else f" It is started again {when}."
            yield "engine-restarting", f"The engine has ended: {cause}.{then}"
        case HealthState.DRAINING:
            yield (
                "draining",
                f"New requests are refused, {inputs.running_count} are still running. "
                "`freetokenctl resume` ends the drain.",
            )
        case _ if inputs.restarts_count and inputs.healthy_for_s < limits.calm_s:
            times = "once" if inputs.restarts_count == 1 else f"{inputs.restarts_count} times"
            yield "engine-was-restarted", f"The engine was restarted {times}; last cause: {cause}."
    if stalled:
        yield (
            "engine-stalled",
            f"Work is active, but nothing has moved for {format_seconds(inputs.progress_age_s)}. "
            "An engine that stays stuck is replaced.",
        )


def _load(inputs: HealthInputs, limits: Thresholds) -> Iterator[tuple[str, str]]:
    waiting, places = inputs.waiting_count, inputs.max_waiting_count
    if places and waiting >= places * limits.queue_ratio:
        yield (
            "queue-nearly-full",
            f"{waiting} requests wait and {places} may; beyond that they are refused with 429. "
            "Send fewer at once, or raise engine.max_waiting_count.",
        )
    used, total = inputs.kv_pages_used_count, inputs.kv_pages_total_count
    if total and used >= total * limits.kv_ratio and waiting:
        yield (
            "kv-nearly-full",
            f"{used} of {total} pages for keys and values are in use and {waiting} requests wait "
            "for some. Raise engine.kv_bytes, or send fewer or shorter requests at once.",
        )


def _standing(inputs: HealthInputs, limits: Thresholds) -> Iterator[tuple[str, str]]:
    if not is_loopback(inputs.http_host):
        yield (
            "http-exposed",
            f"HTTP listens on {inputs.http_host}, which other machines can reach, and asks for no "
            'key. Set http.host = "127.0.0.1" unless that is meant.',
        )
    if not inputs.served:
        return
    if inputs.backend == "scripted":
        yield "scripted-engine", "Answers come from a script: no model is loaded."
        return
    if inputs.device == HOST_DEVICE:
        yield (
            "host-device",
            'Ordinary memory stands for a GPU (engine.device = "host"), which is for development '
            "and tests. Remove engine.device to serve without it.",
        )
    asked, servable = inputs.asked_context_tokens, inputs.servable_context_tokens
    if asked > servable:
        yield (
            "context-below-asked",
            f"engine.max_context_tokens asks for {asked} tokens, but {servable} can be served: "
            "the model or the memory for keys and values allows no more.",
        )
    for note in inputs.notes:
        yield ("gpu-not-used" if note.startswith(GPU_NOT_USED) else "engine-note"), note
    if inputs.pin_wanted and inputs.pin_done and inputs.pinned_bytes < inputs.pool_bytes:
        known = (
            f"{format_bytes(inputs.pinned_bytes)} of {format_bytes(inputs.pool_bytes)} of weights "
            "are pinned; the rest may be swapped out"
        )
        yield "pool-not-pinned", f"{inputs.pin_note or known}."
    if 0 < inputs.pool_page_bytes < limits.huge_page_bytes and inputs.pool_bytes:
        yield (
            "pool-small-pages",
            f"The weights lie in pages of {format_bytes(inputs.pool_page_bytes)}, which reads a "
            "few percent slower than huge pages. Mounting run-freetoken_pool.mount helps.",
        )


def is_loopback(host: str) -> bool:
    """Whether a listening address can only be reached from this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")
