"""The state of the service as text for a person."""

from __future__ import annotations

from collections.abc import Iterable

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.units import format_bytes, format_bytes_per_s, format_seconds
from freetokend.ctl.cache import cache_line
from freetokend.ctl.machine import machine_lines

_LABEL_WIDTH = 10


def status_text(status: pb.Status) -> str:
    """Several lines, the most important first."""
    lines = [_headline(status), *_engine(status)]
    for label, text in (
        ("model", _model(status)),
        ("device", _device(status)),
        ("pool", _pool(status)),
        ("cache", cache_line(status.cache) if status.HasField("cache") else ""),
        ("memory", _memory(status)),
        ("requests", _requests(status)),
        ("speed", _speed(status)),
        ("kv cache", _kv(status)),
        ("http", status.http_address or "not listening yet"),
    ):
        if text:
            lines.append(_line(label, text))
    if status.HasField("machine"):
        lines += [_line(label, text) for label, text in machine_lines(status.machine)]
    lines += [_line(_severity(warning), _warning(warning)) for warning in status.warnings]
    return "\n".join(lines)


def status_line(status: pb.Status) -> str:
    """One line, for `top` without a terminal."""
    requests, kv = status.requests, status.kv
    parts = [
        state_name(status),
        f"running={requests.running_count}",
        f"waiting={requests.waiting_count}",
        f"decode_tokens_per_s={requests.decode_tokens_per_s:.1f}",
        f"prefill_tokens_per_s={requests.prefill_tokens_per_s:.1f}",
        f"kv_pages={kv.pages_used_count}/{kv.pages_total_count}",
    ]
    if status.HasField("cache"):
        parts.append(f"cache_hits={status.cache.hit_ratio:.1%}")
    if status.engine.HasField("load"):
        load = status.engine.load
        parts.append(f"loaded={format_bytes(load.done_bytes)}/{format_bytes(load.total_bytes)}")
    parts += [f"{_severity(warning)}={warning.code}" for warning in status.warnings]
    return " ".join(parts)


def state_name(status: pb.Status) -> str:
    """ "ready", "loading", ..."""
    return pb.EngineState.Name(status.engine.state).removeprefix("ENGINE_STATE_").lower()


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}} {text}"


def _headline(status: pb.Status) -> str:
    if status.ready:
        state = "ready" if status.progressing else "ready, but stuck"
    else:
        state = f"not ready: {status.ready_reason}"
    return f"freetokend {status.version}, {state} (up {format_seconds(status.uptime_s)})"


def _engine(status: pb.Status) -> list[str]:
    engine = status.engine
    lines = []
    if engine.HasField("load") and engine.load.total_bytes:
        load = engine.load
        share = load.done_bytes / load.total_bytes
        lines.append(
            _line(
                "loading",
                f"{load.stage.replace('_', ' ')}: {format_bytes(load.done_bytes)} of "
                f"{format_bytes(load.total_bytes)} ({share:.0%})",
            )
        )
    if engine.cause:
        count = engine.restarts_count
        restarts = f", {count} restart{'' if count == 1 else 's'}" if count else ""
        lines.append(_line("last end", f"{engine.cause}{restarts}"))
    if engine.next_restart_s:
        lines.append(_line("restart", f"in {format_seconds(engine.next_restart_s)}"))
    return lines


def _model(status: pb.Status) -> str:
    model = status.model
    parts = [model.model or "none"]
    if model.servable_context_tokens:
        parts.append(f"context {model.servable_context_tokens} tokens")
    if model.moe_layers_count:
        parts.append(
            f"{model.layers_count} layers, {model.moe_layers_count} with "
            f"{model.experts_per_layer_count} experts of {format_bytes(model.bytes_per_expert)}"
        )
    elif model.layers_count:
        parts.append(f"{model.layers_count} layers")
    formats = [f"experts in {model.expert_format}"] if model.expert_format else []
    if model.dense_formats:
        formats.append(f"the rest in {' and '.join(model.dense_formats)}")
    return "; ".join([", ".join(parts), *([", ".join(formats)] if formats else [])])


def _device(status: pb.Status) -> str:
    device = status.device
    if not device.device:
        return ""
    name = f" ({device.device_name})" if device.device_name else ""
    parts = [f"{device.device}{name}"]
    if device.kernel:
        parts.append(device.kernel)
    if device.numerics:
        parts.append(f"{device.numerics} numerics")
    if device.threads_count:
        parts.append(_threads(device))
    why = f"; backend {device.backend}: {device.backend_reason}" if device.backend_reason else ""
    return ", ".join(parts) + why


def _threads(device: pb.DeviceStatus) -> str:
    count = device.threads_count
    text = f"{count} thread{'' if count == 1 else 's'}"
    if device.cpus:
        text += f" on CPU{'' if len(device.cpus) == 1 else 's'} {_ranges(device.cpus)}"
    return f"{text} ({device.threads_reason})" if device.threads_reason else text


def _ranges(numbers: Iterable[int]) -> str:
    """ "0-3,8": runs of numbers in the kernel's notation."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _pool(status: pb.Status) -> str:
    pool = status.pool
    if not pool.size_bytes:
        return ""
    parts = [f"{format_bytes(pool.size_bytes)} in pages of {format_bytes(pool.page_bytes)}"]
    pinned = format_bytes(pool.pinned_bytes)
    if pool.pinned_bytes >= pool.size_bytes:
        parts.append("all pinned")
    elif pool.pin_done:
        parts.append(f"{pinned} pinned")
    else:
        parts.append(f"{pinned} pinned so far")
    if pool.reattached:
        parts.append(f"re-attached in {format_seconds(pool.attach_s)}")
    elif pool.load_s:
        rate = format_bytes_per_s(pool.load_bytes_per_s)
        parts.append(f"loaded in {format_seconds(pool.load_s)} ({rate})")
    return ", ".join(parts)


def _requests(status: pb.Status) -> str:
    requests = status.requests
    return (
        f"{requests.running_count} running, {requests.waiting_count} waiting; "
        f"{requests.finished_count} finished, {requests.failed_count} failed, "
        f"{requests.cancelled_count} cancelled"
    )


def _speed(status: pb.Status) -> str:
    requests = status.requests
    text = (
        f"{requests.decode_tokens_per_s:.1f} tokens/s answered, "
        f"{requests.prefill_tokens_per_s:.1f} tokens/s of prompts read"
    )
    if status.engine.progress_age_s >= 1:
        text += f"; last progress {format_seconds(status.engine.progress_age_s)} ago"
    return text


def _memory(status: pb.Status) -> str:
    """What the engine uses the card for, and why it is that."""
    elastic = status.elastic
    if not elastic.HasField("actual"):
        return ""
    held = f"{format_bytes(elastic.actual.size_bytes)} of slots and KV"
    return f"{'asleep' if elastic.asleep else held}; {elastic.reason}"


def _kv(status: pb.Status) -> str:
    kv = status.kv
    if not kv.pages_total_count:
        return ""
    return (
        f"{kv.pages_used_count} of {kv.pages_total_count} pages used "
        f"({format_bytes(kv.size_bytes)} in all)"
    )


def _severity(warning: pb.Warning) -> str:
    return pb.Severity.Name(warning.severity).removeprefix("SEVERITY_").lower()


def _warning(warning: pb.Warning) -> str:
    return f"{warning.text} [{warning.code}]"
