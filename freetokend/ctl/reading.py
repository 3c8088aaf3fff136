"""The verbs that only read: status, wait, version, config show."""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Final

import freetokend
from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.errors import FreetokenError, InvalidInputError, Reason, UnavailableError
from freetokend.ctl.connection import ANSWER_TIMEOUT_S, connected, find_socket, monitor_stub
from freetokend.ctl.plain import plain, print_json
from freetokend.ctl.render import status_text

_RETRY_S: Final = 0.25


def status(arguments: argparse.Namespace) -> int:
    """Print the state once."""
    with connected(find_socket(arguments.socket)) as channel:
        reply = monitor_stub(channel).GetStatus(pb.GetStatusRequest(), timeout=ANSWER_TIMEOUT_S)
    if arguments.output == "json":
        print_json(plain(reply.status))
    else:
        print(status_text(reply.status))
    return 0


def version(arguments: argparse.Namespace) -> int:
    """Print our version and the daemon's; no daemon is no error here."""
    daemon: str | None = None
    try:
        with connected(find_socket(arguments.socket)) as channel:
            daemon = (
                monitor_stub(channel)
                .GetVersion(pb.GetVersionRequest(), timeout=ANSWER_TIMEOUT_S)
                .version
            )
    except UnavailableError:
        daemon = None
    if arguments.output == "json":
        print_json({"client": freetokend.__version__, "daemon": daemon})
    else:
        print(f"freetokenctl {freetokend.__version__}")
        print(f"freetokend   {daemon or '(not running)'}")
    return 0


def config_show(arguments: argparse.Namespace) -> int:
    """Print the resolved configuration as TOML, or with origins as a table, or as JSON."""
    with connected(find_socket(arguments.socket)) as channel:
        values = (
            monitor_stub(channel).GetConfig(pb.GetConfigRequest(), timeout=ANSWER_TIMEOUT_S).values
        )
    if arguments.output == "json":
        print_json([plain(value) for value in values])
    elif arguments.origin:
        width = max((len(f"{value.key} = {value.value}") for value in values), default=0)
        for value in values:
            reason = f"  ({value.reason})" if value.reason else ""
            print(f"{f'{value.key} = {value.value}':<{width}}  # {value.origin}{reason}")
    else:
        _print_toml(list(values))
    return 0


def _print_toml(values: list[pb.ConfigValue]) -> None:
    table = ""
    for value in values:
        own_table, _, leaf = value.key.partition(".")
        if own_table != table:
            print(f"[{own_table}]" if not table else f"\n[{own_table}]")
            table = own_table
        print(f"{leaf} = {value.value}")


def wait(arguments: argparse.Namespace) -> int:
    """Return once the service takes requests.

    Raises `UnavailableError` at the deadline, and at once `FreetokenError` of the same exit code
    as "not running" when the engine has failed for good.
    """
    if not 0 < arguments.timeout_s < math.inf:
        raise InvalidInputError(f"--timeout {arguments.timeout_s:g} is not a time above 0")
    started_s = time.monotonic()
    deadline_s = started_s + arguments.timeout_s
    told = _Told()
    problem: UnavailableError | None = None
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with connected(find_socket(arguments.socket)) as channel:
                request = pb.WatchStatusRequest()
                for reply in monitor_stub(channel).WatchStatus(request, timeout=left_s):
                    told.tell(reply.status)
                    if reply.status.ready:
                        if arguments.output == "json":
                            print_json({"ready": True, "wait_s": time.monotonic() - started_s})
                        return 0
                    _check_hope(reply.status)
        except UnavailableError as error:
            problem = error
        # No daemon yet, or it went away: it may be just (re)starting.
        time.sleep(min(_RETRY_S, left_s))
    if told.reason:
        raise UnavailableError(
            f"not ready after {arguments.timeout_s:g} s: {told.reason}", reason=Reason.LOADING
        )
    raise problem or UnavailableError("freetokend did not answer in time")


class _Told:
    """Tells a person at a terminal, on standard error, what is being waited for."""

    def __init__(self) -> None:
        self.reason = ""

    def tell(self, status: pb.Status) -> None:
        if status.ready_reason != self.reason:
            self.reason = status.ready_reason
            if self.reason and sys.stderr.isatty():
                print(f"not ready yet: {self.reason}", file=sys.stderr)


def _check_hope(status: pb.Status) -> None:
    if status.engine.state == pb.ENGINE_STATE_FAILED:
        cause = status.engine.cause or status.ready_reason
        raise FreetokenError(
            f"freetokend cannot become ready: {cause}", reason=Reason.ENGINE_UNAVAILABLE
        )
