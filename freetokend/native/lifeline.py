"""The inherited socket between control and engine: it carries the pool, then it is the lifeline.

Control sends one message with at most one file descriptor; after that nothing is said on the
socket, and its end of file tells the engine that control is gone.
"""

from __future__ import annotations

import array
import json
import os
import socket
from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import InternalError, UnavailableError
from freetokend.native import _host

LIFELINE_EXIT_CODE: Final = 3
_MESSAGE_LIMIT_BYTES: Final = 4096
_MOST_FDS_COUNT: Final = 4  # more than one is an error, but must be received to be closed


class Lifeline:
    """A native thread that ends this process when the other end of the socket is closed.

    It acts while the interpreter is busy or stuck. It keeps working when this object is dropped;
    only `stop()` ends it.
    """

    def __init__(self, native: _host.Lifeline) -> None:
        self._native = native

    @classmethod
    def start(cls, fd: int, *, exit_code: int = LIFELINE_EXIT_CODE) -> Lifeline:
        """Watch `fd`, which from now on belongs to the lifeline.

        Data that arrives is discarded. Raises `OSError` when the thread cannot be set up.
        """
        os.fstat(fd)  # a number that is not a descriptor must be an error here, not an exit later
        return cls(_host.Lifeline(fd, exit_code))

    def stop(self) -> None:
        """Stop watching and close the descriptor: for an orderly end of the process."""
        self._native.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPool:
    """A pool handed over by control; the receiver owns `fd`."""

    name: str
    length_bytes: int
    fd: int


def send_pool(sock: socket.socket, name: str, length_bytes: int, fd: int) -> None:
    """Hand `fd` (which stays open here too) to the other end. Raises `OSError`."""
    message = {"kind": "pool", "name": name, "length_bytes": length_bytes}
    socket.send_fds(sock, [json.dumps(message).encode()], [fd])


def send_no_pool(sock: socket.socket) -> None:
    """Tell the other end that it gets no pool. Raises `OSError`."""
    sock.send(json.dumps({"kind": "no_pool"}).encode())


def receive_pool(sock: socket.socket) -> ReceivedPool | None:
    """The first message on the socket; None when there is no pool for this engine.

    Honours the socket's timeout. Raises `UnavailableError` when nothing came, `InternalError`
    when the message is not what control sends (received descriptors are closed first).
    """
    try:
        data, fds, flags = _receive(sock)
    except TimeoutError as error:
        raise UnavailableError(
            "the control process sent no pool in time: it may be stuck; start it again"
        ) from error
    except OSError as error:
        raise UnavailableError(f"cannot receive the pool from control: {error}") from error
    if not data and not fds:
        raise UnavailableError("the control process closed the lifeline before sending a pool")
    try:
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise InternalError("the pool message from control was truncated by the kernel")
        return _decode(data, fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    # Not socket.recv_fds: it drops its flags, and the descriptors must not be inherited.
    width_bytes = array.array("i").itemsize
    data, ancillary, flags, _ = sock.recvmsg(
        _MESSAGE_LIMIT_BYTES,
        socket.CMSG_SPACE(_MOST_FDS_COUNT * width_bytes),
        socket.MSG_CMSG_CLOEXEC,
    )
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % width_bytes])
    return data, list(fds), flags


def _decode(data: bytes, fds: list[int]) -> ReceivedPool | None:
    try:
        message = json.loads(data)
    except ValueError as error:
        raise InternalError("the pool message from control is not JSON") from error
    match message:
        case {"kind": "no_pool"}:
            wanted_fds, received = 0, None
        case {"kind": "pool", "name": str(name), "length_bytes": int(length_bytes)} if (
            length_bytes > 0
        ):
            wanted_fds = 1
            received = ReceivedPool(name=name, length_bytes=length_bytes, fd=fds[0] if fds else -1)
        case _:
            raise InternalError("the pool message from control has an unknown form")
    if len(fds) != wanted_fds:
        raise InternalError(
            f"the pool message from control carries {len(fds)} descriptors, not {wanted_fds}"
        )
    return received
