"""Finds the daemon's socket, speaks to it, and turns what goes wrong into typed errors."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from freetokend.core.errors import AccessError, FreetokenError, Reason, UnavailableError
from freetokend.core.runtime_dir import (
    ADMIN_SOCKET_NAME,
    MONITOR_SOCKET_NAME,
    SOCKET_VARIABLE,
    client_runtime_dirs,
)

if TYPE_CHECKING:
    import grpc

    from freetokend.api.control.v1.control_pb2_grpc import AdminStub, MonitorStub

ANSWER_TIMEOUT_S: Final = 10.0

# As the link allows: the routing of a long prompt is one message.
_MAX_MESSAGE_BYTES: Final = 64 << 20
_CONNECT_TIMEOUT_S: Final = 5.0
_REASON_KEY: Final = "freetoken-reason"
_HOW_TO_START: Final = (
    "Start it with `sudo systemctl start freetokend`, or with `freetokend --model DIR`"
)


def candidates(given: str | None, environ: Mapping[str, str], *, admin: bool) -> list[str]:
    """Socket paths to try, in order. One that was named explicitly is the only one."""
    named = given or environ.get(SOCKET_VARIABLE, "")
    if named:
        return [named.removeprefix("unix:")]
    names = (ADMIN_SOCKET_NAME,) if admin else (ADMIN_SOCKET_NAME, MONITOR_SOCKET_NAME)
    directories = client_runtime_dirs(environ, os.getuid())
    return [f"{directory}/{name}" for directory in directories for name in names]


def find_socket(given: str | None, *, admin: bool = False) -> str:
    """The first candidate on which somebody listens and lets us in.

    `admin` leaves out the monitor sockets. Raises `UnavailableError` (no daemon) or `AccessError`
    with what to do about it.
    """
    paths = candidates(given, os.environ, admin=admin)
    denied = ""
    for path in paths:
        problem = _connect_problem(path)
        if problem == 0:
            return path
        if problem in (errno.EACCES, errno.EPERM) and not denied:
            denied = path
    if denied:
        raise AccessError(_denied_text(denied, admin=admin))
    tried = paths[0] if len(paths) == 1 else f"any of {', '.join(paths)}"
    raise UnavailableError(
        f"freetokend is not running: nobody listens on {tried}. {_HOW_TO_START}; if it runs with "
        "other sockets, name one with --socket."
    )


def is_listened_on(path: str) -> bool:
    """Whether a daemon still accepts connections at `path`."""
    return _connect_problem(path) not in (errno.ECONNREFUSED, errno.ENOENT)


def _connect_problem(path: str) -> int:
    """0, or the errno of connecting: cheaper and clearer than what a gRPC channel says."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno or errno.ENOENT  # too long a path has no errno
    return 0


def _denied_text(path: str, *, admin: bool) -> str:
    group = ""
    with contextlib.suppress(OSError, KeyError):
        import grp  # noqa: PLC0415 - only for this message

        status = os.stat(path)
        if status.st_mode & stat.S_IWGRP and status.st_gid:
            group = grp.getgrgid(status.st_gid).gr_name
    what = "steer" if admin else "reach"
    join = f", or join its group: `sudo usermod -aG {group} $USER`" if group else ""
    return f"this user may not {what} freetokend: {path} denies it. Use sudo{join}."


@contextlib.contextmanager
def connected(path: str) -> Iterator[grpc.Channel]:
    """A channel to the daemon at `path`; gRPC's errors leave as `FreetokenError`."""
    # gRPC's own remarks are for its developers; what we print must stand alone.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc  # noqa: PLC0415 - costs more than the rest of the program

    options = (
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    )
    try:
        with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
            yield channel
    except grpc.RpcError as error:
        raise _typed(error, path) from error


def monitor_stub(channel: grpc.Channel) -> MonitorStub:
    """The read-only service on `channel`."""
    # The generated module imports gRPC, as `connected` has just done.
    from freetokend.api.control.v1 import control_pb2_grpc  # noqa: PLC0415

    return control_pb2_grpc.MonitorStub(channel)  # type: ignore[no-untyped-call]


def admin_stub(channel: grpc.Channel) -> AdminStub:
    """The changing service on `channel`."""
    from freetokend.api.control.v1 import control_pb2_grpc  # noqa: PLC0415 - as above

    return control_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]


def _typed(error: grpc.RpcError, path: str) -> FreetokenError:
    code = error.code().name
    message = error.details() or code
    trailing: tuple[tuple[str, str | bytes], ...] = error.trailing_metadata() or ()  # type: ignore[assignment] # its stubs hide that an entry is a pair
    metadata = {key: str(value) for key, value in trailing}
    if _REASON_KEY in metadata:
        return FreetokenError(message, reason=_reason(metadata[_REASON_KEY]))
    match code:
        case "UNAVAILABLE":
            return UnavailableError(
                f"freetokend went away while it was asked ({path}); see `freetokenctl status`."
            )
        case "DEADLINE_EXCEEDED":
            return UnavailableError(
                f"freetokend does not answer on {path}; see its log (of the service: "
                "`journalctl -u freetokend`).",
                reason=Reason.LOADING,
            )
        case "UNIMPLEMENTED":
            return AccessError(
                f"{path} does not offer this: it is a monitor socket, or the daemon has another "
                "version. Use the admin socket (admin.sock beside it)."
            )
        case "RESOURCE_EXHAUSTED":
            return UnavailableError(
                f"too many programs are watching on {path}: {message}", reason=Reason.QUEUE_FULL
            )
    return FreetokenError(f"the daemon answered {code}: {message}")


def _reason(text: str) -> Reason:
    try:
        return Reason(text)
    except ValueError:
        return Reason.INTERNAL  # a newer daemon
