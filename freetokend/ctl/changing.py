"""The verbs that change something: drain, resume, stop, log-level."""

from __future__ import annotations

import argparse
import time
from typing import Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.errors import Reason, UnavailableError, reaction
from freetokend.core.units import format_seconds
from freetokend.ctl.connection import (
    ANSWER_TIMEOUT_S,
    admin_stub,
    connected,
    find_socket,
    is_listened_on,
    monitor_stub,
)
from freetokend.ctl.plain import print_json

_POLL_S: Final = 0.05
# The longest drain that the daemon accepts, and time for its answer.
_DRAIN_ANSWER_TIMEOUT_S: Final = 3600 + ANSWER_TIMEOUT_S


def drain(arguments: argparse.Namespace) -> int:
    """Drain; the exit code of "not yet" when requests still run at the deadline."""
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        reply = admin_stub(channel).Drain(
            pb.DrainRequest(timeout_s=arguments.timeout_s), timeout=_DRAIN_ANSWER_TIMEOUT_S
        )
    if arguments.output == "json":
        print_json({"drained": reply.drained, "running_count": reply.running_count})
    elif reply.drained:
        print("drained: no request runs, new ones are refused until `freetokenctl resume`")
    else:
        plural = "request still runs" if reply.running_count == 1 else "requests still run"
        print(
            f"not drained: {reply.running_count} {plural}, new ones are refused until "
            "`freetokenctl resume`"
        )
    return 0 if reply.drained else reaction(Reason.DRAINING).exit_code


def resume(arguments: argparse.Namespace) -> int:
    """Accept requests again."""
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        admin_stub(channel).Resume(pb.ResumeRequest(), timeout=ANSWER_TIMEOUT_S)
    if arguments.output == "json":
        print_json({"resumed": True})
    else:
        print("requests are accepted again")
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """Stop the daemon and wait until its socket is gone."""
    path = find_socket(arguments.socket, admin=True)
    started_s = time.monotonic()
    with connected(path) as channel:
        admin_stub(channel).Stop(pb.StopRequest(drain=not arguments.now), timeout=ANSWER_TIMEOUT_S)
    while is_listened_on(path):
        if time.monotonic() - started_s > arguments.timeout_s:
            raise UnavailableError(
                f"freetokend is stopping, but has not ended after {arguments.timeout_s:g} s",
                reason=Reason.DRAINING,
            )
        time.sleep(_POLL_S)
    stop_s = time.monotonic() - started_s
    if arguments.output == "json":
        print_json({"stopped": True, "stop_s": stop_s})
    else:
        print(f"stopped after {format_seconds(stop_s)}")
    return 0


def log_level(arguments: argparse.Namespace) -> int:
    """Show the level, or set it."""
    if arguments.level is None:
        with connected(find_socket(arguments.socket)) as channel:
            reply = monitor_stub(channel).GetStatus(pb.GetStatusRequest(), timeout=ANSWER_TIMEOUT_S)
        if arguments.output == "json":
            print_json({"level": reply.status.log_level, "previous_level": None})
        else:
            print(reply.status.log_level)
        return 0
    with connected(find_socket(arguments.socket, admin=True)) as channel:
        change = admin_stub(channel).SetLogLevel(
            pb.SetLogLevelRequest(level=arguments.level), timeout=ANSWER_TIMEOUT_S
        )
    if arguments.output == "json":
        print_json({"level": arguments.level, "previous_level": change.previous})
    else:
        print(f"{arguments.level} (was {change.previous})")
    return 0
