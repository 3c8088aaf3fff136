"""The verbs of the device's memory: resize, sleep, wake, hold, holds, events."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.errors import FreetokenError, InvalidInputError, Reason, reaction
from freetokend.core.units import format_bytes, format_seconds, parse_bytes
from freetokend.ctl.connection import (
    ANSWER_TIMEOUT_S,
    admin_stub,
    connected,
    find_socket,
    monitor_stub,
)
from freetokend.ctl.plain import enum_name, plain, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

# As long as the daemon waits for an engine that has a long step.
_WAIT_TIMEOUT_S: Final = 120 + ANSWER_TIMEOUT_S
_NOT_YET: Final = frozenset({pb.RESIZE_OUTCOME_PENDING, pb.RESIZE_OUTCOME_DEFERRED})


def resize(arguments: argparse.Namespace) -> int:
    """Ask for other sizes; the exit code of "not yet" for what cannot be done now."""
    request = resize_request(arguments)
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        reply = admin_stub(channel).Resize(request, timeout=_WAIT_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply))
    else:
        print("\n".join(resized_text(reply)))
    if reply.outcome == pb.RESIZE_OUTCOME_FAILED:
        return reaction(Reason.DEVICE_MEMORY).exit_code
    return reaction(Reason.DRAINING).exit_code if reply.outcome in _NOT_YET else 0


def resize_request(arguments: argparse.Namespace) -> pb.ResizeRequest:
    """What the command line asks for. Raises InvalidInputError for what is no size."""
    wait = arguments.wait
    if arguments.slots is not None:
        text = arguments.slots
        if text.endswith("%"):
            ratio = _number("--slots", text.removesuffix("%")) / 100
            return pb.ResizeRequest(slots_ratio=ratio, wait=wait)
        return pb.ResizeRequest(slots_count=_whole("--slots", text), wait=wait)
    if arguments.vram is not None:
        return pb.ResizeRequest(vram_bytes=_bytes("--vram", arguments.vram), wait=wait)
    if arguments.kv is not None:
        text = arguments.kv.removesuffix("k")
        tokens = _whole("--kv", text) * (1024 if text != arguments.kv else 1)
        return pb.ResizeRequest(kv_tokens=tokens, wait=wait)
    return pb.ResizeRequest(preset=arguments.preset, wait=wait)


def resized_text(reply: pb.ResizeResponse) -> list[str]:
    """What became of it, with the numbers."""
    outcome = enum_name(pb.ResizeResponse.DESCRIPTOR.fields_by_name["outcome"], reply.outcome)
    lines = [f"{outcome}: {sizes_text(reply.before)} -> {sizes_text(reply.after)}"]
    if reply.target != reply.after:
        lines.append(f"  decided    {sizes_text(reply.target)}")
    if reply.outcome == pb.RESIZE_OUTCOME_DONE:
        lines.append(
            f"  stall      {format_seconds(reply.stall_s)}, after a wait of "
            f"{format_seconds(reply.safe_point_wait_s)} (generation {reply.generation})"
        )
    return [*lines, f"  why        {reply.reason}"]


def sizes_text(sizes: pb.ElasticSizes) -> str:
    """On one line."""
    return (
        f"{sizes.slots_count} slots, {sizes.kv_pages_count} KV pages, "
        f"{format_bytes(sizes.size_bytes)}"
    )


def sleep(arguments: argparse.Namespace) -> int:
    """Give the card back; the exit code of "not yet" while requests run."""
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        reply = admin_stub(channel).Sleep(pb.SleepRequest(), timeout=_WAIT_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply))
    else:
        print("asleep until a request comes" if reply.asleep else f"not yet: {reply.reason}")
    return 0 if reply.asleep else reaction(Reason.DRAINING).exit_code


def wake(arguments: argparse.Namespace) -> int:
    """Take the card again."""
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        reply = admin_stub(channel).Wake(pb.WakeRequest(), timeout=_WAIT_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply))
    else:
        print("awake" if reply.awake else f"still asleep: {reply.reason}")
    return 0 if reply.awake else reaction(Reason.DEVICE_MEMORY).exit_code


def hold(arguments: argparse.Namespace) -> int:
    """Hold until Ctrl-C, or while a command runs, whose exit code is passed on."""
    request = pb.HoldRequest(
        vram_bytes=_bytes("--vram", arguments.vram),
        reason=arguments.reason or " ".join(arguments.command) or "freetokenctl hold",
    )
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        call = admin_stub(channel).Hold(request)
        try:
            for reply in call:
                what = f"{format_bytes(reply.hold.vram_bytes)} held ({reply.hold.hold_id})"
                told = "free now" if reply.granted else f"not free yet: {reply.reason}"
                print(f"{what}: {told}", file=sys.stderr, flush=True)
                if reply.granted and arguments.command:
                    return _run(arguments.command)
        except KeyboardInterrupt:
            return 0
        finally:
            call.cancel()
    return 0


def _run(command: Sequence[str]) -> int:
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise FreetokenError(
            f"{command[0]} cannot be started: {error.strerror}", reason=Reason.IO_FAILED
        ) from error


def holds(arguments: argparse.Namespace) -> int:
    """Print the holds that stand."""
    with connected(find_socket(arguments.socket)) as channel:
        reply = monitor_stub(channel).ListHolds(pb.ListHoldsRequest(), timeout=ANSWER_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply))
        return 0
    for one in reply.holds:
        print(f"{one.hold_id}  {format_bytes(one.vram_bytes):>9}  {one.reason}")
    if not reply.holds:
        print("no holds")
    return 0


def events(arguments: argparse.Namespace) -> int:
    """Print what happened to the memory, and with -w what happens from now on."""
    request = pb.WatchEventsRequest(after_index=arguments.after, follow=arguments.watch)
    with (
        contextlib.suppress(KeyboardInterrupt),
        connected(find_socket(arguments.socket)) as channel,
    ):
        for reply in monitor_stub(channel).WatchEvents(request):
            if arguments.output == "json":
                print(json.dumps(plain(reply.event)), flush=True)
            else:
                print(event_text(reply.event), flush=True)
    return 0


def event_text(event: pb.Event) -> str:
    """One line."""
    kind = enum_name(pb.Event.DESCRIPTOR.fields_by_name["kind"], event.kind).replace("_", "-")
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time_s))
    return f"{event.event_index:>5}  {clock}  {kind:<11}  {event.code:<12}  {event.text}"


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InvalidInputError(f"{option}: {error}", param=option) from None


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(f'{option}: "{text}" is not a number', param=option) from None


def _whole(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise InvalidInputError(
            f'{option}: "{text}" is not a whole number of at most nine digits', param=option
        )
    return int(text)
