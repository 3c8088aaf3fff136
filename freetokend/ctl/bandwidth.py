"""The verbs of bandwidths: bandwidth run, bandwidth show."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
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

EXIT_INTERRUPTED: Final = 75
# A long step may have to end before it begins.
_RUN_MARGIN_S: Final = 90.0


def run(arguments: argparse.Namespace) -> int:
    """Measure now, with progress on standard error; exit code 75 when it ended early."""
    request = pb.MeasureBandwidthRequest(parts=arguments.parts, limit_s=arguments.limit_s)
    result = pb.BandwidthResult()
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        timeout_s = arguments.limit_s + _RUN_MARGIN_S
        for response in admin_stub(channel).MeasureBandwidth(request, timeout=timeout_s):
            if response.WhichOneof("body") == "result":
                result = response.result
            elif arguments.output != "json":
                print(f"measuring {response.part} ...", file=sys.stderr)
    if arguments.output == "json":
        print_json(plain(result))
    else:
        print("\n".join(_result_text(result)))
    return EXIT_INTERRUPTED if result.interrupted else 0


def show(arguments: argparse.Namespace) -> int:
    """Print what is known; nothing is no error."""
    with connected(find_socket(arguments.socket)) as channel:
        stub = monitor_stub(channel)
        reply = stub.GetBandwidth(pb.GetBandwidthRequest(), timeout=ANSWER_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply))
    else:
        print("\n".join(show_text(reply)))
    return 0


def _result_text(result: pb.BandwidthResult) -> list[str]:
    lines = [f"measured in {format_seconds(result.duration_s)}", *_figures(result.figures)]
    lines += [f"not measured: {note}" for note in result.notes]
    if result.interrupted:
        left = ", ".join(result.parts_left) or "nothing"
        lines.append(f"ended early: {result.interrupted}; left: {left}")
    return lines


def show_text(reply: pb.GetBandwidthResponse) -> list[str]:
    """For people: what is served first, then what steps tell, then other profiles."""
    lines = [f"the stored profile was refused: {reply.problem}"] if reply.problem else []
    if reply.absent_reason:
        lines.append(f"no profile: {reply.absent_reason}")
    for entry in sorted(reply.entries, key=lambda one: not one.is_served):
        driver = f", driver {entry.driver_version}" if entry.driver_version else ""
        lines.append(
            f"{'served now' if entry.is_served else 'also stored'}: {entry.weight_format or 'none'}"
            f", experts of {format_bytes(entry.expert_bytes)}, {entry.kernel_build}{driver}; "
            f"{entry.measurements_count} measurements"
        )
        lines += _figures(entry.figures)
    if reply.passive:
        lines += ["by the steps that are served:", *_figures(reply.passive)]
    return lines


def _figures(figures: Iterable[pb.BandwidthFigure]) -> list[str]:
    lines = []
    for one in figures:
        is_rate = one.name.endswith("_bytes_per_s")
        value = format_bytes_per_s(one.bytes_per_s) if is_rate else f"{1e6 * one.fixed_s:.1f} us"
        name = one.name.removesuffix("_bytes_per_s").removesuffix("_s").replace("_", " ")
        threads = f" {one.threads_count} threads" if one.threads_count else ""
        age = "now" if one.age_s < 1 else f"{format_seconds(one.age_s)} ago"
        lines.append(f"  {name + threads:<24} {value:>12}  {one.source}, {age}")
    return lines
