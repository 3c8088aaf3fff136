"""The inherited socketpair of one engine: lifeline, and the way the pool's fd travels.

The control process keeps one end open for as long as it lives; the engine's native lifeline thread
exits on end of file. The first message on it hands over the pool (or says that there is none).
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Final

from freetokend.link.codec import LinkProtocolError

_MAX_MESSAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHandover:
    """The pool file as it crosses: a name for people, its length, and the fd that holds it."""

    name: str
    length_bytes: int
    fd: int


def make_lifeline() -> tuple[socket.socket, socket.socket]:
    """(control's end, the engine's end); message boundaries kept, neither inherited by default."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_pool(lifeline: socket.socket, pool: PoolHandover | None) -> None:
    """Control: the one message after the spawn. The fd stays open here too."""
    if pool is None:
        lifeline.send(json.dumps({"kind": "no_pool"}).encode())
        return
    body = {"kind": "pool", "name": pool.name, "length_bytes": pool.length_bytes}
    socket.send_fds(lifeline, [json.dumps(body).encode()], [pool.fd])


def receive_pool(lifeline: socket.socket) -> PoolHandover | None:
    """Engine: wait for the message of `send_pool`; the caller owns the returned fd.

    Raises `LinkProtocolError` when control went away or sent something else.
    """
    data, fds, _flags, _address = socket.recv_fds(lifeline, _MAX_MESSAGE_BYTES, 1)
    try:
        if not data:
            raise LinkProtocolError("control went away before it handed over the pool")
        body = json.loads(data)
        match body:
            case {"kind": "no_pool"} if not fds:
                return None
            case {"kind": "pool", "name": str(name), "length_bytes": int(length_bytes)} if fds:
                os.set_inheritable(fds[0], False)
                handover = PoolHandover(name=name, length_bytes=length_bytes, fd=fds[0])
                fds = []
                return handover
            case _:
                raise LinkProtocolError(f"control handed over something unknown: {body!r}")
    except ValueError as error:
        raise LinkProtocolError(f"control's hand-over is not JSON: {error}") from None
    finally:
        for fd in fds:
            os.close(fd)
