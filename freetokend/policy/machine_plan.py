"""Would a model run on a machine, how fast, and which single change of the machine helps most?

The card is divided as the engine divides it (`vram_budget`), the speed is that of `machine_model`.
Nothing is measured here: what the driver, other programs and step buffers take is assumed, and said
in the division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from freetokend.policy.machine_model import (
    FITTED,
    MODEL_ERROR_RATIO,
    DecodeEstimate,
    MachineRates,
    ModelShape,
    Range,
    TokenTimes,
    decode_estimate,
)
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES
from freetokend.policy.vram_budget import (
    LEAST_CONTEXT_TOKENS,
    VramFacts,
    VramPlan,
    VramWishes,
    least_bytes,
    plan_vram,
)

# One prompt chunk takes one pass over the pool, whatever its length up to this.
CHUNK_TOKENS: Final = 8192
# Of every resource so much more is tried, to find the one that is worth it.
MORE_RATIO: Final = 1.5

_GIB: Final = 1 << 30
# The driver's own, of a card with nothing else on it.
_DRIVER_BYTES: Final = _GIB // 2
# Buffers of a chunk, and captured graphs.
_WORKSPACE_BYTES: Final = _GIB
_GRAPH_BYTES: Final = _GIB // 4
# Both processes, without weights.
_PROCESS_BYTES: Final = _GIB
_PAGE_TOKENS: Final = 32
_RUNNING_COUNT: Final = 4
# What a core executes at most, by weight format; measured on cores of 2024 at batch 1.
_CORE_BYTES_PER_S: Final[Mapping[str, float]] = MappingProxyType(
    {"bf16": 27.5e9, "fp8_block": 15e9, "nvfp4": 12e9, "mxfp4": 8e9}
)
# What GPUs of that much memory have, where its rate was not said: from (inclusive), range.
_DEVICE_RATES: Final = (
    (30 * _GIB, Range(low=900e9, high=1800e9)),
    (20 * _GIB, Range(low=600e9, high=1100e9)),
    (10 * _GIB, Range(low=400e9, high=1000e9)),
    (0, Range(low=200e9, high=500e9)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """ram_bytes, cores_count: None where not said."""

    device_bytes: int
    rates: MachineRates
    ram_bytes: int | None = None
    cores_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What there is too little of: "gpu_memory" or "ram"."""

    resource: str
    short_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One resource changed, all others as they are. before, after: bytes, bytes per second or
    cores; tokens_per_s: None where it still would not run; gain_ratio: what it adds to the speed,
    None where it did not run before."""

    resource: str
    before: float
    after: float
    tokens_per_s: float | None
    gain_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan:
    """The answer. vram, decode, tokens_per_s, limited_by, sweep_s, prefill_tokens_per_s: None where
    it does not run.

    tokens_per_s: the range of the inputs, widened by the error of the model on published machines.
    sweep_s: seconds in which the pool goes over the link once; prefill_tokens_per_s: of chunks of
    CHUNK_TOKENS at most, None where nothing goes over the link. changes: the most useful first.
    """

    runs: bool
    missing: tuple[Missing, ...]
    vram: VramPlan | None
    slots_count: Range | None
    decode: DecodeEstimate | None
    tokens_per_s: Range | None
    limited_by: str | None
    sweep_s: Range | None
    prefill_tokens_per_s: Range | None
    ram_needed_bytes: int
    changes: tuple[Change, ...]


def assumed_device_rate(device_bytes: int) -> Range:
    """What the memory of a GPU of that size reaches, in bytes per second."""
    return next(rate for least, rate in _DEVICE_RATES if device_bytes >= least)


def plan_machine(model: ModelShape, machine: Machine, wishes: VramWishes) -> MachinePlan:
    """Speeds are those of one sequence of the context that is wished for, the least one if none is.

    Raises ConfigError for wishes that no card could meet.
    """
    plan = _plan(model, machine, wishes)
    changes = sorted(
        _changes(model, machine, wishes, plan), key=lambda one: -(one.tokens_per_s or 0.0)
    )
    return replace(plan, changes=tuple(changes))


def ram_needed_bytes(model: ModelShape) -> int:
    """The pool, both processes, and what the machine's other programs are left."""
    return model.pool_bytes + _PROCESS_BYTES + DEFAULT_HEADROOM_BYTES


def _plan(model: ModelShape, machine: Machine, wishes: VramWishes) -> MachinePlan:
    facts = _facts(model, machine, model.dense_bytes.high)
    fixed_bytes = sum(size for _, size in facts.fixed_rows)
    needed_bytes = fixed_bytes + least_bytes(facts, wishes)
    short_bytes = needed_bytes - (facts.free_bytes or 0)
    missing = []
    if short_bytes > 0:
        missing.append(Missing(resource="gpu_memory", short_bytes=short_bytes))
    ram_bytes = ram_needed_bytes(model)
    if machine.ram_bytes is not None and machine.ram_bytes < ram_bytes:
        missing.append(Missing(resource="ram", short_bytes=ram_bytes - machine.ram_bytes))
    plan = MachinePlan(
        runs=not missing,
        missing=tuple(missing),
        vram=None if short_bytes > 0 else plan_vram(facts, wishes),
        slots_count=None,
        decode=None,
        tokens_per_s=None,
        limited_by=None,
        sweep_s=None,
        prefill_tokens_per_s=None,
        ram_needed_bytes=ram_bytes,
        changes=(),
    )
    return _with_speed(plan, model, machine, wishes) if plan.runs else plan


def _with_speed(
    plan: MachinePlan, model: ModelShape, machine: Machine, wishes: VramWishes
) -> MachinePlan:
    assert plan.vram is not None
    roomy = plan_vram(_facts(model, machine, model.dense_bytes.low), wishes)
    slots = Range(low=plan.vram.slots_count, high=roomy.slots_count)
    rates = replace(machine.rates, host=_host_rate(model, machine))
    decode = decode_estimate(
        model,
        rates,
        FITTED,
        slots_count=slots,
        context_tokens=min(wishes.max_context_tokens or LEAST_CONTEXT_TOKENS, model.context_tokens),
    )
    sweep = prefill = None
    if not plan.vram.all_resident:
        sweep = Range(
            low=model.pool_bytes / rates.link.high, high=model.pool_bytes / rates.link.low
        )
        if plan.vram.two_layers:
            prefill = Range(low=CHUNK_TOKENS / sweep.high, high=CHUNK_TOKENS / sweep.low)
    wider = 1 + MODEL_ERROR_RATIO
    return replace(
        plan,
        slots_count=slots,
        decode=decode,
        tokens_per_s=Range(
            low=decode.tokens_per_s.low / wider, high=decode.tokens_per_s.high * wider
        ),
        limited_by=_limit(decode),
        sweep_s=sweep,
        prefill_tokens_per_s=prefill,
    )


def _facts(model: ModelShape, machine: Machine, dense_bytes: float) -> VramFacts:
    return VramFacts(
        free_bytes=max(machine.device_bytes - _DRIVER_BYTES, 0),
        own_bytes=0,
        dense_bytes=round(dense_bytes),
        workspace_bytes=_WORKSPACE_BYTES,
        state_bytes=0,
        graph_bytes=_GRAPH_BYTES,
        record_bytes=model.record_bytes,
        experts_count=model.experts_count,
        experts_per_layer_count=model.experts_per_layer_count,
        top_k=model.top_k,
        kv_page_bytes=_PAGE_TOKENS * model.kv_bytes_per_token,
        kv_page_tokens=_PAGE_TOKENS,
        model_context_tokens=model.context_tokens,
        max_running_count=_RUNNING_COUNT,
    )


def _host_rate(model: ModelShape, machine: Machine) -> Range:
    """B_H, or what so many cores can execute of this format."""
    host = machine.rates.host
    core_bytes_per_s = _CORE_BYTES_PER_S.get(model.weight_format)
    if machine.cores_count is None or core_bytes_per_s is None:
        return host
    most = machine.cores_count * core_bytes_per_s
    return Range(low=min(host.low, most), high=min(host.high, most))


def _limit(decode: DecodeEstimate) -> str:
    """The part of a token that takes longest, as a resource."""
    times: TokenTimes = decode.times
    device_s = times.dense_s + times.slots_s
    longest = max(times.fixed_s, device_s, times.misses_s)
    if longest == times.misses_s:
        all_filled = decode.fills_per_layer >= decode.misses_per_layer * (1 - 1e-9)
        return "link" if all_filled else "host_memory_rate"
    return "gpu_memory_rate" if longest == device_s else "fixed_costs"


def _changes(
    model: ModelShape, machine: Machine, wishes: VramWishes, plan: MachinePlan
) -> list[Change]:
    rates = machine.rates
    short = {one.resource: one.short_bytes for one in plan.missing}
    more_gpu = max(
        round(machine.device_bytes * MORE_RATIO),
        machine.device_bytes + short.get("gpu_memory", 0),
    )
    tried: list[tuple[str, float, float, Machine]] = [
        (
            "gpu_memory",
            machine.device_bytes,
            more_gpu,
            replace(machine, device_bytes=more_gpu),
        )
    ]
    for resource, name, rate in (
        ("gpu_memory_rate", "device", rates.device),
        ("link", "link", rates.link),
        ("host_memory_rate", "host", rates.host),
    ):
        faster = rate.times(MORE_RATIO)
        changed = replace(machine, rates=_with_rate(rates, name, faster))
        tried.append((resource, rate.middle, faster.middle, changed))
    if machine.cores_count is not None:
        cores = round(machine.cores_count * MORE_RATIO + 0.5)
        tried.append(("cores", machine.cores_count, cores, replace(machine, cores_count=cores)))
    if machine.ram_bytes is not None and "ram" in short:
        ram_bytes = machine.ram_bytes + short["ram"]
        tried.append(("ram", machine.ram_bytes, ram_bytes, replace(machine, ram_bytes=ram_bytes)))
    return [
        _change(resource, before, after, plan, _plan(model, changed, wishes))
        for resource, before, after, changed in tried
    ]


def _with_rate(rates: MachineRates, name: str, rate: Range) -> MachineRates:
    match name:
        case "device":
            return replace(rates, device=rate)
        case "link":
            return replace(rates, link=rate)
        case _:
            return replace(rates, host=rate)


def _change(
    resource: str, before: float, after: float, now: MachinePlan, then: MachinePlan
) -> Change:
    speed = then.decode.middle_tokens_per_s if then.decode is not None else None
    gain = None
    if speed is not None and now.decode is not None:
        gain = speed / now.decode.middle_tokens_per_s - 1
    return Change(
        resource=resource, before=before, after=after, tokens_per_s=speed, gain_ratio=gain
    )
