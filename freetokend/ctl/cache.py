"""The verbs of the expert cache: cache, verify-cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.units import format_bytes, format_bytes_per_s, format_seconds
from freetokend.ctl.connection import (
    ANSWER_TIMEOUT_S,
    admin_stub,
    connected,
    find_socket,
    monitor_stub,
)
from freetokend.ctl.plain import plain, print_json

EXIT_DIFFERENT: Final = 1
# Tens of gigabytes are compared, perhaps after a long step.
_VERIFY_TIMEOUT_S: Final = 120 + ANSWER_TIMEOUT_S
_LABEL_WIDTH: Final = 10


def cache(arguments: argparse.Namespace) -> int:
    """Print the cache layer by layer; no cache is no error."""
    with connected(find_socket(arguments.socket)) as channel:
        reply = monitor_stub(channel).GetCache(pb.GetCacheRequest(), timeout=ANSWER_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply))
    else:
        print("\n".join(cache_text(reply)))
    return 0


def verify_cache(arguments: argparse.Namespace) -> int:
    """Compare the cache with the weights; exit code 1 when a slot differs."""
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        reply = admin_stub(channel).VerifyCache(pb.VerifyCacheRequest(), timeout=_VERIFY_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply))
    else:
        print("\n".join(_verified(reply)))
    return EXIT_DIFFERENT if reply.differences else 0


def cache_text(reply: pb.GetCacheResponse) -> list[str]:
    """For people: sizes, use, the split, then a table of the layers."""
    if not reply.HasField("summary"):
        return [f"no expert cache: {reply.absent_reason}"]
    summary, device = reply.summary, reply.device
    where = f"{device.device} ({device.device_name})" if device.device_name else device.device
    lines = [f"expert cache on {where}; backend {device.backend}: {device.backend_reason}"]
    lines += [
        f"  {label:<{_LABEL_WIDTH}} {text}"
        for label, text in (
            ("slots", _slots(summary)),
            ("hits", _hits(summary)),
            ("misses", _misses(summary)),
            ("link", _link(summary)),
            ("q", _q(reply.fill_table)),
            ("rates", summary.fill_rate_source),
        )
        if text
    ]
    return [*lines, "", *_layers(reply.layers)]


def cache_line(summary: pb.CacheSummary) -> str:
    """One line, for `status`."""
    return f"{_slots(summary)}; hits {_hits(summary)}"


def _slots(summary: pb.CacheSummary) -> str:
    return (
        f"{summary.slots_count} of at most {summary.slots_capacity_count} "
        f"({format_bytes(summary.committed_bytes)}), {summary.resident_count} of "
        f"{summary.experts_count} experts resident"
    )


def _hits(summary: pb.CacheSummary) -> str:
    asked_count = summary.hits_count + summary.misses_count
    if not asked_count:
        return "none yet, no decode step was computed"
    return f"{summary.hit_ratio:.1%} of {asked_count} experts that decode steps asked for"


def _misses(summary: pb.CacheSummary) -> str:
    if not summary.misses_count:
        return ""
    return (
        f"{summary.misses_count}: {summary.decode_fills_count} filled, {summary.cpu_count} "
        f"executed by the CPU; {summary.evictions_count} experts evicted"
    )


def _link(summary: pb.CacheSummary) -> str:
    if not summary.fills_count:
        return ""
    text = f"{summary.fills_count} fills, {format_bytes(summary.fill_bytes)}"
    if summary.fill_busy_s > 0:
        rate = format_bytes_per_s(summary.fill_bytes_per_s)
        text += f" in {format_seconds(summary.fill_busy_s)} ({rate})"
    return f"{text}; {summary.streamed_count} streamed by prefill"


def _q(table: Sequence[pb.FillBucket]) -> str:
    """The first bucket in runs: "of 1-4 missing experts 1 is filled, of 5-8 2, ..."."""
    if not table or len(table[0].fill_count) < 2:
        return ""
    runs = [
        (filled, [missing for missing, _ in group])
        for filled, group in groupby(enumerate(table[0].fill_count), key=lambda one: one[1])
    ]
    told = [
        f"{filled} of {missing[0]}" + (f"-{missing[-1]}" if len(missing) > 1 else "")
        for filled, missing in ((filled, [m for m in missing if m]) for filled, missing in runs)
        if missing
    ]
    return f"filled of missing experts, one token each: {', '.join(told)}"


def _layers(layers: Iterable[pb.CacheLayer]) -> list[str]:
    """A table, and the reason of each run of branches below it."""
    layers = list(layers)
    lines = [
        f"{'layer':>5}  {'branch':<8}  {'hit ratio':>9}  {'hits':>10}  {'misses':>10}  "
        f"{'fills':>10}  {'cpu':>10}  {'evicted':>10}"
    ]
    for one in layers:
        ratio = f"{one.hit_ratio:.1%}" if one.hits_count + one.misses_count else "-"
        lines.append(
            f"{one.layer_index:>5}  {one.branch:<8}  {ratio:>9}  {one.hits_count:>10}  "
            f"{one.misses_count:>10}  {one.fills_count:>10}  {one.cpu_count:>10}  "
            f"{one.evictions_count:>10}"
        )
    lines.append("")
    for (branch, reason), group in groupby(layers, key=lambda one: (one.branch, one.branch_reason)):
        run = [one.layer_index for one in group]
        name = f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]}-{run[-1]}"
        lines.append(f"{name}: {branch} ({reason})")
    return lines


def _verified(reply: pb.VerifyCacheResponse) -> list[str]:
    compared = (
        f"{reply.compared_count} slots ({format_bytes(reply.compared_bytes)}) compared with the "
        f"weights in {format_seconds(reply.duration_s)}"
    )
    if not reply.differences:
        return [f"{compared}: no difference"]
    count = len(reply.differences)
    differ = "1 differs" if count == 1 else f"{count} differ"
    return [
        f"{compared}: {differ}. Restart the engine, and suspect the memory of the device:",
        *(
            f"  layer {one.layer_index}, expert {one.expert_index}: slot {one.slot_index} differs "
            f"from byte {one.offset_bytes} on"
            for one in reply.differences
        ),
    ]
