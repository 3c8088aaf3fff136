"""The answer of `freetokenctl plan` for people."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from freetokend.core.units import format_bytes, format_bytes_per_s, format_seconds
from freetokend.policy.machine_model import MODEL_ERROR_RATIO, DecodeEstimate, ModelShape, Range
from freetokend.policy.machine_plan import CHUNK_TOKENS, Change, Machine, MachinePlan
from freetokend.policy.memory import gib

_LABEL_WIDTH: Final = 10
_RESOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gpu_memory": "GPU memory",
        "gpu_memory_rate": "a faster GPU memory",
        "link": "a faster link to the GPU (B_P)",
        "host_memory_rate": "a faster host memory (B_H)",
        "cores": "more cores",
        "ram": "host memory",
    }
)
_LIMITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "link": "missing experts, filled over the link (B_P)",
        "host_memory_rate": "missing experts, most executed by the CPU (B_H)",
        "gpu_memory_rate": "the GPU's own memory",
        "fixed_costs": "the fixed costs of each layer",
    }
)
# A change that gives less is not worth naming as the one to make.
_WORTH_RATIO: Final = 0.02


def plan_text(
    model: ModelShape, machine: Machine, found: MachinePlan, *, served: bool, given_rate: bool
) -> str:
    """Several lines, the verdict first."""
    lines = [_verdict(model, found)]
    if not served:
        lines.append(
            _line(
                "note", f"this version does not serve {model.architecture}; sizes and speeds hold"
            )
        )
    lines.append(_line("model", _model(model)))
    lines.append(_line("machine", _machine(machine, given_rate)))
    if found.vram is not None:
        lines.append(_line("GPU memory", "what is not weights, slots or KV is assumed:"))
        rows = [row for row in found.vram.rows if row.size_bytes]
        lines += [f"    {row.name:<18} {gib(row.size_bytes):>12}" for row in rows]
        lines.append(_line("", found.vram.split))
    lines.append(_line("RAM", _ram(machine, found)))
    lines += [_line(label, text) for label, text in _speeds(found)]
    lines += [_line(label, text) for label, text in _changes(found)]
    return "\n".join(lines)


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}} {text}"


def _verdict(model: ModelShape, found: MachinePlan) -> str:
    if found.tokens_per_s is not None:
        return f"{model.name} would run, at {_range(found.tokens_per_s)} tokens/s"
    short = " and ".join(
        f"{gib(one.short_bytes)} of {_RESOURCES[one.resource]}" for one in found.missing
    )
    text = f"{model.name} would not run: {short} too little"
    if all(one.resource == "gpu_memory" for one in found.missing):
        text += '; engine.backend = "cpu" would leave the GPU out'
    return text


def _model(model: ModelShape) -> str:
    return (
        f"{model.moe_layers_count} layers of {model.experts_per_layer_count} experts of "
        f"{format_bytes(model.record_bytes)} in {model.weight_format}, {model.top_k} per token: "
        f"{gib(model.pool_bytes)}; other weights {_gib_range(model.dense_bytes)}"
    )


def _machine(machine: Machine, given_rate: bool) -> str:
    rates = machine.rates
    parts = [
        f"GPU {gib(machine.device_bytes)} at {_rate_range(rates.device)}"
        + ("" if given_rate else " (assumed; --gpu-bandwidth narrows it)"),
        f"B_P {_rate_range(rates.link)}",
        f"B_H {_rate_range(rates.host)}",
    ]
    if machine.cores_count is not None:
        parts.append(f"{machine.cores_count} cores")
    if machine.ram_bytes is not None:
        parts.append(f"RAM {gib(machine.ram_bytes)}")
    return ", ".join(parts)


def _ram(machine: Machine, found: MachinePlan) -> str:
    needed = f"{gib(found.ram_needed_bytes)} needed"
    if machine.ram_bytes is None:
        return f"{needed} (not compared: --ram-gib is not given)"
    return f"{needed}, there are {gib(machine.ram_bytes)}"


def _speeds(found: MachinePlan) -> list[tuple[str, str]]:
    decode, speed, slots = found.decode, found.tokens_per_s, found.slots_count
    if decode is None or speed is None or slots is None or found.vram is None:
        return []
    times = decode.times
    lines = [
        (
            "cache",
            f"{_range(slots)} slots; {decode.miss_ratio:.0%} of the experts needed are missing, "
            f"{decode.misses_per_layer:.1f} per layer, {_served_by(decode)}",
        ),
        (
            "decode",
            f"{_range(speed)} tokens/s, about {decode.middle_tokens_per_s:.1f} (the ranges of what "
            f"is given, and {MODEL_ERROR_RATIO:.0%} for the model of the machine)",
        ),
        (
            "a token",
            f"{_ms(times.misses_s)} missing experts + {_ms(times.dense_s)} other weights and KV + "
            f"{_ms(times.slots_s)} experts + {_ms(times.fixed_s)} fixed = {_ms(times.total_s)}",
        ),
        ("limit", _LIMITS[found.limited_by or "fixed_costs"]),
    ]
    return [*lines, ("prefill", _prefill(found))]


def _served_by(decode: DecodeEstimate) -> str:
    if decode.fills_per_layer >= decode.misses_per_layer * (1 - 1e-9):
        return "all of them filled"
    return f"of which {decode.fills_per_layer:.1f} are filled and the CPU executes the others"


def _prefill(found: MachinePlan) -> str:
    if found.sweep_s is None:
        return "every expert is resident: the link does not bound it"
    sweep = f"{format_seconds(found.sweep_s.low)} to {format_seconds(found.sweep_s.high)}"
    if found.sweep_s.low == found.sweep_s.high:
        sweep = format_seconds(found.sweep_s.low)
    if found.prefill_tokens_per_s is None:
        return (
            f"less than two layers of slots: experts are loaded on demand, the pool takes {sweep} "
            "over the link"
        )
    return (
        f"at most {_range(found.prefill_tokens_per_s)} tokens/s: up to {CHUNK_TOKENS} tokens take "
        f"one pass of the pool over the link, {sweep}"
    )


def _changes(found: MachinePlan) -> list[tuple[str, str]]:
    lines = [("one change", _change(one)) for one in found.changes]
    lines = [("one change" if not index else "", text) for index, (_, text) in enumerate(lines)]
    best = found.changes[0] if found.changes else None
    if best is None or best.tokens_per_s is None:
        return [*lines, ("buy", "no single change of these makes it run")]
    if best.gain_ratio is not None and best.gain_ratio < _WORTH_RATIO:
        return [*lines, ("buy", "nothing: no single change helps much")]
    return [*lines, ("buy", f"{_RESOURCES[best.resource]}: of single changes it helps most")]


def _change(change: Change) -> str:
    if change.resource == "cores":
        sizes = f"{change.before:g} to {change.after:g}"
    elif change.resource in ("gpu_memory", "ram"):
        sizes = f"{gib(round(change.before))} to {gib(round(change.after))}"
    else:
        sizes = f"{format_bytes_per_s(change.before)} to {format_bytes_per_s(change.after)}"
    text = f"{_RESOURCES[change.resource]}, {sizes}: "
    if change.tokens_per_s is None:
        return f"{text}still does not run"
    gain = "" if change.gain_ratio is None else f" ({change.gain_ratio:+.0%})"
    return f"{text}about {change.tokens_per_s:.1f} tokens/s{gain}"


def _range(value: Range) -> str:
    low, high = _figure(value.low), _figure(value.high)
    return low if low == high else f"{low} to {high}"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def _gib_range(value: Range) -> str:
    low, high = gib(round(value.low)), gib(round(value.high))
    return low if low == high else f"{low} to {high}"


def _rate_range(value: Range) -> str:
    low, high = format_bytes_per_s(value.low), format_bytes_per_s(value.high)
    return low if low == high else f"{low} to {high}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
