"""`freetokenctl top`: the state, followed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.errors import InvalidInputError
from freetokend.ctl.connection import connected, find_socket, monitor_stub
from freetokend.ctl.plain import plain
from freetokend.ctl.render import status_line, status_text

if TYPE_CHECKING:
    import grpc

# Home and clear line by line instead of clearing the screen: no flicker.
_HOME: Final = "\x1b[H"
_CLEAR_TO_LINE_END: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"
_CLEAR_SCREEN: Final = "\x1b[2J"


def top(arguments: argparse.Namespace) -> int:
    """Follow the state until Ctrl-C, the daemon's end, or `--count` updates."""
    if arguments.count < 0:
        raise InvalidInputError(f"--count {arguments.count} is below 0")
    if arguments.output == "json":
        show: Callable[[pb.Status], None] = _show_json
    elif sys.stdout.isatty():
        sys.stdout.write(_CLEAR_SCREEN)
        show = _show_in_place
    else:
        show = _show_line
    try:
        with connected(find_socket(arguments.socket)) as channel:
            _follow(channel, arguments, show)
    except KeyboardInterrupt:
        print()
    return 0


def _follow(
    channel: grpc.Channel, arguments: argparse.Namespace, show: Callable[[pb.Status], None]
) -> None:
    """Shows at most one state per interval, though the daemon tells every change."""
    request = pb.WatchStatusRequest(interval_s=arguments.interval_s)
    next_s = 0.0
    shown_count = 0
    for reply in monitor_stub(channel).WatchStatus(request):
        now_s = time.monotonic()
        if now_s < next_s:
            continue
        # A tenth of slack: the daemon's own message of the interval may come a little early.
        next_s = now_s + 0.9 * arguments.interval_s
        show(reply.status)
        shown_count += 1
        if shown_count == arguments.count:
            return


def _show_json(status: pb.Status) -> None:
    print(json.dumps(plain(status)), flush=True)


def _show_line(status: pb.Status) -> None:
    print(time.strftime("%H:%M:%S"), status_line(status), flush=True)


def _show_in_place(status: pb.Status) -> None:
    text = status_text(status).replace("\n", f"{_CLEAR_TO_LINE_END}\n")
    sys.stdout.write(f"{_HOME}{text}{_CLEAR_TO_LINE_END}\n{_CLEAR_BELOW}")
    sys.stdout.flush()
